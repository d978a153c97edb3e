"""Stored Kubernetes objects to the values that decisions read. Pure.

Each function takes any JSON and raises nothing but UnreadableError: strangers store objects too.
4,000 pods as trimmed values take 1.3 MiB, as dicts 355 MiB (measured 2026-11-21).
"""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from heteroinfer_contract import names
from heteroinfer_operator.cluster import (
    OVER_PHASES,
    ContainerTermination,
    Manifest,
    PodView,
    ResourceKey,
    ResourceView,
    Waiting,
)
from heteroinfer_operator.kube.limit_ranges import find_defaulted
from heteroinfer_operator.kube.paths import NamespacedName
from heteroinfer_operator.manifests.gang import KUEUE_POD_GROUP
from heteroinfer_operator.manifests.identity import Owner, named_labels
from heteroinfer_operator.nodes.demand import PODS, PodDemand, Taint, effective_requests, pod_demand
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
"""Taints that say what a node's conditions and `unschedulable` say already."""
_METADATA_READ: Final = frozenset(
    {"namespace", "name", "uid", "generation", "resourceVersion", "finalizers", "deletionTimestamp"}
)
_FINALIZER_FIELD: Final = f'v:"{names.FINALIZER}"'
"""The finalizer of earlier versions, as `managedFields` have it."""
_UNKNOWN: Final = "Unknown"
"""Phase of a pod of which nothing is known, as in Kubernetes."""
_DISRUPTIONS: Final = ("DisruptionTarget", "TerminationTarget")
"""Conditions of a pod that is taken away by no fault of its own: Kubernetes' own, and Kueue's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceRecord:
    """A HeteroInference, without its managedFields; as text, which takes a tenth of what it is parsed.

    Attributes:
        text: "" of a resource that another operator serves.
    """

    key: ResourceKey
    text: str

    @property
    def is_ours(self) -> bool:
        """Returns whether this operator serves it."""
        return self.text != ""

    @property
    def view(self) -> ResourceView:
        """Returns it as decisions see it."""
        return resource_view(json.loads(self.text))


@dataclass(frozen=True, slots=True, kw_only=True)
class PodRecord:
    """A pod of some resource, with what only the edge needs.

    Attributes:
        key: the resource that its label names.
        ip: or "" while it has none.
        health_port: of its supervisor, or 0.
        grace_s: of a pod that is being deleted: how long it was given to end, in seconds.
        claims: names of the claims that it mounts.
    """

    view: PodView
    key: ResourceKey
    owner_uid: str
    ip: str
    health_port: int
    grace_s: float = 0.0
    claims: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PodPromise:
    """Capacity that is kept for a pod of ours which has no node yet."""

    uid: str
    owner: Owner
    demand: PodDemand


@dataclass(frozen=True, slots=True, kw_only=True)
class PodRequests:
    """What a pod takes of its node, or was promised.

    Attributes:
        node: its node, or "" while a pod of ours has none.
        requests: by resource name: bytes for memory, cores for cpu, counts for devices; one of `pods`.
        promise: of a pod of ours that has no node yet, or None.
        priority: of the pod.
    """

    node: str
    requests: Mapping[str, float]
    promise: PodPromise | None = None
    priority: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildRecord:
    """A Service, NetworkPolicy or ConfigMap as stored, without its managedFields and status; as text."""

    text: str
    key: ResourceKey
    owner_uid: str

    @property
    def stored(self) -> Manifest:
        """Returns the object."""
        return as_object(json.loads(self.text), "object")


def resource_record(stored: Manifest, *, operator_class: str = "") -> ResourceRecord:
    """Returns a HeteroInference as kept in the cache of the operator of a class."""
    view = resource_view(stored)
    if view.spec.get("operatorClass", "") != operator_class:
        return ResourceRecord(key=view.key, text="")
    metadata = {name: value for name, value in stored["metadata"].items() if name in _METADATA_READ}
    metadata["managedFields"] = [
        {"manager": manager, "subresource": "status"} for manager in sorted(view.status_managers)
    ]
    metadata["managedFields"] += [
        {"manager": manager, "fieldsV1": {"f:metadata": {"f:finalizers": {_FINALIZER_FIELD: {}}}}}
        for manager in sorted(view.finalizer_managers)
    ]
    read = {"metadata": metadata, "spec": stored.get("spec"), "status": stored.get("status")}
    return ResourceRecord(key=view.key, text=json.dumps(read, separators=(",", ":")))


def resource_view(stored: Manifest) -> ResourceView:
    """Returns a HeteroInference as decisions see it."""
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
    """Returns the field managers that have written an object's status."""
    entries = as_objects(metadata.get("managedFields"), "managedFields")
    return frozenset(str(each.get("manager", "")) for each in entries if each.get("subresource") == "status")


