"""A reconcile also counts the time of connecting ranks and logs defects of statuses."""

from datetime import datetime

import pytest

from heteroinfer_operator.cluster import Decision, PatchStatus, ResourceKey, ResourceObservation
from heteroinfer_operator.reconcile.startup import CHECK_EVERY_S
from heteroinfer_operator.seen_time import MAX_GAP_S
from heteroinfer_operator.workqueue import build_process
from tests.unit.operator.test_workqueue import OneResource

KEY = ResourceKey(namespace="ns", name="a")


async def test_a_reconcile_gets_the_seconds_for_which_ranks_have_been_connecting() -> None:
    world, passed_s = OneResource(), 1000.0
    seen: list[dict[tuple[int, int], float]] = []

    def decide(observation: ResourceObservation, now: datetime) -> Decision:
        seen.append(dict(observation.connecting_s))
        return Decision(connecting=frozenset({(0, 7)}))

    process = build_process(world, decide, monotonic_s=lambda: passed_s)  # type: ignore[arg-type]  # run takes a tuple
    for gap_s in (0.0, 15.0, 20.0, 3600.0):
        passed_s += gap_s
        await process(KEY)
    assert seen == [{}, {(0, 7): 15.0}, {(0, 7): 35.0}, {(0, 7): 35.0 + MAX_GAP_S}]
    assert MAX_GAP_S > CHECK_EVERY_S
    world.there = False
    await process(KEY)
    world.there = True
    await process(KEY)
    assert seen[-1] == {}, "another resource has the name now"


async def test_a_defect_of_a_status_is_logged_once_and_cannot_forge_a_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def decide(observation: ResourceObservation, now: datetime) -> Decision:
        write = PatchStatus(status={}, resource_version="1", defect="status.groups[0].epoch: 7\n\x1b[2J")
        return Decision(actions=(write,))

    process = build_process(OneResource(), decide)  # type: ignore[arg-type]  # run takes a tuple
    await process(KEY)
    await process(KEY)
    (record,) = caplog.records
    assert record.getMessage() == (
        "ns/a: left invalid fields out of the status: status.groups[0].epoch: 7\\n\\x1b[2J. "
        "This is a defect of the operator. Report it"
    )
