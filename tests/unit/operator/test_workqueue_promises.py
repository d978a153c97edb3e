"""The queue works over any history: it loses no key with pending work, and every waiter ends.

The queue runs in an event loop whose clock the test sets, so that all time limits are exact.
"""

import asyncio
import contextvars
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from heteroinfer_operator.cluster import ConflictError, ResourceKey
from heteroinfer_operator.errors import HeteroInferError, SpecError
from heteroinfer_operator.workqueue import Backoff, WorkQueue

KEYS = tuple(ResourceKey(namespace="ns", name=name) for name in "abc")
WORKERS, SLOW_S, TIMEOUT_S = 2, 0.5, 20.0
BACKOFF = Backoff(first_s=0.2, max_s=30.0, changed_s=0.5, conflicts_at_once=2)
OUTCOMES: dict[str, Callable[[], float | BaseException | None]] = {
    "done": lambda: None,
    "look again": lambda: 5.0,
    "conflict": lambda: ConflictError("somebody wrote the resource"),
    "wrong spec": lambda: SpecError(["spec.roles must be a list"]),
    "failure": lambda: HeteroInferError("not now", reason="NotNow"),
    "defect": lambda: ValueError("a defect"),
    "cancelled": asyncio.CancelledError,
}
"""Outcomes of a reconcile. A timeout happens without an outcome."""
EXACT_S = 1e-9


class ClockedLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock changes only by `advance`."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 1000.0
        self._dues: set[float] = set()

    def time(self) -> float:
        return self.now_s

    def call_at(  # type: ignore[override]  # the types of callback arguments do not matter here
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        self._dues.add(when)
        return super().call_at(when, callback, *args, context=context)

    def settle(self) -> None:
        """Runs all callbacks that are due."""

        async def turns() -> None:
            for _ in range(20):
                await asyncio.sleep(0)

        self.run_until_complete(turns())

    def advance(self, seconds: float) -> None:
        """Sets the clock forward and runs each timer on the way."""
        until = self.now_s + seconds
        while True:
            self.settle()
            self._dues = {due for due in self._dues if due > self.now_s}
            due = min(self._dues, default=until)
            if due > until:
                break
            self.now_s = due
            if due == until:
                break
        self.now_s = until
        self.settle()


@dataclass(slots=True)
class Expected:
    """The expected behaviour of the queue for one key.

    Attributes:
        start_by: latest start of the next reconcile if a slot is free; None if no reconcile is due.
        not_before: earliest start after a failure.
        failures: consecutive failures.
        conflicts: conflicts since the last success.
        changed: whether the key was added during its reconcile.
        changed_by_others: whether something other than its own reconcile added it.
        later: due times of add_after calls during its reconcile.
        starts: number of started reconciles.
    """

    start_by: float | None = None
    not_before: float = 0.0
    failures: int = 0
    conflicts: int = 0
    changed: bool = False
    changed_by_others: bool = False
    later: list[float] = field(default_factory=list)
    starts: int = 0


@dataclass(slots=True)
class AtWork:
    """A running reconcile, which the test ends. `own_changes` are changes by the reconcile itself."""

    since: float
    own_changes: "asyncio.Queue[None]" = field(default_factory=asyncio.Queue)
    outcome: "asyncio.Future[float | None]" = field(default_factory=asyncio.Future)


class QueueMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        logging.getLogger("heteroinfer_operator.workqueue").setLevel(logging.CRITICAL)
        self.loop = ClockedLoop()
        self.drains = True
        self.expected = {key: Expected() for key in KEYS}
        self.at_work: dict[ResourceKey, AtWork] = {}
        self.broken: list[str] = []
        self.waits: list[tuple[asyncio.Task[None], dict[ResourceKey, int]]] = []

        async def build() -> WorkQueue:
            return WorkQueue(
                self.process,
                workers=WORKERS,
                backoff=BACKOFF,
                reconcile_timeout_s=TIMEOUT_S,
                slow_s=SLOW_S,
            )

        self.queue = self.loop.run_until_complete(build())
        self.running = self.loop.create_task(self.queue.run())
        self.loop.settle()

    async def process(self, key: ResourceKey) -> float | None:
        expected, now = self.expected[key], self.loop.time()
        if key in self.at_work:
            self.broken.append(f"{key} is processed twice at the same time")
        if now < expected.not_before - EXACT_S:
            self.broken.append(f"{key} is tried {expected.not_before - now:g} s too early")
        expected.start_by, expected.not_before, expected.starts = None, 0.0, expected.starts + 1
        work = self.at_work[key] = AtWork(since=now)
        own = asyncio.get_running_loop().create_task(self.change_itself(key, work))
        try:
            look_again_s = await work.outcome
        except ConflictError:
            self.conflicted(expected)
            raise
        except SpecError:
            self.succeeded(expected)
            raise
        except BaseException:
            self.failed(expected)
            raise
        else:
            self.succeeded(expected)
            if look_again_s is not None:
                self.owe(expected, self.loop.time() + look_again_s)
            return look_again_s
        finally:
            own.cancel()
            del self.at_work[key]

    async def change_itself(self, key: ResourceKey, work: AtWork) -> None:
        while True:
            await work.own_changes.get()
            self.queue.add(key)

    def owe(self, expected: Expected, by: float) -> None:
        expected.start_by = by if expected.start_by is None else min(expected.start_by, by)

    def ended(self, expected: Expected) -> None:
        now = self.loop.time()
        for due in expected.later:
            if due <= now:
                expected.changed = expected.changed_by_others = True
            else:
                self.owe(expected, due)
        if expected.changed_by_others or (expected.changed and not expected.failures):
            self.owe(expected, now + (BACKOFF.changed_s if expected.failures else 0.0))
        expected.changed = expected.changed_by_others = False
        expected.later = []

    def succeeded(self, expected: Expected) -> None:
        expected.failures = expected.conflicts = 0
        self.ended(expected)

    def failed(self, expected: Expected) -> None:
        now = self.loop.time()
        expected.failures += 1
        wait_s = BACKOFF.delay_s(expected.failures)
        later = expected.later
        by_others = expected.changed_by_others or any(due <= now for due in later)
        self.ended(expected)
        self.owe(expected, now + wait_s)
        expected.not_before = now + (min(wait_s, BACKOFF.changed_s) if by_others else wait_s)
        expected.not_before = min([expected.not_before, *(due for due in later if due > now)])

    def conflicted(self, expected: Expected) -> None:
        expected.conflicts += 1
        if expected.conflicts > BACKOFF.conflicts_at_once:
            self.failed(expected)
        else:
            self.ended(expected)
            self.owe(expected, self.loop.time())

    def from_outside(self, call: Callable[..., None], *args: object) -> None:
        async def run() -> None:
            call(*args)

        self.loop.run_until_complete(run())

    def note_change(self, key: ResourceKey) -> None:
        expected, now = self.expected[key], self.loop.time()
        if key in self.at_work:
            expected.changed = expected.changed_by_others = True
        else:
            self.owe(expected, now + (BACKOFF.changed_s if expected.failures else 0.0))
            expected.not_before = min(expected.not_before, now)

    @initialize(drains=st.booleans())
    def choose_end(self, drains: bool) -> None:
        self.drains = drains

    @rule(key=st.sampled_from(KEYS))
    def others_change(self, key: ResourceKey) -> None:
        self.note_change(key)
        self.from_outside(self.queue.add, key)

    @rule(key=st.sampled_from(KEYS), delay_s=st.sampled_from((0.0, 0.3, 2.0, 60.0)))
    def add_after(self, key: ResourceKey, delay_s: float) -> None:
        expected, due = self.expected[key], self.loop.time() + delay_s
        if key in self.at_work:
            expected.later.append(due)
        else:
            self.owe(expected, due)
            expected.not_before = min(expected.not_before, due)
        self.from_outside(self.queue.add_after, key, delay_s)

    @rule(keys=st.sets(st.sampled_from(KEYS)))
    def process_all(self, keys: set[ResourceKey]) -> None:
        for key in keys:
            self.note_change(key)
        before = {key: self.expected[key].starts for key in keys}
        self.waits.append((self.loop.create_task(self.queue.process_all(sorted(keys))), before))

    @precondition(lambda self: self.at_work)
    @rule(data=st.data())
    def own_change(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.at_work)))
        self.expected[key].changed = True
        self.at_work[key].own_changes.put_nowait(None)

    @precondition(lambda self: self.at_work)
    @rule(
        data=st.data(),
        outcome=st.sampled_from(sorted(OUTCOMES)).map(lambda name: OUTCOMES[name]()),
    )
    def end(self, data: st.DataObject, outcome: float | BaseException | None) -> None:
        work = self.at_work[data.draw(st.sampled_from(sorted(self.at_work)))]
        if isinstance(outcome, asyncio.CancelledError):
            work.outcome.cancel()
        elif isinstance(outcome, BaseException):
            work.outcome.set_exception(outcome)
        else:
            work.outcome.set_result(outcome)

    @rule(seconds=st.sampled_from((0.2, 0.5, 5.0, 31.0)))
    def time_passes(self, seconds: float) -> None:
        self.loop.advance(seconds)

    @invariant()
    def no_key_is_lost(self) -> None:
        self.loop.settle()
        now = self.loop.time()
        assert not self.broken, self.broken
        assert not self.running.done()
        fresh = [work for work in self.at_work.values() if now - work.since < SLOW_S]
        for key, expected in self.expected.items():
            if key in self.at_work or expected.start_by is None:
                continue
            overdue_s = now - expected.start_by
            # Without a free slot the key waits for slow reconciles. Each round of them takes SLOW_S.
            allowed_s = 0.0 if len(fresh) < WORKERS else len(KEYS) / WORKERS * SLOW_S
            assert overdue_s < allowed_s - EXACT_S, f"{key} should have started {overdue_s:g} s ago"
        for wait, before in self.waits:
            begun = all(self.expected[key].starts > starts for key, starts in before.items())
            assert begun or not wait.done(), "process_all returned before a reconcile"

    def teardown(self) -> None:
        """Stops the queue: in half of the histories during its work, otherwise when all work is done."""
        try:
            if self.drains:
                self.drain()
        finally:
            self.running.cancel()
            self.loop.settle()
            undone = [wait for wait, _ in self.waits if not wait.done()]
            for wait in undone:
                wait.cancel()
            self.loop.settle()
            self.loop.close()
        assert not undone, "process_all still waits although the queue has stopped"

    def drain(self) -> None:
        """Ends all reconciles successfully. Then all waiters end, and the queue keeps no key."""
        for _ in range(20):
            for work in self.at_work.values():
                if not work.outcome.done():
                    work.outcome.set_result(None)
            self.loop.advance(31.0)
        assert all(wait.done() for wait, _ in self.waits), "a waiter never ended"
        assert not any(expected.start_by for expected in self.expected.values())


QueueMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
test_the_queue_keeps_its_promises = QueueMachine.TestCase
