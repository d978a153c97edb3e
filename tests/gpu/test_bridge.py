"""Tests the bridge between a GPU rank and CPU ranks, with the scenarios of tests/integration/bridge."""

from dataclasses import replace

import pytest

from tests.integration.bridge.bridge_ranks import Group, outcomes, running
from tests.integration.bridge.calls import DTYPES, OPERATIONS, Call
from tests.integration.bridge.scenarios import (
    LARGE,
    check_differences,
    check_thousand_calls,
    differing_calls,
    every_operation,
)

pytestmark = pytest.mark.timeout(180)

PAIR = ("cuda:0", "cpu")
GROUPS = [
    pytest.param(Group(devices=devices, share_host=share), id=f"{path}-{'.'.join(devices)}")
    for path, share in (("shared_memory", True), ("gloo", False))
    for devices in (PAIR, ("cuda:0", "cpu", "cpu"))
]


@pytest.mark.parametrize("group", GROUPS)
def test_every_operation_gives_the_result_of_torch(group: Group) -> None:
    calls = every_operation(len(group.devices))
    assert {call.operation for call in calls} == set(OPERATIONS)
    assert {call.dtype for call in calls} == set(DTYPES)
    done = outcomes(group, "calls", calls=[call.to_json() for call in calls])
    assert [one["done"] for one in done] == [len(calls)] * len(group.devices)
    assert len({one["digest"] for one in done}) == 1


@pytest.mark.parametrize("group", GROUPS)
def test_tensors_around_each_limit_between_copy_methods_are_right(group: Group) -> None:
    """Tensors up to 256 KiB are mapped, up to 4 MiB copied, and larger ones sent in parts.

    They have two and three dimensions.
    """
    elements = (1, 7, 4096, 131_071, 131_072, 131_073, 1 << 20, (2 << 20) - 1, (2 << 20) + 1)
    calls = [Call(shape=(1, 1, size), step=index) for index, size in enumerate(elements)]
    calls += [Call(shape=(rows, 4096), dtype="bfloat16") for rows in (1, 3, 16, 33, 300, 1025)]
    calls += LARGE(len(group.devices))
    done = outcomes(group, "calls", calls=[call.to_json() for call in calls])
    assert [one["done"] for one in done] == [len(calls)] * len(group.devices)
    assert len({one["digest"] for one in done}) == 1


@pytest.mark.parametrize("group", GROUPS)
def test_results_of_a_thousand_random_calls_are_equal_bit_by_bit(group: Group) -> None:
    done = outcomes(group, "calls", seed=20261121, count=1000)
    assert len(done) == len(group.devices)
    check_thousand_calls(done)


@pytest.mark.parametrize("group", GROUPS)
def test_both_ranks_report_that_their_calls_differ(group: Group) -> None:
    check_differences(outcomes(group, "differ", differences=differing_calls(len(group.devices))))


@pytest.mark.parametrize("lost", [0, 1], ids=PAIR)
@pytest.mark.parametrize("share_host", [True, False], ids=["shared_memory", "gloo"])
def test_the_other_rank_reports_a_killed_rank(share_host: bool, lost: int) -> None:
    group = replace(Group(devices=PAIR), share_host=share_host, timeout_s=3.0)
    with running(group, "until_error", elements=1000) as ranks:
        for rank in ranks:
            while "ready" not in rank.next_event():
                pass
        ranks[lost].kill()
        reported = ranks[1 - lost].next_event()
    assert (reported["error"], reported["peer"]) == ("PeerLostError", lost)


@pytest.mark.parametrize("group", GROUPS)
def test_announcements_and_tensors_arrive_at_other_ranks(group: Group) -> None:
    reported = outcomes(group, "announcements", count=200)
    assert [one["received"] for one in reported[1:]] == [200] * (len(group.devices) - 1)
    assert [one["done"] for one in outcomes(group, "mail")] == [True] * len(group.devices)
