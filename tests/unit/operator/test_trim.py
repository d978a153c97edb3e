"""Converts stored objects to the values that decisions read."""

from datetime import UTC, datetime
from typing import Any

import pytest

from heteroinfer_contract import names
from heteroinfer_operator.cluster import ContainerTermination, ResourceKey
from heteroinfer_operator.kube import trim
from heteroinfer_operator.kube.paths import HETERO_INFERENCE, NODE, POD, NamespacedName, writable_kind
from heteroinfer_operator.kube.trim import PodRequests
from heteroinfer_operator.nodes.demand import effective_requests

OWNER = {"apiVersion": HETERO_INFERENCE.api_version, "kind": names.KIND}


def stored_pod(**status: Any) -> dict[str, Any]:
    return {
        "metadata": {
            "name": "llama-0-1-0",
            "namespace": "ns",
            "uid": "u",
            "creationTimestamp": "2026-11-21T01:02:03Z",
            "labels": {names.LABEL_RESOURCE: "llama", names.LABEL_EPOCH: "1", "app": "x"},
            "ownerReferences": [{"uid": "other"}, {**OWNER, "uid": "owner", "controller": True}],
        },
        "spec": {
            "nodeName": "n1",
            "containers": [{"name": "worker", "ports": [{"name": names.PORT_HEALTH, "containerPort": 8081}]}],
        },
        "status": status,
    }


def terminated(name: str, exit_code: int, message: str = "") -> dict[str, Any]:
    return {
        "name": name,
        "state": {"terminated": {"exitCode": exit_code, "reason": "Error", "message": message}},
    }


def test_reads_the_fields_of_a_running_pod() -> None:
    record = trim.pod_record(
        stored_pod(phase="Running", podIP="10.0.0.1", conditions=[{"type": "Ready", "status": "True"}])
    )
    assert record is not None
    assert (record.key, record.owner_uid) == (ResourceKey(namespace="ns", name="llama"), "owner")
    assert (record.ip, record.health_port) == ("10.0.0.1", 8081)
    assert (record.view.ready, record.view.node, record.view.ended) == (True, "n1", False)
    assert set(record.view.labels) == {names.LABEL_RESOURCE, names.LABEL_EPOCH}


def test_a_resource_lists_managers_of_the_finalizer_of_earlier_versions() -> None:
    metadata = {"namespace": "ns", "name": "llama", "uid": "u", "resourceVersion": "1"}
    fields: dict[str, Any] = {"f:metadata": {"f:finalizers": {".": {}, f'v:"{names.FINALIZER}"': {}}}}
    theirs: dict[str, Any] = {"f:metadata": {"f:finalizers": {'v:"example.test/theirs"': {}}}}
    managed = [
        {"manager": "kopf", "fieldsV1": fields},
        {"manager": "other", "fieldsV1": theirs},
        {"manager": "old", "subresource": "status"},
    ]
    stored = {"metadata": {**metadata, "managedFields": managed}, "spec": {}}
    for view in (trim.resource_view(stored), trim.resource_record(stored).view):
        assert view.finalizer_managers == {"kopf"}
        assert view.status_managers == {"old"}


@pytest.mark.parametrize("annotations", [None, {"app": "x"}, {names.ANNOTATION_IMAGES: "worker:1"}])
def test_a_pod_records_the_images_of_its_epoch(annotations: dict[str, str] | None) -> None:
    """A pod of an older version, or without annotations, does not record them."""
    pod = stored_pod()
    pod["metadata"]["annotations"] = annotations
    assert trim.pod_view(pod).images == (annotations or {}).get(names.ANNOTATION_IMAGES, "")


def test_a_pod_shows_the_resources_set_by_a_limit_range() -> None:
    pod = stored_pod()
    pod["spec"]["containers"][0]["resources"] = {
        "requests": {"cpu": "500m", "memory": "1Gi"},
        "limits": {"cpu": "500m", "memory": "2Gi"},
    }
    assert trim.pod_view(pod).defaulted == ""
    pod["metadata"]["annotations"] = {
        "kubernetes.io/limit-ranger": "LimitRanger plugin set: cpu request for container worker; memory "
        "request for container mesh; cpu, memory limit for container worker; pods limit for container worker"
    }
    assert trim.pod_view(pod).defaulted == "requests cpu=500m and limits cpu=500m, memory=2Gi"


