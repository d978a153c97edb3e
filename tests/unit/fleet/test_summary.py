"""The output of `heteroinfer status` for a resource in each state."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from heteroinfer_operator.api import parse_status
from heteroinfer_operator.cluster import ResourceKey
from heteroinfer_operator.fleet.lines import build_line
from heteroinfer_operator.fleet.summary import ResourceSummary
from tests.cluster.folders import REPOSITORY

NOW = datetime(2026, 11, 27, 12, tzinfo=UTC)
FINE = {
    "Available": "True",
    "CapacityAvailable": "True",
    "Degraded": "False",
    "Failed": "False",
    "ModelReady": "True",
    "Planned": "True",
    "Progressing": "False",
    "Ready": "True",
    "Stalled": "False",
}


def summary(
    odd: dict[str, str] | None = None,
    *,
    spec: dict[str, Any] | None = None,
    group: dict[str, Any] | None = None,
    reasons: dict[str, str] | None = None,
    messages: dict[str, str] | None = None,
) -> ResourceSummary:
    """Returns a resource that serves, with conditions and fields of its group changed.

    Args:
        odd: status of conditions, by type.
        reasons: reasons of conditions, by type.
        messages: messages of conditions, by type.
    """
    conditions = [
        {
            "type": kind,
            "status": (odd or {}).get(kind, state),
            "reason": (reasons or {}).get(kind, "Reason"),
            "message": (messages or {}).get(
                kind, "" if (odd or {}).get(kind, state) == state else f"why {kind}"
            ),
            "lastTransitionTime": f"{NOW - timedelta(minutes=5):%Y-%m-%dT%H:%M:%SZ}",
        }
        for kind, state in FINE.items()
    ]
    members = [
        {"rank": 0, "role": "cpu", "pod": "llama-0-3-0", "node": "a", "ready": True, "stepMs": 40.0},
        {
            "rank": 1, "role": "gpu", "pod": "llama-0-3-1", "node": "b", "ready": True,
            "lockedMemoryBytes": 4096, "lockedMemoryLimitBytes": 65536,
            "transports": ["ranks:nccl_net_socket"],
        },
    ]  # fmt: skip
    raw = {
        "observedGeneration": 2,
        "readyReplicas": 1,
        "replicas": 1,
        "updatedReplicas": 1,
        "endpoint": "http://llama.ml.svc:8000/v1",
        "model": {"phase": "Ready", "commit": "0123456789abcdef"},
        "summary": {"groups": "1/1", "stepMs": "43.1", "predictedStepMs": "40.0", "slowestRank": "0 (cpu)"},
        "conditions": conditions,
        "groups": [{"index": 0, "epoch": 3, "phase": "Ready", "members": members, **(group or {})}],
    }
    manifest = {
        "metadata": {
            "namespace": "ml",
            "name": "llama",
            "generation": 2,
            "creationTimestamp": "2026-11-25T12:00:00Z",
        },
        "spec": {"model": {"uri": "hf://org/llama"}, **(spec or {})},
    }
    status = parse_status(raw)
    line = build_line(ResourceKey(namespace="ml", name="llama"), status, {})
    return ResourceSummary(manifest=manifest, status=status, line=line)


def shown(found: ResourceSummary, *, verbose: bool = False) -> str:
    return "\n".join(found.render(NOW, verbose=verbose))


def test_a_resource_that_serves_has_no_conditions_that_need_attention() -> None:
    text = shown(summary())
    assert "Conditions" not in text
    assert "Model        hf://org/llama (Ready, commit 0123456789ab)" in text
    assert "State        Available, Ready (Reason)" in text
    assert "Groups       1 of 1 ready" in text
    assert "Decode step  43.1 ms (predicted 40.0 ms), slowest rank 0 (cpu)" in text
    assert "Age          2d" in text
    assert text.endswith("Next step\n  watch the ranks: heteroinfer top llama -n ml")
    assert "llama-0-3-1" not in text
    detailed = shown(summary(), verbose=True)
    assert "0.0 MiB of 0.1 MiB  ranks:nccl_net_socket  llama-0-3-1" in detailed
    assert detailed.count("5m") == len(FINE), "all conditions"


def test_the_page_shows_the_output_for_a_resource_that_serves() -> None:
    page = (REPOSITORY / "docs" / "user" / "troubleshoot.md").read_text()
    assert shown(summary()).replace("(Reason)", "(Serving)") in page


@pytest.mark.parametrize(
    ("odd", "step"),
    [
        ({"Failed": "True", "Stalled": "True"}, "heteroinfer logs llama -n ml --previous"),
        ({"Stalled": "True"}, "heteroinfer plan -f FILE"),
        ({"CapacityAvailable": "False"}, "heteroinfer check"),
        ({"ModelReady": "False"}, "the condition ModelReady"),
        ({"Progressing": "True", "Ready": "False"}, "heteroinfer top llama -n ml"),
    ],
)
def test_conditions_that_need_attention_lead_to_the_next_step(odd: dict[str, str], step: str) -> None:
    found = summary(odd)
    assert {each.type for each in found.unexpected_conditions} == set(odd)
    assert step in found.next_steps[0]
    text = shown(found)
    assert all(f"why {kind}" in text for kind in odd)


@pytest.mark.parametrize("reason", ["ErrImagePull", "ImagePullBackOff", "InvalidImageName"])
def test_a_pod_without_its_image_leads_to_the_fix_of_the_image(reason: str) -> None:
    group = {"phase": "Starting", "message": f"pod llama-0-3-0 waits: {reason}: no such image"}
    found = summary({"Ready": "False", "Progressing": "True"}, group=group)
    assert found.next_steps == (
        (
            "a pod waits for its image: correct spec.engine.image or the chart's workerImages, push the "
            "image, or undo the change of the spec"
        ),
    )
    pulling = summary(
        {"Ready": "False"}, group={"phase": "Starting", "message": "pod a waits: ContainerCreating"}
    )
    assert pulling.next_steps == ("watch the ranks: heteroinfer top llama -n ml",)


def test_a_pod_with_an_unbound_claim_leads_to_the_storage_classes() -> None:
    message = "pod a waits: claim models (fast, 5Gi) is not bound: no event reports the reason. Fix the claim"
    of_model = summary({"Ready": "False", "ModelReady": "Unknown"}, messages={"ModelReady": message})
    found = summary({"Ready": "False"}, group={"phase": "Starting", "message": message})
    assert of_model.next_steps == found.next_steps
    assert found.next_steps == (
        "a pod waits for its claim: solve the problem that the message describes",
        "list the storage classes: kubectl get storageclass",
    )


def test_a_refusal_by_the_installation_leads_to_a_test_with_its_values() -> None:
    refused = summary({"Stalled": "True"}, reasons={"Stalled": "HostPathNotAllowed"})
    assert refused.next_steps[1] == (
        "for the test, read what the installation allows: helm get values RELEASE -n NAMESPACE --all -o yaml "
        "> VALUES. Then add --chart-values VALUES"
    )
    assert len(summary({"Stalled": "True"}).next_steps) == 1


def test_a_message_is_shown_once() -> None:
    cause = "the ranks are connecting"
    messages = {"Available": f"group 0: {cause}", "Ready": f"group 0: {cause}", "Progressing": "another"}
    odd = {"Available": "False", "Ready": "False", "Progressing": "True"}
    lines = shown(summary(odd, group={"phase": "Starting", "message": cause}, messages=messages)).splitlines()
    assert [line.rpartition("  ")[2] for line in lines if line.startswith("  State")] == [
        f"not Available, not Ready (Reason): group 0: {cause}"
    ]
    assert [line.rpartition("  ")[2] for line in lines if "Reason  " in line] == [
        "(see State)", "another", "(see State)",
    ]  # fmt: skip
    assert "  0      3      Starting  0         -         (see State)" in lines


def test_a_resource_without_ranks_has_no_table_of_ranks() -> None:
    assert "\nRanks\n" not in shown(summary({"Ready": "False"}, group={"phase": "Pending", "members": []}))
    assert "\nRanks\n" in shown(summary())


def test_a_suspended_resource_counts_as_healthy() -> None:
    found = summary(
        {"Available": "False", "Planned": "Unknown", "CapacityAvailable": "Unknown"}, spec={"suspend": True}
    )
    assert found.unexpected_conditions == ()
    assert found.next_steps == ("start the groups again: heteroinfer resume llama -n ml",)


def test_the_last_failure_is_shown_and_with_verbose_all_failures() -> None:
    failures = [
        {
            "epoch": epoch,
            "time": "2026-11-27T11:00:00Z",
            "reason": "RankExited",
            "message": f"cause {epoch}",
            "rank": 1,
        }
        for epoch in (1, 2)
    ]
    found = summary({"Ready": "False"}, group={"failures": failures, "phase": "Starting"})
    assert "cause 2" in shown(found)
    assert "cause 1" not in shown(found)
    assert "cause 1" in shown(found, verbose=True)
    assert "heteroinfer logs llama -n ml --previous" in found.next_steps[0]


def test_the_state_is_a_sentence_before_an_operator_acted_and_during_deletion() -> None:
    found = summary()
    empty = parse_status({})
    new = ResourceSummary(manifest=found.manifest, status=empty, line=build_line(found.line.key, empty, {}))
    assert "no operator has acted on this resource yet" in shown(new)
    assert "heteroinfer check" in new.next_steps[0]
    found.manifest["metadata"]["deletionTimestamp"] = "2026-11-27T11:59:00Z"
    assert "being deleted" in shown(found)
    assert "kubectl get pods -n ml" in found.next_steps[0]


def test_json_has_the_conditions_and_the_next_steps() -> None:
    value = summary({"Stalled": "True"}).dump()
    assert value["unexpectedConditions"] == ["Stalled"]
    assert value["model"]["uri"] == "hf://org/llama"
    assert value["groups"][0]["ranks"][1]["pod"] == "llama-0-3-1"
    assert len(value["conditions"]) == len(FINE)
    assert value["nextSteps"]
