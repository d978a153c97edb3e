"""Messages about children that the operator cannot write name the object, the cause and a fix."""

from typing import Any

import pytest

from heteroinfer_contract import names
from heteroinfer_operator.cluster import Action, ApplyObject, CreateObject
from heteroinfer_operator.kube.child_errors import name_held, refusal_message


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({}, "Service tiny belongs to an earlier HeteroInference of this name and still exists. "),
        ({"finalizers": ["a/b"]}, "belongs to an earlier HeteroInference of this name"),
        ({"deletionTimestamp": "2026-01-01T00:00:00Z"}, "Service tiny is being deleted. "),
        (
            {"deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": ["a/b", "c/d"]},
            "is being deleted, but finalizer a/b, c/d blocks it. The controller that owns the finalizer",
        ),
    ],
)
def test_the_message_about_a_name_in_use_has_the_reason(metadata: dict[str, Any], said: str) -> None:
    error = name_held("Service tiny", {"metadata": metadata})
    assert said in str(error)
    assert str(error).endswith("The operator needs this name and waits")


def write(kind: str, **labels: str) -> Action:
    """Returns the write of an object in namespace `team`."""
    metadata = {"name": "tiny", "namespace": "team", "labels": labels}
    manifest = {"apiVersion": "v1", "kind": kind, "metadata": metadata}
    is_applied = kind not in {"Pod", "Secret"}
    return ApplyObject(manifest=manifest) if is_applied else CreateObject(manifest=manifest)


def exceeded(requested: str) -> str:
    return (
        f"forbidden: exceeded quota: small, requested: {requested}, used: {requested}, limited: {requested}"
    )


WORKER = {names.LABEL_COMPONENT: names.COMPONENT_WORKER, names.LABEL_ROLE: "cpu"}
FETCH = {names.LABEL_COMPONENT: names.COMPONENT_FETCH}
RAISE = "Raise the quota small of namespace team"


@pytest.mark.parametrize(
    ("kind", "labels", "refused", "fix"),
    [
        ("Service", {}, exceeded("services=1"), RAISE),
        ("ConfigMap", {}, exceeded("configmaps=1"), RAISE),
        ("Secret", {}, exceeded("count/secrets=1"), RAISE),
        ("NetworkPolicy", {}, exceeded("count/networkpolicies.networking.k8s.io=1"), RAISE),
        ("PodDisruptionBudget", {}, exceeded("count/poddisruptionbudgets.policy=1"), RAISE),
        ("PersistentVolumeClaim", {}, exceeded("requests.storage=5Gi"), "lower spec.model.cache.size"),
        ("PersistentVolumeClaim", {}, exceeded("persistentvolumeclaims=1"), "set spec.model.cache.claimName"),
        (
            "PersistentVolumeClaim",
            {},
            "maximum storage usage per PersistentVolumeClaim is 1Gi, but request is 5Gi",
            "Lower spec.model.cache.size, or raise the limit",
        ),
        (
            "PersistentVolumeClaim",
            {},
            "minimum storage usage per PersistentVolumeClaim is 9Gi, but request is 5Gi",
            "Raise spec.model.cache.size, or lower the minimum",
        ),
        ("Pod", WORKER, exceeded("limits.cpu=4"), f"{RAISE}, or lower resources of role cpu"),
        ("Pod", WORKER, exceeded("pods=1"), f"{RAISE}, or lower pods of the roles or spec.replicas"),
        ("Pod", WORKER, exceeded("limits.cpu=4,count/pods=1"), "or lower pods of the roles"),
        ("Pod", FETCH, exceeded("pods=1"), f"which fetches the model. {RAISE}"),
        (
            "Pod",
            WORKER,
            'pod rejected: RuntimeClass "kata" not found',
            "Create RuntimeClass kata, or correct roles[].template.runtimeClassName of role cpu",
        ),
        (
            "Pod",
            FETCH,
            'pod rejected: RuntimeClass "kata" not found',
            "Create RuntimeClass kata, or correct roles[].template.runtimeClassName",
        ),
        (
            "Pod",
            WORKER,
            "no PriorityClass with name urgent was found",
            "Create PriorityClass urgent, or correct spec.scheduling.priorityClassName",
        ),
    ],
)
def test_a_refused_object_has_a_fix(kind: str, labels: dict[str, str], refused: str, fix: str) -> None:
    message = refusal_message(write(kind, **labels), refused)
    assert message.startswith(f"the API server refuses {kind} tiny: {refused}. ")
    assert fix in message
    if "pods=" in refused:
        assert "resources" not in message.removeprefix(refused)
    if fix == RAISE:
        assert message.endswith(fix)


@pytest.mark.parametrize("kind", ["Service", "PersistentVolumeClaim", "Pod"])
def test_a_refusal_of_unknown_cause_has_no_fix(kind: str) -> None:
    assert refusal_message(write(kind), "denied").endswith(f"{kind} tiny: denied")
