"""The status fits into etcd with any number of groups, ranks, failures and plans."""

import json

import pytest

from heteroinfer_operator.api import GroupStatus, HeteroInferenceStatus
from heteroinfer_operator.reconcile import transitions
from heteroinfer_operator.reconcile.status_size import LEFT_OUT, fit_groups, fit_plans
from tests.largest_status import build_largest_status

MAX_BYTES = 1_400_000
"""Share of etcd's limit of 1.5 MiB (1,572,864 bytes); the rest is for the spec."""


def written(status: HeteroInferenceStatus) -> int:
    return len(json.dumps(status.dump(), separators=(",", ":")))


def fitted(status: HeteroInferenceStatus) -> HeteroInferenceStatus:
    return status.model_copy(update={"groups": fit_groups(status.groups), "plans": fit_plans(status.plans)})


def test_the_largest_status_fits_and_keeps_the_input_of_decisions() -> None:
    largest = build_largest_status()
    assert written(largest) > 2 * 1_572_864, "it does not fit"
    status = fitted(largest)
    assert written(status) < MAX_BYTES

    def decided_on(group: GroupStatus) -> list[tuple[object, ...]]:
        return [(rank.rank, rank.pod, rank.started, rank.ready) for rank in group.members]

    assert list(map(decided_on, status.groups)) == list(map(decided_on, largest.groups))
    newest = max((f for group in status.groups for f in group.failures), key=lambda failure: failure.time)
    assert newest.message != LEFT_OUT
    kept = [(f.epoch, f.time, f.reason, f.counted) for group in status.groups for f in group.failures]
    assert kept == [(f.epoch, f.time, f.reason, f.counted) for g in largest.groups for f in g.failures]
    assert fitted(status) == status, "otherwise every reconcile would write it"


def test_a_usual_status_is_complete() -> None:
    largest = build_largest_status()
    usual = largest.model_copy(
        update={
            "groups": tuple(g.model_copy(update={"failures": g.failures[:2]}) for g in largest.groups[:20]),
            "plans": largest.plans[:2],
        }
    )
    assert fitted(usual) == without_locked_memory_and_transports_from(17, usual), (
        "most ranks have their locked memory"
    )


def without_locked_memory_and_transports_from(
    first: int, status: HeteroInferenceStatus
) -> HeteroInferenceStatus:
    groups = (
        *status.groups[:first],
        *map(transitions.without_locked_memory_and_transports, status.groups[first:]),
    )
    return status.model_copy(update={"groups": groups})


@pytest.mark.parametrize(("character", "escaped_bytes"), [("<", 6), ('"', 2), ("\\", 2), ("\n", 2), ("é", 2)])
def test_json_escapes_count_towards_the_size(character: str, escaped_bytes: int) -> None:
    message = character * 1024
    largest = build_largest_status()
    escaped = tuple(
        group.model_copy(
            update={
                "failures": tuple(f.model_copy(update={"message": message}) for f in group.failures),
            }
        )
        for group in largest.groups
    )
    words = [f.message for group in fit_groups(escaped) for f in group.failures]
    assert 0 < sum(escaped_bytes * len(word) for word in words if word != LEFT_OUT) < 96_000
