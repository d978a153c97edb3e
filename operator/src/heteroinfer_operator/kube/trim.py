"""Converts stored Kubernetes objects to the values that decisions read. Pure.

Each function accepts any JSON and raises only UnreadableError, because other clients store objects, too.
4,000 pods take 1.3 MiB as trimmed values, but 355 MiB as dicts (2026-11-21).
"""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from heteroinfer_contract import names
from heteroinfer_contract.errors import ContractError
from heteroinfer_contract.model_fetch import CacheCleanup
from heteroinfer_operator.cluster import (
    OVER_PHASES,
    ContainerTermination,
    Manifest,
    PodView,
    ResourceKey,
    ResourceView,
    Waiting,
)
from heteroinfer_operator.kube.limit_ranges import find_limit_range_values
from heteroinfer_operator.kube.paths import NamespacedName
from heteroinfer_operator.manifests.gang import KUEUE_POD_GROUP
from heteroinfer_operator.manifests.identity import Owner, labels_of_name
from heteroinfer_operator.nodes.demand import PODS, PodDemand, Taint, effective_requests, pod_demand
from heteroinfer_operator.nodes.image_volumes import describe_old_program
from heteroinfer_operator.nodes.node_view import NodeView
from heteroinfer_operator.stored_fields import (
    EARLIEST,
    as_amounts,
    as_integer,
    as_moment,
    as_name,
    as_object,
    as_objects,
    as_text,
    as_text_map,
    as_texts,
)

_CONDITION_TAINTS: Final = frozenset(
    f"node.kubernetes.io/{name}" for name in ("not-ready", "unreachable", "unschedulable")
)
"""Taints that repeat a node's conditions and `unschedulable`."""
_METADATA_KEPT: Final = frozenset(
    {"namespace", "name", "uid", "generation", "resourceVersion", "finalizers", "deletionTimestamp"}
)
_FINALIZER_FIELD: Final = f'v:"{names.FINALIZER}"'
"""The finalizer of earlier versions, in the notation of `managedFields`."""
_UNKNOWN: Final = "Unknown"
"""Kubernetes' phase of a pod whose state is unknown."""
_GATED: Final = "SchedulingGated"
_WITH_CAUSE: Final = frozenset({"Unschedulable", "SchedulerError"})
"""Reasons of PodScheduled=False whose message states why the scheduler found no node (`core/v1/types.go`)."""
_DISRUPTIONS: Final = ("DisruptionTarget", "TerminationTarget")
"""Conditions of a pod that Kubernetes or Kueue removes although the pod has not failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceRecord:
    """A HeteroInference without its managedFields, as JSON text.

    The text takes a tenth of the memory of the parsed object.

    Attributes:
        text: "" if another operator serves the resource.
    """

    key: ResourceKey
    text: str

    @property
    def is_ours(self) -> bool:
        """Whether this operator serves the resource."""
        return self.text != ""

    @property
    def view(self) -> ResourceView:
        """The fields of the resource that decisions use."""
        return resource_view(json.loads(self.text))


@dataclass(frozen=True, slots=True, kw_only=True)
class PodRecord:
    """A pod of a resource, with values that only this package needs.

    Attributes:
        key: the resource that the pod's label names.
        ip: "" until the pod gets an address.
        health_port: port of the pod's supervisor, or 0.
        grace_s: grace period of a pod that is being deleted, in seconds.
        claims: names of the PersistentVolumeClaims that the pod mounts.
        scheduler: name of the pod's scheduler.
        has_scheduling_state: whether the status shows that a scheduler has handled the pod, or that a
            scheduling gate blocks the pod.
        resource_claims: kinds and names of the resource claims and their templates that the pod uses, such
            as `resource claim nic`.
    """

    view: PodView
    key: ResourceKey
    owner_uid: str
    ip: str
    health_port: int
    grace_s: float = 0.0
    claims: tuple[str, ...] = ()
    scheduler: str = ""
    has_scheduling_state: bool = False
    resource_claims: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PodReservation:
    """Capacity that is reserved for a pod of a HeteroInference that has no node yet."""

    uid: str
    owner: Owner
    demand: PodDemand


@dataclass(frozen=True, slots=True, kw_only=True)
class PodRequests:
    """Resources that a pod uses on its node, or that are reserved for a pod without a node.

    Attributes:
        node: name of the pod's node, or "".
        requests: by resource name. Bytes for memory, cores for cpu, counts for devices, 1 for `pods`.
        reservation: set for a pod of a HeteroInference that has no node yet; otherwise None.
    """

    node: str
    requests: Mapping[str, float]
    reservation: PodReservation | None = None
    priority: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildRecord:
    """A child other than a pod as stored, without its managedFields and status, as JSON text."""

    text: str
    key: ResourceKey
    owner_uid: str

    @property
    def stored(self) -> Manifest:
        """The parsed object."""
        return as_object(json.loads(self.text), "object")


def resource_record(stored: Manifest, *, operator_class: str = "") -> ResourceRecord:
    """Builds the cache record of a HeteroInference.

    Args:
        operator_class: class of this operator; the record of another class has no text.
    """
    view = resource_view(stored)
    if view.spec.get("operatorClass", "") != operator_class:
        return ResourceRecord(key=view.key, text="")
    metadata = {name: value for name, value in stored["metadata"].items() if name in _METADATA_KEPT}
    # Of managedFields, keep only the managers that `resource_view` reads.
    metadata["managedFields"] = [
        {"manager": manager, "subresource": "status"} for manager in sorted(view.status_managers)
    ]
    metadata["managedFields"] += [
        {"manager": manager, "fieldsV1": {"f:metadata": {"f:finalizers": {_FINALIZER_FIELD: {}}}}}
        for manager in sorted(view.finalizer_managers)
    ]
    kept = {"metadata": metadata, "spec": stored.get("spec"), "status": stored.get("status")}
    return ResourceRecord(key=view.key, text=json.dumps(kept, separators=(",", ":")))


def resource_view(stored: Manifest) -> ResourceView:
    """Returns the fields of a HeteroInference that the reconcile decisions read."""
    metadata = _metadata(stored)
    return ResourceView(
        key=ResourceKey(
            namespace=as_name(metadata.get("namespace"), "namespace"),
            name=as_name(metadata.get("name"), "name"),
        ),
        uid=as_name(metadata.get("uid"), "uid"),
        generation=as_integer(metadata.get("generation"), "generation"),
        resource_version=as_name(metadata.get("resourceVersion"), "resourceVersion"),
        finalizers=as_texts(metadata.get("finalizers"), "finalizers"),
        deleting="deletionTimestamp" in metadata,
        spec=as_object(stored.get("spec"), "spec"),
        status=as_object(stored.get("status"), "status"),
        status_managers=_status_managers(metadata),
        finalizer_managers=_finalizer_managers(metadata),
    )


def _status_managers(metadata: Manifest) -> frozenset[str]:
    """Returns the field managers that wrote an object's status."""
    entries = as_objects(metadata.get("managedFields"), "managedFields")
    return frozenset(
        str(entry.get("manager", "")) for entry in entries if entry.get("subresource") == "status"
    )


