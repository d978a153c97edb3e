"""Changes by a webhook that are harmless, and changes that keep a pod out of its group."""

import copy
from collections.abc import Callable
from typing import Any

import pytest

from heteroinfer_contract import names
from heteroinfer_operator.kube.pod_changes import find_changes

SENT: dict[str, Any] = {
    "metadata": {
        "name": "demo-0-1-0",
        "labels": {names.LABEL_RESOURCE: "demo", names.LABEL_GROUP: "0", "team": "a"},
        "ownerReferences": [{"kind": names.KIND, "name": "demo", "uid": "u", "controller": True}],
    },
    "spec": {
        "containers": [
            {
                "name": names.CONTAINER_WORKER,
                "image": "example.test:5000/org/worker:1",
                "command": ["heteroinfer-worker", "run"],
                "env": [
                    {"name": "HETEROINFER_POD", "value": "0"},
                    {"name": "HETEROINFER_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
                    {"name": "HTTP_PROXY", "value": "http://proxy"},
                ],
            }
        ]
    },
}
WORKER = f"spec.containers[{names.CONTAINER_WORKER}]"
Pod = dict[str, Any]


def worker(pod: Pod) -> dict[str, Any]:
    found: dict[str, Any] = pod["spec"]["containers"][0]
    return found


def changed(change: Callable[[Pod], object]) -> list[str]:
    stored = copy.deepcopy(SENT)
    change(stored)
    return find_changes(SENT, stored)


@pytest.mark.parametrize(
    "change",
    [
        lambda pod: None,
        lambda pod: pod["metadata"]["labels"].update({"team": "b", "mesh": "on"}),
        lambda pod: pod["metadata"]["ownerReferences"].append({"kind": "Job", "name": "j", "uid": "j"}),
        lambda pod: pod["spec"]["containers"].insert(0, {"name": "proxy", "image": "mesh:1"}),
        lambda pod: pod["spec"].update(initContainers=[{"name": "init", "image": "mesh:1"}]),
        lambda pod: worker(pod).update(image="mirror.test/example.test/org/worker:1@sha256:0"),
        lambda pod: worker(pod).update(command=["/vault-env"], args=["heteroinfer-worker", "run"]),
        lambda pod: worker(pod)["env"].append({"name": "OTEL", "value": "on"}),
        lambda pod: worker(pod)["env"][1]["valueFrom"]["fieldRef"].update(apiVersion="v1"),
        lambda pod: worker(pod)["env"][2].update(value="http://another"),
        lambda pod: worker(pod).update(resources={"requests": {"cpu": "1"}}, imagePullPolicy="Always"),
    ],
)
def test_harmless_changes_of_a_pod_are_not_reported(change: Callable[[Pod], object]) -> None:
    assert changed(change) == []


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (
            lambda pod: pod["metadata"]["labels"].pop(names.LABEL_RESOURCE),
            f"metadata.labels[{names.LABEL_RESOURCE}]",
        ),
        (
            lambda pod: pod["metadata"]["labels"].update({names.LABEL_GROUP: "1"}),
            f"metadata.labels[{names.LABEL_GROUP}]",
        ),
        (lambda pod: pod["metadata"].pop("ownerReferences"), "metadata.ownerReferences"),
        (lambda pod: pod["metadata"]["ownerReferences"][0].update(uid="v"), "metadata.ownerReferences"),
        (lambda pod: worker(pod).update(name="main"), WORKER),
        (lambda pod: worker(pod).update(image="example.test/org/miner:1"), f"{WORKER}.image"),
        (lambda pod: worker(pod).update(command=["sh"]), f"{WORKER}.command"),
        (lambda pod: worker(pod)["command"].append("--more"), f"{WORKER}.command"),
        (lambda pod: worker(pod)["env"].pop(0), f"{WORKER}.env[HETEROINFER_POD]"),
        (lambda pod: worker(pod)["env"][0].update(value="1"), f"{WORKER}.env[HETEROINFER_POD]"),
    ],
)
def test_changes_that_keep_a_pod_out_of_its_group_are_reported(
    change: Callable[[Pod], object], field: str
) -> None:
    assert changed(change) == [field]


def test_a_pod_without_labels_lacks_each_label_of_the_operator() -> None:
    labels = changed(lambda pod: pod["metadata"].pop("labels"))
    assert labels == [f"metadata.labels[{label}]" for label in (names.LABEL_RESOURCE, names.LABEL_GROUP)]
