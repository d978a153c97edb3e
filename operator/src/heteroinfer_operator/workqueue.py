"""A work queue that merges repeated keys and runs one reconcile of a resource at a time.

Independent of Kubernetes: the function that processes a key is an argument. Must not import kopf or a client.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Final, TypeAlias

from heteroinfer_contract.printable import printable
from heteroinfer_operator.cluster import (
    Cluster,
    ConflictError,
    Decision,
    PatchStatus,
    ResourceKey,
    ResourceObservation,
)
from heteroinfer_operator.errors import HeteroInferError, SpecError
from heteroinfer_operator.metrics import OperatorMetrics
from heteroinfer_operator.seen_time import SeenTime

logger = logging.getLogger(__name__)

Process: TypeAlias = Callable[[ResourceKey], Awaitable[float | None]]
"""Reconciles a resource; returns seconds until the next reconcile, None to wait for a change."""
Decide: TypeAlias = Callable[[ResourceObservation, datetime], Decision]
"""The pure decision function, such as `reconcile.reconcile`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """Waits after failures of one resource.

    Attributes:
        first_s: wait after the first failure. Each further failure doubles it.
        max_s: longest wait.
        changed_s: longest wait after a failure if others change the resource.
        conflicts_at_once: number of consecutive conflicts after which the queue retries without a wait.
            Further conflicts count as failures.
    """

    first_s: float = 0.2
    max_s: float = 30.0
    changed_s: float = 0.5
    conflicts_at_once: int = 5

    def delay_s(self, failures: int) -> float:
        """Returns the wait after consecutive failures (at least 1)."""
        return min(self.first_s * 2.0 ** min(failures - 1, 32), self.max_s)


RECONCILE_TIMEOUT_S: Final = 120.0
"""Timeout of one reconcile. Several of its dozens of requests may take their own timeout of 30 s."""
SLOW_S: Final = 0.25
"""Time after which a reconcile frees its slot, because it probably waits for an API server or a webhook."""

_MAX_DEFECTS: Final = 100
"""Number of defects of status writes that one process logs at most."""


def build_process(
    cluster: Cluster, decide: Decide, *, monotonic_s: Callable[[], float] = time.monotonic
) -> Process:
    """Builds the reconcile function of one resource: observe, decide, act.

    Args:
        monotonic_s: monotonic clock, in seconds.
    """
    logged: set[tuple[ResourceKey, str]] = set()
    connecting: dict[ResourceKey, SeenTime[tuple[int, int]]] = {}

    def log_defect(key: ResourceKey, defect: str) -> None:
        """Logs the fields of a status that the schema would have refused, once for each resource."""
        if (key, defect) not in logged and len(logged) < _MAX_DEFECTS:
            logged.add((key, defect))
            text = printable(defect)
            logger.error(
                "%s: left invalid fields out of the status: %s. This is a defect of the operator. Report it",
                key,
                text,
            )

    async def process(key: ResourceKey) -> float | None:
        """Reconciles a resource. Returns the seconds until its next reconcile, or None."""
        observation = await cluster.observe(key)
        if observation is None:
            connecting.pop(key, None)
            return None
        times = connecting.setdefault(key, SeenTime())
        connecting_s = times.add_elapsed(monotonic_s())
        decision = decide(replace(observation, connecting_s=connecting_s), datetime.now(UTC))
        times.set_states(decision.connecting)
        for action in decision.actions:
            if isinstance(action, PatchStatus) and action.defect:
                log_defect(key, action.defect)
        retry_s = await cluster.run(observation, decision.actions)
        waits = [wait for wait in (decision.look_again_s, retry_s) if wait is not None]
        return min(waits, default=None)

    return process


@dataclass(slots=True)
class _KeyState:
    """The state of one resource in the queue.

    Attributes:
        waiting: whether the resource is in the queue.
        run: token that identifies the running reconcile, or None.
        changed: whether the resource was added again during the running reconcile.
        changed_by_others: whether code outside the running reconcile added the resource again.
        failures: consecutive failures.
        conflicts: conflicts since the last success.
        not_before: event loop time before which no reconcile starts after a failure; 0 without a failure.
        timer: timer of the next reconcile, or None.
        waiters: futures of `process_all` that the next reconcile sets when it ends.
    """

    waiting: bool = False
    run: object | None = None
    changed: bool = False
    changed_by_others: bool = False
    failures: int = 0
    conflicts: int = 0
    not_before: float = 0.0
    timer: asyncio.TimerHandle | None = None
    waiters: list[asyncio.Future[None]] = field(default_factory=list)

    @property
    def is_idle(self) -> bool:
        """Whether the queue can forget the resource."""
        return not (self.waiting or self.run is not None or self.failures or self.timer or self.waiters)