def _finalizer_managers(metadata: Manifest) -> frozenset[str]:
    """Returns the field managers that set the finalizer of earlier versions on an object."""
    found = set()
    for each in as_objects(metadata.get("managedFields"), "managedFields"):
        fields = as_object(as_object(each.get("fieldsV1"), "fieldsV1").get("f:metadata"), "f:metadata")
        if _FINALIZER_FIELD in as_object(fields.get("f:finalizers"), "f:finalizers"):
            found.add(str(each.get("manager", "")))
    return frozenset(found)


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
    """Returns a child as kept in the cache, or None if it has no label or no owner of ours."""
    key, uid = label_key(stored), owner_uid(stored)
    if key is None or not uid:
        return None
    metadata = {name: value for name, value in stored["metadata"].items() if name != "managedFields"}
    for name in ("name", "uid"):
        as_name(metadata.get(name), name)
    as_text_map(metadata.get("annotations"), "annotations")
    as_texts(metadata.get("finalizers"), "finalizers")
    as_text_map(stored.get("data"), "data")
    for port in as_objects(as_object(stored.get("spec"), "spec").get("ports"), "ports"):
        as_integer(port.get("port"), "ports.port")
    read = {name: value for name, value in stored.items() if name != "status"}
    text = json.dumps({**read, "metadata": metadata}, separators=(",", ":"))
    return ChildRecord(text=text, key=key, owner_uid=uid)


def pod_record(stored: Manifest, *, key: ResourceKey | None = None) -> PodRecord | None:
    """Returns a pod of ours as kept in the cache.

    Returns:
        None if no resource of ours owns it, or its label is gone and no `key` is given.
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
        claims=_claims(stored),
    )


def _claims(stored: Manifest) -> tuple[str, ...]:
    volumes = as_objects(_spec(stored).get("volumes"), "volumes")
    claims = (as_object(each.get("persistentVolumeClaim"), "persistentVolumeClaim") for each in volumes)
    return tuple(as_text(claim.get("claimName"), "claimName") for claim in claims if claim)


def unreadable_pod(stored: Manifest, *, key: ResourceKey | None = None) -> PodRecord | None:
    """Returns a pod of ours of which the metadata alone can be read: it is there, and not ready.

    To leave such a pod out would end its epoch, as if somebody had deleted the pod. To keep its last state
    could report a dead rank as Ready.
    """
    key, uid = key or label_key(stored), owner_uid(stored)
    if key is None or not uid:
        return None
    view = replace(
        _metadata_view(stored),
        started=True,  # nobody knows: another pod must not get its name
        phase=_UNKNOWN,
        message="the operator cannot read this pod; see the log of the operator",
    )
    return PodRecord(view=view, key=key, owner_uid=uid, ip="", health_port=0)


def _spec(stored: Manifest) -> Manifest:
    return as_object(stored.get("spec"), "spec")


def _status(stored: Manifest) -> Manifest:
    return as_object(stored.get("status"), "status")


def _containers(stored: Manifest) -> Sequence[Manifest]:
    return as_objects(_spec(stored).get("containers"), "containers")


def _health_port(stored: Manifest) -> int:
    for container in _containers(stored):
        for port in as_objects(container.get("ports"), "ports"):
            if port.get("name") == names.PORT_HEALTH:
                return as_integer(port.get("containerPort"), "containerPort")
    return 0


def orphan_record(stored: Manifest, *, key: ResourceKey, owner_uid: str) -> PodRecord:
    """Returns a pod of ours whose ownerReference somebody took off."""
    reference = {
        "apiVersion": f"{names.API_GROUP}/",
        "kind": names.KIND,
        "uid": owner_uid,
        "controller": True,
    }
    metadata = {**_metadata(stored), "ownerReferences": [reference]}
    record = pod_record({**stored, "metadata": metadata}, key=key)
    assert record is not None  # it has a key and an owner
    return replace(record, view=replace(record.view, lost_owner=True))


def find_key_secret(stored: Manifest) -> str:
    """Returns the name of the Secret that a pod has its group's key from, or ""."""
    for container in _containers(stored):
        for variable in as_objects(container.get("env"), "env"):
            if variable.get("name") == names.ENV_GROUP_KEY:
                source = as_object(variable.get("valueFrom"), "valueFrom")
                reference = as_object(source.get("secretKeyRef"), "secretKeyRef")
                return as_text(reference.get("name"), "secretKeyRef.name")
    return ""