def test_a_pod_without_the_operators_label_is_ignored() -> None:
    pod = stored_pod()
    del pod["metadata"]["labels"]
    assert trim.pod_record(pod) is None


def test_objects_without_the_operators_owner_reference_are_ignored() -> None:
    for owners in ([], [{"apiVersion": "apps/v1", "kind": "ReplicaSet", "uid": "u", "controller": True}]):
        pod = stored_pod(phase="Pending")
        pod["metadata"]["ownerReferences"] = owners
        assert trim.pod_record(pod) is None
        assert trim.child_record(pod) is None
        del pod["spec"]["nodeName"]
        assert trim.pod_requests(pod) is None, "no capacity is reserved for it"


def test_a_child_is_cached_without_unused_fields() -> None:
    child = stored_pod(phase="x")
    child["metadata"]["managedFields"] = [{"manager": "m"}]
    record = trim.child_record(child)
    assert record is not None
    assert record.stored == {
        "metadata": {k: v for k, v in child["metadata"].items() if k != "managedFields"},
        "spec": child["spec"],
    }


def test_a_cached_resource_gives_the_same_view() -> None:
    metadata = {"namespace": "ns", "name": "llama", "uid": "u", "generation": 3, "resourceVersion": "7"}
    managed = [
        {"manager": "kubectl", "operation": "Update", "fieldsV1": {"f:spec": {}}},
        {"manager": "another", "operation": "Update", "subresource": "status", "fieldsV1": {"f:status": {}}},
    ]
    stored = {"metadata": {**metadata, "managedFields": managed}, "spec": {"replicas": 2}}
    record = trim.resource_record(stored)
    assert record.view == trim.resource_view(stored)
    assert record.view.spec == {"replicas": 2}
    assert record.view.status_managers == {"another"}
    assert "fieldsV1" not in record.text
    assert "kubectl" not in record.text


def test_the_workers_termination_takes_precedence_over_other_containers() -> None:
    pod = stored_pod(
        phase="Failed", containerStatuses=[terminated("sidecar", 1, "no"), terminated("worker", 70, "rank 1")]
    )
    assert trim.pod_view(pod).termination == ContainerTermination(
        exit_code=70, reason="Error", message="rank 1"
    )
    running = {"name": "worker", "state": {"running": {}}}
    sidecar_failed = trim.pod_view(stored_pod(containerStatuses=[terminated("sidecar", 1, "no"), running]))
    assert sidecar_failed.termination is not None
    init_done = trim.pod_view(stored_pod(initContainerStatuses=[terminated("copy", 0)]))
    assert init_done.termination is None, "a successful init container does not end the pod"


def test_other_containers_that_run_after_the_worker_are_listed() -> None:
    proxy = {"name": "istio-proxy", "state": {"running": {}}}
    serving = stored_pod(containerStatuses=[proxy, {"name": "worker", "state": {"running": {}}}])
    assert trim.pod_view(serving).still_running == ()
    # A kubelet changes no state of a container until all containers of a deleted pod have ended.
    deleted = {**serving, "metadata": {**serving["metadata"], "deletionTimestamp": "2026-01-01T00:00:00Z"}}
    assert trim.pod_view(deleted).still_running == ("istio-proxy",)
    held = stored_pod(containerStatuses=[proxy, terminated("worker", 0)])
    assert trim.pod_view(held).still_running == ("istio-proxy",)
    over = stored_pod(containerStatuses=[terminated("istio-proxy", 0), terminated("worker", 0)])
    assert trim.pod_view(over).still_running == ()


def test_a_restarted_sidecar_does_not_end_the_pod() -> None:
    """Service meshes add such containers. The kubelet starts them before the others, and restarts them."""
    running = {"name": "worker", "state": {"running": {}}}
    pod = stored_pod(initContainerStatuses=[terminated("proxy", 137)], containerStatuses=[running])
    pod["spec"]["initContainers"] = [{"name": "proxy", "restartPolicy": "Always"}, {"name": "copy"}]
    assert trim.pod_view(pod).termination is None
    pod["status"]["initContainerStatuses"].append(terminated("copy", 2))
    ended = trim.pod_view(pod).termination
    assert ended is not None
    assert ended.exit_code == 2