def _finalizer_managers(metadata: Manifest) -> frozenset[str]:
    """Returns the field managers that set the finalizer of earlier versions."""
    managers = set()
    for entry in as_objects(metadata.get("managedFields"), "managedFields"):
        fields = as_object(as_object(entry.get("fieldsV1"), "fieldsV1").get("f:metadata"), "f:metadata")
        if _FINALIZER_FIELD in as_object(fields.get("f:finalizers"), "f:finalizers"):
            managers.add(str(entry.get("manager", "")))
    return frozenset(managers)


def label_key(stored: Manifest) -> ResourceKey | None:
    """Returns the resource that an object's label names, or None without the label."""
    metadata = _metadata(stored)
    name = _labels(metadata).get(names.LABEL_RESOURCE)
    namespace = as_text(metadata.get("namespace"), "namespace")
    return ResourceKey(namespace=namespace, name=name) if name else None


def owner_uid(stored: Manifest) -> str:
    """Returns the uid of the HeteroInference that controls an object, or ""."""
    for owner in as_objects(_metadata(stored).get("ownerReferences"), "ownerReferences"):
        if owner.get("controller"):
            group = as_text(owner.get("apiVersion"), "ownerReferences.apiVersion").partition("/")[0]
            uid = as_text(owner.get("uid"), "ownerReferences.uid")
            return uid if (owner.get("kind"), group) == (names.KIND, names.API_GROUP) else ""
    return ""


def _metadata(stored: Manifest) -> Manifest:
    return as_object(stored.get("metadata"), "metadata")


def _labels(metadata: Manifest) -> Mapping[str, str]:
    return as_text_map(metadata.get("labels"), "labels")