_RUN: Final[ContextVar[object | None]] = ContextVar("reconcile", default=None)
"""Token of the reconcile that runs the current code. With it, `add` recognizes a reconcile's own changes."""


class WorkQueue:
    """Runs `process` for each added key, never twice at the same time for the same key.

    A key that is added several times before its turn is processed once. A key that is added while it is
    processed is processed once more. After a failure, changes by others shorten the key's back-off. Changes
    by the key's own reconcile do not shorten it, so that a failing reconcile does not restart itself. Use the
    queue from one event loop only.

    Args:
        workers: maximum number of concurrent reconciles, without those that have run for `slow_s`.
        backoff: waits after failures.
        slow_s: time after which a reconcile frees its slot for another reconcile.
    """

    def __init__(
        self,
        process: Process,
        *,
        workers: int = 6,
        backoff: Backoff | None = None,
        reconcile_timeout_s: float = RECONCILE_TIMEOUT_S,
        slow_s: float = SLOW_S,
        metrics: OperatorMetrics | None = None,
    ) -> None:
        self._process = process
        self._slots = asyncio.Semaphore(workers)
        self._backoff = backoff or Backoff()
        self._reconcile_timeout_s = reconcile_timeout_s
        self._slow_s = slow_s
        self._metrics = metrics or OperatorMetrics()
        self._ready: asyncio.Queue[ResourceKey] = asyncio.Queue()
        self._keys: dict[ResourceKey, _KeyState] = {}

    def add(self, key: ResourceKey) -> None:
        """Queues a reconcile of a resource. After a failure, it does not start before `not_before`."""
        state = self._keys.setdefault(key, _KeyState())
        if state.run is not None:
            state.changed = True
            state.changed_by_others = state.changed_by_others or _RUN.get() is not state.run
        elif state.not_before > asyncio.get_running_loop().time():
            self._start_timer(key, state, state.not_before)
        else:
            self._enqueue(key, state)

    def add_after(self, key: ResourceKey, delay_s: float) -> None:
        """Schedules a reconcile after a delay. An earlier timer or change takes precedence."""
        state = self._keys.setdefault(key, _KeyState())
        self._start_timer(key, state, asyncio.get_running_loop().time() + max(delay_s, 0.0))

    async def run(self) -> None:
        """Runs reconciles until cancelled. Then cancels running reconciles at their next await."""
        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    await self._slots.acquire()
                    key = await self._ready.get()
                    group.create_task(self._work_on(key), name=f"reconcile {key}")
        finally:
            for state in self._keys.values():
                self._cancel_timer(state)
                for waiter in state.waiters:
                    waiter.cancel()

    async def process_all(self, keys: Iterable[ResourceKey]) -> None:
        """Reconciles resources and waits until all are done, without a time limit."""
        done: list[asyncio.Future[None]] = []
        for key in keys:
            self.add(key)
            waiter = asyncio.get_running_loop().create_future()
            self._keys[key].waiters.append(waiter)
            done.append(waiter)
        if done:
            await asyncio.wait(done)

    def _enqueue(self, key: ResourceKey, state: _KeyState) -> None:
        """Adds a resource to the queue unless the queue has it already, and cancels its timer."""
        self._cancel_timer(state)
        if not state.waiting:
            state.waiting = True
            self._ready.put_nowait(key)
            self._metrics.queue_length.set(self._ready.qsize())

    def _start_timer(self, key: ResourceKey, state: _KeyState, due_s: float) -> None:
        """Schedules a reconcile, unless an earlier reconcile is scheduled."""
        if state.waiting or (state.timer is not None and state.timer.when() <= due_s):
            return
        self._cancel_timer(state)
        state.timer = asyncio.get_running_loop().call_at(due_s, self._on_timer, key, state)

    def _on_timer(self, key: ResourceKey, state: _KeyState) -> None:
        """Queues a resource whose timer has run out, or marks it as changed if its reconcile runs."""
        state.timer = None
        if state.run is not None:
            # This counts as a change by others, so it starts the next reconcile even after a failure.
            state.changed = state.changed_by_others = True
        else:
            self._enqueue(key, state)

    def _cancel_timer(self, state: _KeyState) -> None:
        if state.timer is not None:
            state.timer.cancel()
            state.timer = None

    async def _work_on(self, key: ResourceKey) -> None:
        """Runs the next reconcile of a resource in a slot. A slow reconcile frees its slot early."""
        state = self._keys[key]
        slot = _ReconcileSlot(self._slots)
        slow = asyncio.get_running_loop().call_later(self._slow_s, slot.give_back)
        waiters, state.waiters = state.waiters, []
        state.waiting, state.run = False, object()
        _RUN.set(state.run)
        self._metrics.queue_length.set(self._ready.qsize())
        try:
            await self._process_once(key, state)
        finally:
            slow.cancel()
            slot.give_back()
            self._finish(key, state)
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)

    def _finish(self, key: ResourceKey, state: _KeyState) -> None:
        """Ends a reconcile, and queues the next one if the resource has changed in the meantime.

        After a failure, only changes by others start a reconcile before the back-off is over.
        """
        needs_reconcile = state.changed_by_others or (state.changed and not state.failures)
        state.run, state.changed, state.changed_by_others = None, False, False
        if needs_reconcile:
            self.add(key)
        if state.is_idle:
            del self._keys[key]

    async def _process_once(self, key: ResourceKey, state: _KeyState) -> None:
        """Runs one reconcile; counts and logs every error.

        Catches all exceptions, because no exception of a reconcile may end the queue.
        """
        started = time.monotonic()
        try:
            async with asyncio.timeout(self._reconcile_timeout_s):
                look_again_s = await self._process(key)
        except ConflictError as error:
            self._handle_conflict(key, state, error)
        except SpecError as error:
            self._count_error(error.reason)
            logger.warning("%s: %s. Waiting for a change of the resource", key, error.message)
            self._reset_failures(state)
        except HeteroInferError as error:
            self._handle_failure(key, state, error.reason, error.message)
        except TimeoutError:
            self._handle_failure(
                key,
                state,
                "PassTimeout",
                f"the reconcile did not finish within {self._reconcile_timeout_s:g} s. If this repeats, "
                "check the API server and its webhooks",
            )
        except asyncio.CancelledError:
            if _is_cancelled():  # the process stops
                raise
            self._handle_failure(key, state, "Cancelled", "a task that the reconcile awaited was cancelled")
        except Exception as error:
            logger.exception("%s: reconcile failed. This is a defect of the operator. Report it", key)
            self._handle_failure(key, state, type(error).__name__, repr(error))
        else:
            self._reset_failures(state)
            if look_again_s is not None:
                self.add_after(key, look_again_s)
        finally:
            self._metrics.reconcile_seconds.observe(time.monotonic() - started)

    def _reset_failures(self, state: _KeyState) -> None:
        state.failures, state.conflicts, state.not_before = 0, 0, 0.0

    def _handle_conflict(self, key: ResourceKey, state: _KeyState, error: ConflictError) -> None:
        """Schedules the next attempt after a conflict. Many conflicts in a row count as a failure."""
        self._count_error("Conflict")
        state.conflicts += 1
        if state.conflicts > self._backoff.conflicts_at_once:
            self._handle_failure(key, state, "ConflictsInARow", str(error))
        else:
            logger.debug("%s: %s. Observing again", key, error)
            self.add_after(key, 0.0)

    def _handle_failure(self, key: ResourceKey, state: _KeyState, reason: str, message: str) -> None:
        """Counts and logs a failure, and schedules the next attempt."""
        self._count_error(reason)
        state.failures += 1
        delay_s = self._backoff.delay_s(state.failures)
        # A change by others may start the next attempt before the back-off is over.
        state.not_before = asyncio.get_running_loop().time() + min(delay_s, self._backoff.changed_s)
        logger.warning("%s: %s: %s. Trying again in %.1f s", key, reason, message, delay_s)
        self.add_after(key, delay_s)

    def _count_error(self, reason: str) -> None:
        self._metrics.reconcile_errors.labels(reason).inc()


@dataclass(slots=True)
class _ReconcileSlot:
    """The slot of one reconcile. `give_back` frees it once."""

    slots: asyncio.Semaphore
    held: bool = True

    def give_back(self) -> None:
        if self.held:
            self.held = False
            self.slots.release()


def _is_cancelled() -> bool:
    """Reports whether the current task itself was cancelled, not a task that it awaits."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
