"""The queue with real coroutines: merging of keys, one reconcile per key, back-off, timers."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable
from datetime import datetime

import pytest

from heteroinfer_contract import metric_names as names
from heteroinfer_operator.cluster import (
    Action,
    ConflictError,
    Decision,
    PatchStatus,
    ResourceKey,
    ResourceObservation,
    ResourceView,
)
from heteroinfer_operator.errors import HeteroInferError, SpecError
from heteroinfer_operator.metrics import OperatorMetrics
from heteroinfer_operator.workqueue import Backoff, Process, WorkQueue, build_process

A, B = (ResourceKey(namespace="ns", name=name) for name in "ab")
QUICK = Backoff(first_s=0.01, max_s=0.04, conflicts_at_once=3)


@contextlib.asynccontextmanager
async def working(
    process: Process,
    *,
    workers: int = 2,
    reconcile_timeout_s: float = 5.0,
    backoff: Backoff = QUICK,
    slow_s: float = 5.0,
) -> AsyncIterator[WorkQueue]:
    queue = WorkQueue(
        process, workers=workers, backoff=backoff, reconcile_timeout_s=reconcile_timeout_s, slow_s=slow_s
    )
    running = asyncio.ensure_future(queue.run())
    try:
        async with asyncio.timeout(5):
            yield queue
    finally:
        running.cancel()
        await asyncio.wait({running})


async def until(check: Callable[[], bool]) -> None:
    while not check():
        await asyncio.sleep(0.001)


async def test_a_key_is_processed_once_and_again_if_added_during_processing() -> None:
    seen: list[ResourceKey] = []
    go = asyncio.Event()

    async def process(key: ResourceKey) -> None:
        seen.append(key)
        await go.wait()

    async with working(process) as queue:
        for _ in range(5):
            queue.add(A)
        await until(lambda: seen == [A])
        for _ in range(5):
            queue.add(A)
        go.set()
        await queue.process_all([B])
        await until(lambda: len(seen) == 3)
        assert sorted(seen) == [A, A, B]


async def test_one_key_never_runs_twice_concurrently_and_does_not_block_others() -> None:
    at_work: set[ResourceKey] = set()
    most = 0

    async def process(key: ResourceKey) -> None:
        nonlocal most
        assert key not in at_work
        at_work.add(key)
        most = max(most, len(at_work))
        queue.add(key) if more[key] else None
        more[key] -= 1
        await asyncio.sleep(0)
        at_work.remove(key)

    more = {A: 20, B: 20}
    async with working(process, workers=8) as queue:
        queue.add(A)
        queue.add(B)
        await until(lambda: more == {A: -1, B: -1})
        assert most == 2


async def test_failures_are_retried_with_growing_waits_up_to_a_maximum() -> None:
    times: list[float] = []

    async def process(key: ResourceKey) -> None:
        times.append(asyncio.get_running_loop().time())
        if len(times) < 6:
            raise HeteroInferError("not now", reason="NotNow")

    async with working(process) as queue:
        queue.add(A)
        await until(lambda: len(times) == 6)
    waits = [after - before for before, after in itertools.pairwise(times)]
    for wait, least in zip(waits, (0.01, 0.02, 0.04, 0.04, 0.04), strict=True):
        assert wait >= least
    assert [Backoff().delay_s(n) for n in (1, 2, 3, 9, 10_000)] == [0.2, 0.4, 0.8, 30.0, 30.0]


async def test_own_changes_of_a_failing_reconcile_do_not_shorten_the_back_off() -> None:
    times: list[float] = []

    async def process(key: ResourceKey) -> None:
        times.append(asyncio.get_running_loop().time())
        queue.add(key)
        if len(times) < 3:
            raise ValueError("a defect")

    async with working(process) as queue:
        queue.add(A)
        await until(lambda: len(times) >= 3)
    assert times[1] - times[0] >= 0.01
    assert times[2] - times[1] >= 0.02


async def test_conflicts_are_retried_at_once_but_not_without_limit() -> None:
    metrics = OperatorMetrics()
    times: list[float] = []

    async def process(key: ResourceKey) -> None:
        times.append(asyncio.get_running_loop().time())
        if len(times) <= 5:
            raise ConflictError("changed")

    queue = WorkQueue(process, workers=1, backoff=Backoff(first_s=0.2, conflicts_at_once=4), metrics=metrics)
    running = asyncio.ensure_future(queue.run())
    queue.add(A)
    async with asyncio.timeout(5):
        await until(lambda: len(times) == 6)
    running.cancel()
    await asyncio.wait({running})
    assert times[4] - times[0] < 0.2, "four at the same time"
    assert times[5] - times[4] >= 0.2, "then as failures"
    errors = names.OPERATOR_RECONCILE_ERRORS_TOTAL
    assert metrics.registry.get_sample_value(errors, {"reason": "Conflict"}) == 5
    assert metrics.registry.get_sample_value(errors, {"reason": "ConflictsInARow"}) == 1


@pytest.mark.parametrize("failures", [1, 2])
async def test_a_conflict_after_failures_is_retried_and_completes_a_resync(failures: int) -> None:
    seen = 0

    async def process(key: ResourceKey) -> None:
        nonlocal seen
        seen += 1
        if seen <= failures:
            raise HeteroInferError("not now", reason="NotNow")
        if seen == failures + 1:
            resync.append(asyncio.ensure_future(queue.process_all([A])))
            await asyncio.sleep(0)
            raise ConflictError("changed")

    resync: list[asyncio.Future[None]] = []
    async with working(process) as queue:
        queue.add(A)
        await until(lambda: seen == failures + 2)
        await resync[0]


async def test_a_change_by_others_shortens_the_back_off() -> None:
    times: list[float] = []

    async def process(key: ResourceKey) -> None:
        times.append(asyncio.get_running_loop().time())
        raise HeteroInferError("not now", reason="NotNow")

    backoff = Backoff(first_s=60.0, max_s=60.0, changed_s=0.01)
    async with working(process, backoff=backoff) as queue:
        queue.add(A)
        await until(lambda: len(times) == 1)
        queue.add(A)
        await until(lambda: len(times) == 2)
        assert times[1] - times[0] >= 0.01


async def test_hanging_reconciles_do_not_block_others() -> None:
    hanging = [ResourceKey(namespace="ns", name=f"hangs-{index}") for index in range(20)]
    seen: list[ResourceKey] = []

    async def process(key: ResourceKey) -> None:
        seen.append(key)
        if key in hanging:
            await asyncio.Event().wait()

    async with working(process, workers=2, slow_s=0.01) as queue:
        for key in hanging:
            queue.add(key)
        await queue.process_all([A])
        assert seen[-1] == A


async def test_a_reconcile_with_a_cancelled_task_is_retried() -> None:
    seen = 0

    async def process(key: ResourceKey) -> None:
        nonlocal seen
        seen += 1
        if seen <= 3:
            gone = asyncio.ensure_future(asyncio.Event().wait())
            gone.cancel()
            await gone

    async with working(process, workers=1) as queue:
        queue.add(A)
        await until(lambda: seen == 4)
        await queue.process_all([B])


async def test_an_invalid_spec_waits_for_a_change() -> None:
    seen = 0

    async def process(key: ResourceKey) -> None:
        nonlocal seen
        seen += 1
        raise SpecError(["spec.roles: got none, expected one"])

    async with working(process) as queue:
        await queue.process_all([A])
        await queue.process_all([B])
        assert seen == 2
        queue.add(A)
        await until(lambda: seen == 3)


async def test_the_earliest_timer_counts_and_a_change_comes_before_any_timer() -> None:
    times: list[float] = []

    async def process(key: ResourceKey) -> float | None:
        times.append(asyncio.get_running_loop().time())
        return 0.03 if len(times) == 1 else None

    async with working(process) as queue:
        started = asyncio.get_running_loop().time()
        queue.add_after(A, 60)
        queue.add_after(A, 0.02)
        queue.add_after(A, 30)
        await until(lambda: len(times) == 2)
        assert 0.02 <= times[0] - started < 5
        assert times[1] - times[0] >= 0.03
        queue.add_after(A, 60)
        queue.add(A)
        await until(lambda: len(times) == 3)


async def test_a_hanging_reconcile_times_out_and_counts_as_a_failure() -> None:
    seen = 0

    async def process(key: ResourceKey) -> None:
        nonlocal seen
        seen += 1
        if seen == 1:
            await asyncio.Event().wait()

    async with working(process, reconcile_timeout_s=0.01) as queue:
        queue.add(A)
        await until(lambda: seen == 2)


async def test_stopping_cancels_the_running_reconcile() -> None:
    cancelled = asyncio.Event()
    begun = asyncio.Event()

    async def process(key: ResourceKey) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async with working(process) as queue:
        queue.add(A)
        await begun.wait()
    assert cancelled.is_set()


class OneResource:
    """A cluster with one resource, for build_process."""

    def __init__(self) -> None:
        self.status: dict[str, object] = {}
        self.there = True

    async def observe(self, key: ResourceKey) -> ResourceObservation | None:
        view = ResourceView(
            key=key,
            uid="u",
            generation=1,
            resource_version="1",
            finalizers=(),
            deleting=False,
            spec={},
            status=self.status,
        )
        return ResourceObservation(resource=view) if self.there else None

    async def run(self, observation: ResourceObservation, actions: "tuple[Action, ...]") -> None:
        for action in actions:
            assert isinstance(action, PatchStatus)
            self.status = dict(action.status)


async def test_a_reconcile_observes_decides_acts_and_returns_the_next_wait() -> None:
    world = OneResource()

    def decide(observation: ResourceObservation, now: datetime) -> Decision:
        assert now.tzinfo is not None
        action = PatchStatus(status={"seen": observation.resource.key.name}, resource_version="1")
        return Decision(actions=(action,), look_again_s=7.0)

    process = build_process(world, decide)  # type: ignore[arg-type]  # a tuple is the Sequence it gets
    assert await process(A) == pytest.approx(7.0)
    assert world.status == {"seen": "a"}
    world.there = False
    assert await process(A) is None