def child_record(stored: Manifest) -> ChildRecord | None:
    """Builds the cache record of a child; None without the operator's label or owner reference."""
    key, uid = label_key(stored), owner_uid(stored)
    if key is None or not uid:
        return None
    metadata = {name: value for name, value in stored["metadata"].items() if name != "managedFields"}
    _check_child_types(metadata, stored)
    kept = {name: value for name, value in stored.items() if name != "status"}
    text = json.dumps({**kept, "metadata": metadata}, separators=(",", ":"))
    return ChildRecord(text=text, key=key, owner_uid=uid)


def _check_child_types(metadata: Manifest, stored: Manifest) -> None:
    """Raises UnreadableError if a field of a child that decisions read has the wrong type."""
    for name in ("name", "uid"):
        as_name(metadata.get(name), name)
    as_text_map(metadata.get("annotations"), "annotations")
    as_texts(metadata.get("finalizers"), "finalizers")
    as_text_map(stored.get("data"), "data")
    for port in as_objects(as_object(stored.get("spec"), "spec").get("ports"), "ports"):
        as_integer(port.get("port"), "ports.port")


def pod_record(stored: Manifest, *, key: ResourceKey | None = None) -> PodRecord | None:
    """Builds the cache record of a pod of a HeteroInference.

    Args:
        key: resource of the pod; None to take it from the label.

    Returns:
        None if no HeteroInference owns the pod, or if the label is missing and `key` is None.
    """
    key, uid = key or label_key(stored), owner_uid(stored)
    if key is None or not uid:
        return None
    return PodRecord(
        view=pod_view(stored),
        key=key,
        owner_uid=uid,
        ip=as_text(_status(stored).get("podIP"), "podIP"),
        health_port=_health_port(stored),
        grace_s=float(as_integer(_metadata(stored).get("deletionGracePeriodSeconds"), "grace period")),
        claims=_claim_names(stored),
        scheduler=as_text(_spec(stored).get("schedulerName"), "schedulerName"),
        has_scheduling_state=_has_scheduling_state(stored),
        resource_claims=_resource_claims(stored),
    )


def _has_scheduling_state(stored: Manifest) -> bool:
    """Reports whether a scheduler has handled a pod, or a scheduling gate blocks the pod.

    False only for a new pod that no scheduler has handled yet.
    """
    status = _status(stored)
    scheduled = _conditions_by_type(status).get("PodScheduled")
    if scheduled is None:
        # kube-scheduler nominates a node before it waits for the pod's volumes or devices.
        return bool(as_text(status.get("nominatedNodeName"), "nominatedNodeName"))
    # The API server writes SchedulingGated. The condition stays after the last gate is gone.
    return scheduled.get("reason") != _GATED or bool(_gate_names(_spec(stored)))


def _resource_claims(stored: Manifest) -> tuple[str, ...]:
    """Returns kind and name of each resource claim, or of its template, that a pod uses."""
    found = []
    for claim in as_objects(_spec(stored).get("resourceClaims"), "resourceClaims"):
        if name := as_text(claim.get("resourceClaimName"), "resourceClaimName"):
            found.append(f"resource claim {name}")
        elif name := as_text(claim.get("resourceClaimTemplateName"), "resourceClaimTemplateName"):
            found.append(f"resource claim template {name}")
    return tuple(found)


def _claim_names(stored: Manifest) -> tuple[str, ...]:
    """Returns the names of the PersistentVolumeClaims that a pod mounts."""
    volumes = as_objects(_spec(stored).get("volumes"), "volumes")
    claims = (as_object(volume.get("persistentVolumeClaim"), "persistentVolumeClaim") for volume in volumes)
    return tuple(as_text(claim.get("claimName"), "claimName") for claim in claims if claim)


def unreadable_pod_record(stored: Manifest, *, key: ResourceKey | None = None) -> PodRecord | None:
    """Builds the record of a pod of which only the metadata is readable.

    The record shows a pod that is not ready. Without a record, the operator would end the epoch as if the pod
    had been deleted. With the record of the last readable state, the operator could report a dead rank as
    Ready.

    Returns:
        None for a pod without the label of a resource or without an owner.
    """
    key, uid = key or label_key(stored), owner_uid(stored)
    if key is None or not uid:
        return None
    view = replace(
        _metadata_view(stored),
        started=True,  # unknown. If the pod counted as not started, the operator could replace it
        phase=_UNKNOWN,
        message="the operator cannot read this pod. The operator's log names the field that you must correct",
    )
    return PodRecord(view=view, key=key, owner_uid=uid, ip="", health_port=0)