def _metadata_view(stored: Manifest) -> PodView:
    """Returns a pod as its metadata alone shows it."""
    metadata = _metadata(stored)
    return PodView(
        name=as_name(metadata.get("name"), "name"),
        uid=as_name(metadata.get("uid"), "uid"),
        labels={k: v for k, v in _labels(metadata).items() if k.startswith(f"{names.API_GROUP}/")},
        created=as_moment(metadata.get("creationTimestamp"), "creationTimestamp") or EARLIEST,
        deleting="deletionTimestamp" in metadata,
        gone_by=as_moment(metadata.get("deletionTimestamp"), "deletionTimestamp"),
        finalizers=as_texts(metadata.get("finalizers"), "finalizers"),
    )


def pod_view(stored: Manifest) -> PodView:
    """Returns a pod as decisions see it."""
    status = _status(stored)
    conditions = _conditions(status)
    ready, scheduled = conditions.get("Ready", {}), conditions.get("PodScheduled", {})
    disruptions = (conditions.get(kind, {}) for kind in _DISRUPTIONS)
    containers = [
        *as_objects(status.get("initContainerStatuses"), "initContainerStatuses"),
        *as_objects(status.get("containerStatuses"), "containerStatuses"),
    ]
    annotations = as_text_map(_metadata(stored).get("annotations"), "annotations")
    return replace(
        _metadata_view(stored),
        started=any(_has_run(c) for c in containers if c.get("name") == names.CONTAINER_WORKER),
        phase=as_text(status.get("phase"), "phase") or "Pending",
        reason=as_text(status.get("reason"), "reason"),
        message=as_text(status.get("message"), "message"),
        ready=ready.get("status") == "True",
        disrupted=next(
            (as_text(c.get("reason"), "reason") for c in disruptions if c.get("status") == "True"), ""
        ),
        node=as_text(_spec(stored).get("nodeName"), "nodeName"),
        unschedulable=_unschedulable(stored, scheduled),
        waiting=_waiting(containers),
        termination=_termination(containers, _restarted(stored)),
        key_secret=find_key_secret(stored),
        images=annotations.get(names.ANNOTATION_IMAGES, ""),
        still_running=_still_running(as_objects(status.get("containerStatuses"), "containerStatuses")),
        defaulted=find_defaulted(stored),
    )


def _conditions(status: Manifest) -> dict[str, Manifest]:
    found = as_objects(status.get("conditions"), "conditions")
    return {as_text(condition.get("type"), "conditions.type"): condition for condition in found}


def _unschedulable(stored: Manifest, scheduled: Manifest) -> str:
    """Returns why a pod has no node, in the scheduler's words or by who holds it back, or ""."""
    if scheduled.get("status") != "False":
        return ""
    if scheduled.get("reason") != "SchedulingGated":
        unschedulable = scheduled.get("reason") == "Unschedulable"
        return as_text(scheduled.get("message"), "message") if unschedulable else ""
    gates = ", ".join(_gates(_spec(stored)))
    workload = _labels(_metadata(stored)).get(KUEUE_POD_GROUP)
    return f"held back by {gates}" + (f"; Kueue's Workload {workload} says why" if workload else "")


def _gates(spec: Manifest) -> list[str]:
    gates = as_objects(spec.get("schedulingGates"), "schedulingGates")
    return [as_text(gate.get("name"), "schedulingGates.name") for gate in gates]


def _state(container: Manifest, field: str = "state") -> Manifest:
    return as_object(container.get(field), field)


def _has_run(container: Manifest) -> bool:
    states = [_state(container), _state(container, "lastState")]
    return any("running" in state or "terminated" in state for state in states)


def _waiting(containers: Iterable[Manifest]) -> Waiting | None:
    for container in containers:
        waiting = as_object(_state(container).get("waiting"), "waiting")
        if waiting:
            found = Waiting(*(as_text(waiting.get(field), field) for field in ("reason", "message")))
            return found if any(found) else None
    return None


def _restarted(stored: Manifest) -> frozenset[str]:
    """Returns the names of sidecars that the kubelet restarts whenever they end, as meshes inject them."""
    containers = as_objects(_spec(stored).get("initContainers"), "initContainers")
    always = [each for each in containers if each.get("restartPolicy") == "Always"]
    return frozenset(as_text(each.get("name"), "initContainers.name") for each in always)