def test_reads_why_a_pod_does_not_run_yet() -> None:
    unplaced = trim.pod_view(
        stored_pod(
            conditions=[
                {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"}
            ]
        )
    )
    assert unplaced.unschedulable == "0/3 nodes"
    gated = stored_pod(conditions=[{"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}])
    gated["spec"]["schedulingGates"] = [{"name": "example.com/quota"}, {"name": "kueue.x-k8s.io/admission"}]
    held = "blocked by scheduling gate example.com/quota, kueue.x-k8s.io/admission"
    assert trim.pod_view(gated).unschedulable == held
    gated["metadata"]["labels"]["kueue.x-k8s.io/pod-group-name"] = "llama-0-1"
    assert trim.pod_view(gated).unschedulable == f"{held}. Kueue's Workload llama-0-1 shows the reason"
    waiting = {"name": "worker", "state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such"}}}
    assert trim.pod_view(stored_pod(containerStatuses=[waiting])).waiting == ("ImagePullBackOff", "no such")


def test_a_pod_that_is_being_deleted_counts_as_ended() -> None:
    going = stored_pod(phase="Running")
    going["metadata"]["deletionTimestamp"] = "2026-11-21T01:02:04Z"
    assert trim.pod_view(going).ended
    assert trim.pod_view(going).gone_by == datetime(2026, 11, 21, 1, 2, 4, tzinfo=UTC)


@pytest.mark.parametrize("kind", ["DisruptionTarget", "TerminationTarget"])
def test_reads_the_reason_of_a_disrupted_pod(kind: str) -> None:
    condition = {"type": kind, "status": "True", "reason": "Preempted"}
    assert trim.pod_view(stored_pod(conditions=[condition])).disrupted == "Preempted"
    no_longer = {**condition, "status": "False"}
    assert trim.pod_view(stored_pod(conditions=[no_longer])).disrupted == ""


def test_a_pod_has_started_once_its_worker_has_run() -> None:
    waiting = {"name": "worker", "state": {"waiting": {"reason": "ContainerCreating"}}}
    sidecar = {"name": "sidecar", "state": {"running": {}}}
    assert not trim.pod_view(stored_pod(phase="Failed", reason="OutOfcpu")).started
    assert not trim.pod_view(stored_pod(containerStatuses=[waiting, sidecar])).started
    assert trim.pod_view(stored_pod(containerStatuses=[{"name": "worker", "state": {"running": {}}}])).started
    assert trim.pod_view(stored_pod(containerStatuses=[terminated("worker", 0)])).started


def test_effective_requests_equal_those_of_the_scheduler() -> None:
    def asks(cpu: str, **fields: Any) -> dict[str, Any]:
        return {"resources": {"requests": {"cpu": cpu}}, **fields}

    spec = {
        "initContainers": [asks("1"), asks("500m", restartPolicy="Always"), asks("4")],
        "containers": [asks("1"), asks("250m"), {}],
        "overhead": {"cpu": "100m"},
    }
    # The largest init step needs 4 plus the sidecar's 0.5. The containers and the sidecar need 1.75.
    assert effective_requests(spec) == {"cpu": pytest.approx(4.6)}
    assert effective_requests({"containers": [asks("1")], "resources": {"requests": {"cpu": "3"}}}) == {
        "cpu": 3
    }


def test_reads_requests_of_placed_pods_and_reservations_of_ours() -> None:
    pod = stored_pod(phase="Running")
    pod["spec"]["containers"][0]["resources"] = {"limits": {"nvidia.com/gpu": "1"}}
    placed = trim.pod_requests(pod)
    assert placed == PodRequests(node="n1", requests={"nvidia.com/gpu": 1, "pods": 1})
    pod["spec"]["priority"] = -10
    assert trim.pod_requests(pod) == PodRequests(
        node="n1", requests={"nvidia.com/gpu": 1, "pods": 1}, priority=-10
    )
    del pod["spec"]["nodeName"]
    waiting = trim.pod_requests(pod)
    assert waiting is not None
    assert waiting.reservation is not None
    assert (waiting.node, waiting.reservation.demand.name) == ("", "ns/llama-0-1-0")
    assert waiting.reservation.demand.priority == -10
    assert waiting.reservation.demand.requests == {"nvidia.com/gpu": 1, "pods": 1}
    assert (waiting.reservation.uid, waiting.reservation.owner.uid) == ("u", "owner")
    pod["spec"]["schedulingGates"] = [{"name": "example.com/never"}]
    assert trim.pod_requests(pod) is None, "the scheduler does not place a gated pod"
    del pod["spec"]["schedulingGates"]
    pod["metadata"]["name"] = "llama-copy"
    assert trim.pod_requests(pod) is None, "the operator creates no pods with this name"
    pod["metadata"]["name"] = "llama-0-1-0"
    pod["metadata"]["deletionTimestamp"] = "2026-11-21T01:02:04Z"
    assert trim.pod_requests(pod) is None, "the scheduler will never place it"
    del pod["metadata"]["deletionTimestamp"], pod["metadata"]["labels"][names.LABEL_RESOURCE]
    assert trim.pod_requests(pod) is None, "no capacity is reserved for pods of others"
    pod["status"]["phase"] = "Succeeded"
    pod["spec"]["nodeName"] = "n1"
    assert trim.pod_requests(pod) is None


@pytest.mark.parametrize(
    ("ready", "cordoned", "schedulable"),
    [("True", False, True), ("False", False, False), ("True", True, False), ("Unknown", False, False)],
)
def test_a_node_counts_while_ready_and_not_cordoned(ready: str, cordoned: bool, schedulable: bool) -> None:
    node = {
        "metadata": {"name": "n1"},
        "spec": {"unschedulable": cordoned},
        "status": {
            "allocatable": {"cpu": "7910m"},
            "conditions": [{"type": "Ready", "status": ready, "lastTransitionTime": "2026-11-21T01:02:04Z"}],
        },
    }
    view = trim.node_view(node)
    assert (view.schedulable, view.allocatable) == (schedulable, {"cpu": 7.91})
    silent_since = datetime(2026, 11, 21, 1, 2, 4, tzinfo=UTC) if ready == "Unknown" else None
    assert view.unreachable_since == silent_since


def test_builds_the_paths_of_objects() -> None:
    assert POD.path() == "/api/v1/pods"
    assert POD.path("ns", "a", "status") == "/api/v1/namespaces/ns/pods/a/status"
    assert HETERO_INFERENCE.path("ns") == "/apis/heteroinfer.dev/v1alpha1/namespaces/ns/heteroinferences"
    assert NODE.path(None, "n1") == "/api/v1/nodes/n1"
    assert str(NamespacedName(namespace="ns", name="a")) == "ns/a"
    assert writable_kind("Pod") is POD
    with pytest.raises(ValueError, match=r"kind must be one of .* \(got 'Node'"):
        writable_kind("Node")


@pytest.mark.parametrize(
    ("status", "gates", "has_scheduling_state", "reason"),
    [
        ({}, [], False, ""),
        ({"nominatedNodeName": "n"}, [], True, ""),
        ({"conditions": [{"reason": "SchedulingGated"}]}, [{"name": "a/b"}], True, "blocked by scheduling"),
        ({"conditions": [{"reason": "SchedulingGated"}]}, [], False, ""),
        ({"conditions": [{"reason": "SchedulerError", "message": "no extender"}]}, [], True, "no extender"),
    ],
)
def test_reads_whether_a_scheduler_has_looked_at_a_pod(
    status: dict[str, Any], gates: list[dict[str, str]], has_scheduling_state: bool, reason: str
) -> None:
    pod = stored_pod(**status)
    for condition in pod["status"].get("conditions", ()):
        condition |= {"type": "PodScheduled", "status": "False"}
    pod["spec"] |= {
        "schedulingGates": gates,
        "schedulerName": "mine",
        "resourceClaims": [
            {"name": "a", "resourceClaimName": "nic"},
            {"name": "b", "resourceClaimTemplateName": "gpu"},
        ],
    }
    record = trim.pod_record(pod)
    assert record is not None
    assert (record.has_scheduling_state, record.scheduler) == (has_scheduling_state, "mine")
    assert record.view.unschedulable.startswith(reason)
    assert bool(record.view.unschedulable) == bool(reason)
    assert record.resource_claims == ("resource claim nic", "resource claim template gpu")