def _spec(stored: Manifest) -> Manifest:
    """Returns the spec of a stored object; raises UnreadableError if it is not a JSON object."""
    return as_object(stored.get("spec"), "spec")


def _status(stored: Manifest) -> Manifest:
    return as_object(stored.get("status"), "status")


def _containers(stored: Manifest) -> Sequence[Manifest]:
    return as_objects(_spec(stored).get("containers"), "containers")


def _health_port(stored: Manifest) -> int:
    """Returns the port of the pod's supervisor, or 0."""
    for container in _containers(stored):
        for port in as_objects(container.get("ports"), "ports"):
            if port.get("name") == names.PORT_HEALTH:
                return as_integer(port.get("containerPort"), "containerPort")
    return 0


def orphan_record(stored: Manifest, *, key: ResourceKey, owner_uid: str) -> PodRecord:
    """Builds the record of a pod of a HeteroInference that lost its ownerReference.

    Args:
        owner_uid: uid that the lost reference had.
    """
    reference = {
        "apiVersion": f"{names.API_GROUP}/",  # `owner_uid` reads only the group
        "kind": names.KIND,
        "uid": owner_uid,
        "controller": True,
    }
    metadata_with_owner = {**_metadata(stored), "ownerReferences": [reference]}
    record = pod_record({**stored, "metadata": metadata_with_owner}, key=key)
    assert record is not None  # `pod_record` returns None only without a key or an owner
    return replace(record, view=replace(record.view, lost_owner=True))


def find_key_secret(stored: Manifest) -> str:
    """Returns the name of the Secret with the group's key that a pod uses, or ""."""
    for container in _containers(stored):
        for variable in as_objects(container.get("env"), "env"):
            if variable.get("name") == names.ENV_GROUP_KEY:
                source = as_object(variable.get("valueFrom"), "valueFrom")
                reference = as_object(source.get("secretKeyRef"), "secretKeyRef")
                return as_text(reference.get("name"), "secretKeyRef.name")
    return ""


def find_cleanup_rule(stored: Manifest) -> CacheCleanup | None:
    """Returns the rule by which a fetch pod removes old commits; None for a pod that removes no commits.

    A variable of the pod has the rule. Variables of a pod never change, so the pod follows exactly this rule.
    """
    for container in _containers(stored):
        for variable in as_objects(container.get("env"), "env"):
            if variable.get("name") == names.ENV_CACHE_CLEANUP:
                try:
                    return CacheCleanup.from_json(as_text(variable.get("value"), "value"))
                except ContractError:  # the pod cannot read the rule either, so it removes nothing
                    return None
    return None


def _metadata_view(stored: Manifest) -> PodView:
    """Returns the fields of a pod that its metadata contains."""
    metadata = _metadata(stored)
    return PodView(
        name=as_name(metadata.get("name"), "name"),
        uid=as_name(metadata.get("uid"), "uid"),
        labels={
            label: value
            for label, value in _labels(metadata).items()
            if label.startswith(f"{names.API_GROUP}/")
        },
        created=as_moment(metadata.get("creationTimestamp"), "creationTimestamp") or EARLIEST,
        deleting="deletionTimestamp" in metadata,
        gone_by=as_moment(metadata.get("deletionTimestamp"), "deletionTimestamp"),
        finalizers=as_texts(metadata.get("finalizers"), "finalizers"),
    )


def pod_view(stored: Manifest) -> PodView:
    """Returns the fields of a pod that the reconcile decisions read."""
    status = _status(stored)
    conditions = _conditions_by_type(status)
    ready, scheduled = conditions.get("Ready", {}), conditions.get("PodScheduled", {})
    disruptions = (conditions.get(kind, {}) for kind in _DISRUPTIONS)
    containers = [
        *as_objects(status.get("initContainerStatuses"), "initContainerStatuses"),
        *as_objects(status.get("containerStatuses"), "containerStatuses"),
    ]
    annotations = as_text_map(_metadata(stored).get("annotations"), "annotations")
    return replace(
        _metadata_view(stored),
        started=any(_has_run(each) for each in containers if each.get("name") == names.CONTAINER_WORKER),
        phase=as_text(status.get("phase"), "phase") or "Pending",
        reason=as_text(status.get("reason"), "reason"),
        message=as_text(status.get("message"), "message"),
        ready=ready.get("status") == "True",
        disrupted=next(
            (as_text(each.get("reason"), "reason") for each in disruptions if each.get("status") == "True"),
            "",
        ),
        node=as_text(_spec(stored).get("nodeName"), "nodeName"),
        unschedulable=_find_unschedulable_reason(stored, scheduled),
        waiting=_find_waiting(containers),
        termination=_find_termination(containers, _restarting_sidecars(stored)),
        key_secret=find_key_secret(stored),
        images=annotations.get(names.ANNOTATION_IMAGES, ""),
        still_running=_find_still_running(
            as_objects(status.get("containerStatuses"), "containerStatuses"),
            deleting="deletionTimestamp" in _metadata(stored),
        ),
        defaulted=find_limit_range_values(stored),
        cleanup=find_cleanup_rule(stored),
    )


