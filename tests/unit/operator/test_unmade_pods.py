"""Tracks the pods that never existed."""

from typing import Any

from heteroinfer_contract import names
from heteroinfer_operator.kube.unmade_pods import NeverCreatedPods


def pod(name: str = "demo-0-7-1", *, plan: str = "p", hint: str = "") -> dict[str, Any]:
    _, group, epoch, _ = name.split("-")
    labels = {
        names.LABEL_GROUP: group,
        names.LABEL_EPOCH: epoch,
        names.LABEL_PLAN: plan,
        names.LABEL_REVISION: "r",
    }
    return {"metadata": {"name": name, "labels": labels}, "spec": {"nodeName": hint}}


def test_a_pod_counts_as_never_created_from_the_decision_until_it_is_created_or_refused() -> None:
    pods = NeverCreatedPods()
    assert pods.names() == frozenset()
    pods.add(pod())
    assert pods.names() == {"demo-0-7-1"}
    assert not pods.is_requested("demo-0-7-1")
    pods.record_request("demo-0-7-1")
    assert pods.is_requested("demo-0-7-1")
    assert pods.names() == {"demo-0-7-1"}
    pods.forget("demo-0-7-1")
    assert pods.names() == frozenset()
    assert not pods.is_requested("demo-0-7-1")


def test_a_pod_is_created_from_its_first_manifest_while_plan_and_revision_are_the_same() -> None:
    pods = NeverCreatedPods()
    pods.add(pod(hint="a"))
    pods.record_request("demo-0-7-1")
    assert pods.add(pod(hint="")) == pod(hint="a")
    assert pods.is_requested("demo-0-7-1")
    assert pods.add(pod(plan="another")) == pod(plan="another")
    assert not pods.is_requested("demo-0-7-1")


def test_pods_of_epochs_that_are_over_are_forgotten() -> None:
    pods = NeverCreatedPods()
    for name in ("demo-0-7-1", "demo-0-8-1", "demo-0-9-1", "demo-1-7-1", "demo-10-7-1"):
        pods.add(pod(name))
    pods.record_request("demo-0-8-1")
    pods.forget_earlier_epochs({0: 8, 1: 7, 10: 8})
    assert pods.names() == {"demo-0-8-1", "demo-0-9-1", "demo-1-7-1"}
    assert pods.never_requested() == {"demo-0-9-1", "demo-1-7-1"}