def _termination(containers: Iterable[Manifest], restarted: Collection[str]) -> ContainerTermination | None:
    """Returns how the worker container ended; or the first container that failed before it, for good."""
    ended = []
    for container in containers:
        name = as_text(container.get("name"), "containerStatuses.name")
        terminated = as_object(_state(container).get("terminated"), "terminated")
        if terminated and name not in restarted:
            ended.append((name, as_integer(terminated.get("exitCode"), "exitCode"), terminated))
    worker = [(code, how) for name, code, how in ended if name == names.CONTAINER_WORKER]
    failed = [(code, how) for _, code, how in ended if code != 0]
    for code, how in worker or failed:
        return ContainerTermination(
            exit_code=code,
            reason=as_text(how.get("reason"), "reason"),
            message=as_text(how.get("message"), "message"),
        )
    return None


def _still_running(containers: Sequence[Manifest]) -> tuple[str, ...]:
    """Returns the containers that run though the worker's has ended.

    Sidecars that are init containers are not among them: the kubelet ends those itself.
    """
    by_name = {as_text(each.get("name"), "containerStatuses.name"): _state(each) for each in containers}
    if "terminated" not in by_name.get(names.CONTAINER_WORKER, {}):
        return ()
    return tuple(sorted(name for name, state in by_name.items() if "running" in state))


def node_view(stored: Manifest) -> NodeView:
    """Returns a node as decisions see it, without what is requested of it."""
    status, spec, metadata = _status(stored), _spec(stored), _metadata(stored)
    ready = _conditions(status).get("Ready", {})
    # The node controller writes Unknown when the kubelet is silent; False is the kubelet's own word.
    silent = ready.get("status") == "Unknown"
    cordoned = bool(spec.get("unschedulable"))
    return NodeView(
        name=as_name(metadata.get("name"), "name"),
        allocatable=as_amounts(status.get("allocatable"), "allocatable"),
        schedulable=ready.get("status") == "True" and not cordoned,
        problem="cordoned" if cordoned else "not Ready",
        labels=_labels(metadata),
        taints=tuple(taint for taint in _taints(spec) if taint.key not in _CONDITION_TAINTS),
        unreachable_since=as_moment(ready.get("lastTransitionTime"), "lastTransitionTime")
        if silent
        else None,
    )


def _taints(spec: Manifest) -> Iterable[Taint]:
    for taint in as_objects(spec.get("taints"), "taints"):
        yield Taint(
            key=as_name(taint.get("key"), "taints.key"),
            value=as_text(taint.get("value"), "taints.value"),
            effect=as_text(taint.get("effect"), "taints.effect"),
        )


def promise(stored: Manifest) -> PodDemand:
    """Returns what a pod asks for that has no node yet, stored or about to be created."""
    metadata = _metadata(stored)
    name = NamespacedName(
        namespace=as_text(metadata.get("namespace"), "namespace"), name=as_name(metadata.get("name"), "name")
    )
    return pod_demand(str(name), _labels(metadata), _spec(stored))


def pod_requests(stored: Manifest) -> PodRequests | None:
    """Returns what a pod takes of its node, or None if it takes nothing.

    A pod that is over takes nothing. Nor does a pod without a node, unless the operator made it and the
    scheduler may place it now: a group is created when all of its pods fit, and that capacity is kept for it.
    """
    if as_text(_status(stored).get("phase"), "phase") in OVER_PHASES:
        return None
    spec, metadata = _spec(stored), _metadata(stored)
    node = as_text(spec.get("nodeName"), "nodeName")
    if node:
        priority = as_integer(spec.get("priority"), "priority")
        return PodRequests(node=node, requests={**effective_requests(spec), PODS: 1.0}, priority=priority)
    owner = _maker(stored)
    if owner is None or "deletionTimestamp" in metadata or _gates(spec):
        return None
    kept = PodPromise(uid=as_name(metadata.get("uid"), "uid"), owner=owner, demand=promise(stored))
    return PodRequests(node="", requests={}, promise=kept)


def _maker(stored: Manifest) -> Owner | None:
    """Returns the resource that label, owner reference and name of a pod all name, or None."""
    key, uid = label_key(stored), owner_uid(stored)
    if key is None or not uid:
        return None
    owner = Owner(key=key, uid=uid)
    name = as_name(_metadata(stored).get("name"), "name")
    return owner if named_labels(owner, name) is not None else None