def _conditions_by_type(status: Manifest) -> dict[str, Manifest]:
    """Returns the conditions of a status by their type."""
    conditions = as_objects(status.get("conditions"), "conditions")
    return {as_text(condition.get("type"), "conditions.type"): condition for condition in conditions}


def _find_unschedulable_reason(stored: Manifest, scheduled: Manifest) -> str:
    """Returns why a pod has no node: the scheduler's message or the scheduling gates; otherwise "".

    Args:
        scheduled: the pod's condition PodScheduled, or an empty object.
    """
    if scheduled.get("status") != "False":
        return ""
    reason = as_text(scheduled.get("reason"), "conditions.reason")
    if reason != _GATED:
        return as_text(scheduled.get("message"), "message") if reason in _WITH_CAUSE else ""
    gates = ", ".join(_gate_names(_spec(stored)))
    if not gates:
        return ""
    workload = _labels(_metadata(stored)).get(KUEUE_POD_GROUP)
    return f"blocked by scheduling gate {gates}" + (
        f". Kueue's Workload {workload} shows the reason" if workload else ""
    )


def _gate_names(spec: Manifest) -> list[str]:
    """Returns the names of a pod's scheduling gates."""
    gates = as_objects(spec.get("schedulingGates"), "schedulingGates")
    return [as_text(gate.get("name"), "schedulingGates.name") for gate in gates]


def _state(container: Manifest, field: str = "state") -> Manifest:
    """Returns the present state of a container; with field `lastState`, its state before a restart."""
    return as_object(container.get(field), field)


def _has_run(container: Manifest) -> bool:
    """Reports whether a container runs or ever ran."""
    states = [_state(container), _state(container, "lastState")]
    return any("running" in state or "terminated" in state for state in states)


def _find_waiting(containers: Iterable[Manifest]) -> Waiting | None:
    """Returns why the first waiting container waits; None without such a container or without a reason."""
    for container in containers:
        waiting = as_object(_state(container).get("waiting"), "waiting")
        if waiting:
            reason = as_text(waiting.get("reason"), "reason")
            message = as_text(waiting.get("message"), "message")
            return Waiting(reason, message) if reason or message else None
    return None


def _restarting_sidecars(stored: Manifest) -> frozenset[str]:
    """Returns the names of sidecars that the kubelet always restarts, such as those of service meshes."""
    containers = as_objects(_spec(stored).get("initContainers"), "initContainers")
    sidecars = [container for container in containers if container.get("restartPolicy") == "Always"]
    return frozenset(as_text(sidecar.get("name"), "initContainers.name") for sidecar in sidecars)


def _find_termination(
    containers: Iterable[Manifest], skipped: Collection[str]
) -> ContainerTermination | None:
    """Returns how the worker container ended, or otherwise how the first failed container ended.

    Returns None if the worker container has not ended and no container has failed.

    Args:
        skipped: containers whose end does not count, because the kubelet restarts them.
    """
    worker_ends: list[tuple[int, Manifest]] = []  # exit code and terminated state
    failed_ends: list[tuple[int, Manifest]] = []
    for container in containers:
        name = as_text(container.get("name"), "containerStatuses.name")
        terminated = as_object(_state(container).get("terminated"), "terminated")
        if not terminated or name in skipped:
            continue
        exit_code = as_integer(terminated.get("exitCode"), "exitCode")
        if name == names.CONTAINER_WORKER:
            worker_ends.append((exit_code, terminated))
        if exit_code != 0:
            failed_ends.append((exit_code, terminated))
    ends = worker_ends or failed_ends
    if not ends:
        return None
    code, terminated_state = ends[0]
    return ContainerTermination(
        exit_code=code,
        reason=as_text(terminated_state.get("reason"), "reason"),
        message=as_text(terminated_state.get("message"), "message"),
    )


