"""What a resource says is held against its pods: each lie is found, and nothing else."""

import copy
from typing import Any, TypeAlias

import pytest

from heteroinfer_contract import names
from tests.corners.truth import (
    Seen,
    Verdict,
    find_false_conditions,
    find_two_epochs,
    has_run,
    is_worker,
    judge,
)

Said: TypeAlias = dict[str, tuple[str, str]]
"""Status and reason by type of condition."""


def pod(name: str, *, ready: str = "True", **metadata: Any) -> dict[str, Any]:
    owner = {"kind": names.KIND, "name": "life-1"}
    return {
        "metadata": {"name": name, "resourceVersion": "1", "ownerReferences": [owner], **metadata},
        "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": ready}]},
    }


def conditions(said: Said) -> list[dict[str, Any]]:
    serving = {
        "Available": ("True", "Serving"),
        "Ready": ("True", "Serving"),
        "Stalled": ("False", "NotStalled"),
        "Progressing": ("False", "Settled"),
        **said,
    }
    return [
        {"type": kind, "status": status, "reason": reason, "message": "words", "observedGeneration": 3}
        for kind, (status, reason) in serving.items()
    ]


def seen(*pods: dict[str, Any], spec: dict[str, Any] | None = None, said: Said | None = None) -> Seen:
    entries = [{"rank": rank, "pod": f"life-1-0-70-{rank}"} for rank in range(2)]
    status = {
        "observedGeneration": 3,
        "conditions": conditions(said or {}),
        "groups": [{"index": 0, "epoch": 70, "members": entries}],
    }
    resource = {
        "metadata": {"name": "life-1", "generation": 3, "resourceVersion": "9"},
        "spec": spec or {},
        "status": status,
    }
    return Seen(resource=resource, pods={each["metadata"]["name"]: each for each in pods})


BOTH = (pod("life-1-0-70-0"), pod("life-1-0-70-1"))


def test_true_conditions_are_not_reported_as_false() -> None:
    assert judge(seen(*BOTH)) == (Verdict.SERVES, "Serving")
    assert find_false_conditions(seen(*BOTH)) == []


@pytest.mark.parametrize(
    "pods",
    [
        pytest.param(BOTH[:1], id="a pod is missing"),
        pytest.param((BOTH[0], pod("life-1-0-70-1", ready="False")), id="a pod is not ready"),
        pytest.param((BOTH[0], pod("life-1-0-70-1", deletionTimestamp="now")), id="a pod is being deleted"),
        pytest.param((BOTH[0], pod("life-1-0-71-1")), id="a pod of another epoch"),
    ],
)
def test_available_and_ready_without_the_pods_are_reported_as_false(pods: tuple[dict[str, Any], ...]) -> None:
    found = find_false_conditions(seen(*pods))
    assert len(found) == 2
    assert found[0].startswith("Available is True")
    assert found[1].startswith("Ready is True")


def test_unavailable_while_a_group_serves_is_reported_as_false() -> None:
    said = {"Available": ("False", "Starting"), "Ready": ("False", "Starting")}
    assert find_false_conditions(seen(*BOTH, said=said)) == [
        "Available is False, but groups that serve are [0] of 1"
    ]


def test_conditions_of_another_generation_are_reported_as_false() -> None:
    resource = copy.deepcopy(dict(seen(*BOTH).resource))
    resource["metadata"]["generation"] = 4
    found = find_false_conditions(Seen(resource=resource, pods=seen(*BOTH).pods))
    assert len(found) == 5, "four conditions, and the status itself"


def test_ready_and_stalled_at_the_same_time_are_reported_as_false() -> None:
    assert find_false_conditions(seen(*BOTH, said={"Stalled": ("True", "RestartsUsedUp")})) == [
        "Ready and Stalled are both True"
    ]


def test_the_conditions_of_a_suspended_resource_with_pods_are_reported_as_false() -> None:
    said = {"Available": ("False", "Suspended"), "Ready": ("True", "Suspended")}
    assert judge(seen(spec={"suspend": True}, said=said)) == (Verdict.RESTS, "Suspended")
    assert find_false_conditions(seen(spec={"suspend": True}, said=said)) == []
    assert find_false_conditions(seen(*BOTH, spec={"suspend": True}, said=said))[0].startswith(
        "Ready is True and nothing"
    )


@pytest.mark.parametrize(
    ("said", "verdict"),
    [
        ({"Progressing": ("True", "Loading")}, Verdict.MOVES),
        ({"Progressing": ("True", "Waiting")}, Verdict.MOVES),
        ({"Progressing": ("True", "Scheduling")}, Verdict.WAITS),
        ({"Progressing": ("False", "NameTaken")}, Verdict.WAITS),
        ({"Planned": ("False", "NotEnoughMemory")}, Verdict.WAITS),
        ({"Stalled": ("True", "ModelCacheNotGiven")}, Verdict.WAITS),
    ],
)
def test_an_unready_resource_progresses_or_reports_a_reason(said: Said, verdict: Verdict) -> None:
    assert judge(seen(said={"Ready": ("False", "Starting"), **said}))[0] is verdict


def test_a_resource_without_conditions_is_still_moving() -> None:
    assert judge(Seen(resource={"metadata": {"name": "life-1"}, "spec": {}}, pods={}))[0] is Verdict.MOVES


def test_pods_of_two_epochs_are_found_by_name() -> None:
    both = seen(BOTH[0], pod("life-1-0-71-0"), pod("life-1-1-72-0"))
    assert find_two_epochs(both) == ["group 0 has epochs ['70', '71']"]


def test_workers_are_recognized_by_owner_and_name_without_labels() -> None:
    assert is_worker(BOTH[0], "life-1")
    assert not is_worker(BOTH[0], "life-2")
    assert not is_worker(pod("life-1-inspect-abc"), "life-1")


def test_a_pod_has_run_once_its_container_began() -> None:
    stored = pod("life-1-0-70-0")
    assert not has_run(stored)
    stored["status"]["containerStatuses"] = [{"state": {"waiting": {}}}]
    assert not has_run(stored)
    stored["status"]["containerStatuses"] = [{"state": {"terminated": {"exitCode": 0}}}]
    assert has_run(stored)


@pytest.mark.parametrize(
    ("message", "verdict"),
    [
        ("fetching hf://a/b: pod x waits: 0/4 nodes are available: 4 node(s) didn't match", Verdict.WAITS),
        ("fetching hf://a/b: 3 of 5 files", Verdict.MOVES),
        ("pod x waits: 0/4 nodes are available: pod has unbound PersistentVolumeClaims", Verdict.MOVES),
    ],
)
def test_a_fetch_without_a_node_waits(message: str, verdict: Verdict) -> None:
    said: Said = {
        "Ready": ("False", "Pending"),
        "Progressing": ("True", "Pending"),
        "ModelReady": ("Unknown", "Fetching"),
    }
    now = seen(said=said)
    for condition in now.resource["status"]["conditions"]:
        if condition["type"] == "ModelReady":
            condition["message"] = message
    assert judge(now)[0] is verdict
