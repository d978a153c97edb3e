"""Tracks the pods that never existed."""

from typing import Any

from heteroinfer_contract import names
from heteroinfer_operator.kube.unmade_pods import UnmadePods


def pod(name: str = "demo-0-7-1", *, plan: str = "p", hint: str = "") -> dict[str, Any]:
    _, group, epoch, _ = name.split("-")
    labels = {
        names.LABEL_GROUP: group,
        names.LABEL_EPOCH: epoch,
        names.LABEL_PLAN: plan,
        names.LABEL_REVISION: "r",
    }
    return {"metadata": {"name": name, "labels": labels}, "spec": {"nodeName": hint}}


def test_a_pod_is_unmade_from_the_decision_until_it_is_created_or_refused() -> None:
    pods = UnmadePods()
    assert pods.names() == frozenset()
    pods.want(pod())
    assert pods.names() == {"demo-0-7-1"}
    assert not pods.was_asked("demo-0-7-1")
    pods.note_asked("demo-0-7-1")
    assert pods.was_asked("demo-0-7-1")
    assert pods.names() == {"demo-0-7-1"}
    pods.settle("demo-0-7-1")
    assert pods.names() == frozenset()
    assert not pods.was_asked("demo-0-7-1")


def test_a_pod_is_created_from_its_first_manifest_while_plan_and_revision_are_the_same() -> None:
    pods = UnmadePods()
    pods.want(pod(hint="a"))
    pods.note_asked("demo-0-7-1")
    assert pods.want(pod(hint="")) == pod(hint="a")
    assert pods.was_asked("demo-0-7-1")
    assert pods.want(pod(plan="another")) == pod(plan="another")
    assert not pods.was_asked("demo-0-7-1")


def test_pods_of_epochs_that_are_over_are_forgotten() -> None:
    pods = UnmadePods()
    for name in ("demo-0-7-1", "demo-0-8-1", "demo-0-9-1", "demo-1-7-1", "demo-10-7-1"):
        pods.want(pod(name))
    pods.note_asked("demo-0-8-1")
    pods.forget_before({0: 8, 1: 7, 10: 8})
    assert pods.names() == {"demo-0-8-1", "demo-0-9-1", "demo-1-7-1"}
    assert pods.unasked() == {"demo-0-9-1", "demo-1-7-1"}