def _find_still_running(containers: Sequence[Manifest], *, deleting: bool) -> tuple[str, ...]:
    """Returns containers besides the worker's that can keep an ending pod from its end.

    A pod ends after its worker container, or when it is deleted. While the kubelet ends a deleted pod, the
    pod's status does not show which containers have ended (Kubernetes' kubelet.go::SyncTerminatingPod).

    Args:
        containers: statuses of all containers except init containers. The kubelet itself ends the sidecars
            among the init containers.
    """
    state_by_name = {
        as_text(container.get("name"), "containerStatuses.name"): _state(container)
        for container in containers
    }
    has_worker_ended = "terminated" in state_by_name.get(names.CONTAINER_WORKER, {})
    if not has_worker_ended and not deleting:
        return ()
    others = {name: state for name, state in state_by_name.items() if name != names.CONTAINER_WORKER}
    return tuple(sorted(name for name, state in others.items() if "running" in state))


def node_view(stored: Manifest) -> NodeView:
    """Returns the fields of a node that the reconcile decisions read, without its pods' requests."""
    status, spec, metadata = _status(stored), _spec(stored), _metadata(stored)
    ready = _conditions_by_type(status).get("Ready", {})
    # The node controller sets Unknown if the kubelet is silent. If the node has a problem, the kubelet itself
    # sets False.
    is_silent = ready.get("status") == "Unknown"
    silent_since = as_moment(ready.get("lastTransitionTime"), "lastTransitionTime") if is_silent else None
    cordoned = bool(spec.get("unschedulable"))
    versions = as_object(status.get("nodeInfo"), "nodeInfo")
    return NodeView(
        name=as_name(metadata.get("name"), "name"),
        allocatable=as_amounts(status.get("allocatable"), "allocatable"),
        schedulable=ready.get("status") == "True" and not cordoned,
        problem="cordoned" if cordoned else "not Ready",
        labels=_labels(metadata),
        taints=tuple(taint for taint in _taints(spec) if taint.key not in _CONDITION_TAINTS),
        unreachable_since=silent_since,
        no_image_volumes=describe_old_program(
            as_text(versions.get("containerRuntimeVersion"), "containerRuntimeVersion"),
            as_text(versions.get("kubeletVersion"), "kubeletVersion"),
        ),
    )


def _taints(spec: Manifest) -> Iterable[Taint]:
    """Yields the taints in a node's spec."""
    for taint in as_objects(spec.get("taints"), "taints"):
        yield Taint(
            key=as_name(taint.get("key"), "taints.key"),
            value=as_text(taint.get("value"), "taints.value"),
            effect=as_text(taint.get("effect"), "taints.effect"),
        )


def build_demand(stored: Manifest) -> PodDemand:
    """Returns the demand of a pod without a node, stored or about to be created."""
    metadata = _metadata(stored)
    name = NamespacedName(
        namespace=as_text(metadata.get("namespace"), "namespace"), name=as_name(metadata.get("name"), "name")
    )
    return pod_demand(str(name), _labels(metadata), _spec(stored))


def pod_requests(stored: Manifest) -> PodRequests | None:
    """Returns the resources that a pod uses, or the reservation for a pod; None without either.

    A pod that has ended uses nothing. A pod without a node has a reservation only if the operator created the
    pod, and if the scheduler may place it now: the operator creates the pods of a group only if all pods fit,
    and reserves their capacity until they have nodes.
    """
    if as_text(_status(stored).get("phase"), "phase") in OVER_PHASES:
        return None
    spec, metadata = _spec(stored), _metadata(stored)
    node = as_text(spec.get("nodeName"), "nodeName")
    if node:
        priority = as_integer(spec.get("priority"), "priority")
        return PodRequests(node=node, requests={**effective_requests(spec), PODS: 1.0}, priority=priority)
    owner = _find_owner(stored)
    if owner is None or "deletionTimestamp" in metadata or _gate_names(spec):
        return None
    reservation = PodReservation(
        uid=as_name(metadata.get("uid"), "uid"), owner=owner, demand=build_demand(stored)
    )
    return PodRequests(node="", requests={}, reservation=reservation)


def _find_owner(stored: Manifest) -> Owner | None:
    """Returns the resource of a pod if its label, owner reference and name agree, otherwise None."""
    key, uid = label_key(stored), owner_uid(stored)
    if key is None or not uid:
        return None
    owner = Owner(key=key, uid=uid)
    name = as_name(_metadata(stored).get("name"), "name")
    return owner if labels_of_name(owner, name) is not None else None
