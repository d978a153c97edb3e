"""Fields and objects with which gang schedulers place all pods of an epoch together, or none. Pure.

| scheduler | in a pod | in an object |
|---|---|---|
| Kueue | labels queue-name and pod-group-name, annotation pod-group-total-count | |
| Volcano | annotation scheduling.k8s.io/group-name, schedulerName | PodGroup: minMember, queue |
| coscheduling | label scheduling.x-k8s.io/pod-group, schedulerName | PodGroup: minMember |
| kube-scheduler 1.35 | spec.workloadRef | Workload: gang.minCount |
| kube-scheduler 1.36, 1.37 | spec.schedulingGroup | PodGroup: schedulingPolicy.gang.minCount |

Names contain the epoch, so that no pod of an old epoch counts for a new epoch.
Sources: sigs.k8s.io/kueue@v0.15.0 pkg/controller/jobs/pod/constants, volcano.sh/apis@v1.13.0
pkg/apis/scheduling/v1beta1, sigs.k8s.io/scheduler-plugins@v0.33.5 apis/scheduling/v1alpha1,
k8s.io/api@v0.35.4 scheduling/v1alpha1, @v0.36.3 scheduling/v1alpha2, @v0.37.2 scheduling/v1beta1.
"""

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from heteroinfer_contract import names
from heteroinfer_operator.api import HeteroInferenceSpec, When
from heteroinfer_operator.errors import PlanError
from heteroinfer_operator.manifests import identity
from heteroinfer_operator.manifests.identity import EpochRef
from heteroinfer_operator.nodes.node_assignment import Gang

KUEUE_POD_GROUP: Final = "kueue.x-k8s.io/pod-group-name"
"""Label of a pod with the name of its gang, which is also the name of Kueue's Workload."""
_VOLCANO_SCHEDULER: Final = "volcano"
_COSCHEDULING_SCHEDULER: Final = "scheduler-plugins-scheduler"
"""Name of the scheduler in the chart as-a-second-scheduler. If the default scheduler has the plugin, users
set scheduling.schedulerName."""
KNOWN_SCHEDULERS: Final = (
    "Kueue (kueue.x-k8s.io/v1beta1, v1beta2), Volcano (scheduling.volcano.sh/v1beta1), coscheduling "
    "(scheduling.x-k8s.io/v1alpha1) and kube-scheduler (scheduling.k8s.io/v1alpha1 of Kubernetes 1.35, "
    "v1alpha2 of 1.36, v1beta1 of 1.37)"
)
"""Known gang schedulers with the versions of their APIs, for messages."""
_POD_GROUP: Final = "ranks"
"""Name of the only pod group of a Workload of Kubernetes 1.35."""


_POD_GROUP_VERSIONS: Final[Mapping[Gang, str]] = MappingProxyType(
    {
        Gang.NATIVE_ALPHA2: "scheduling.k8s.io/v1alpha2",
        Gang.NATIVE_BETA: "scheduling.k8s.io/v1beta1",
    }
)
"""API versions of kube-scheduler's PodGroup, which needs no Workload."""


def choose_gang(
    spec: HeteroInferenceSpec, present: Collection[Gang], unknown: Sequence[str] = ()
) -> Gang | None:
    """Chooses the gang scheduler for the groups of a resource; None if the cluster has none.

    Kueue comes first, but only for pods with a queue, because Kueue ignores other pods. Then come other
    installed gang schedulers, then kube-scheduler, with the newest version of its API first.

    Args:
        present: gang schedulers whose API the cluster serves.
        unknown: API versions of gang schedulers that the cluster serves and the operator does not know.

    Raises:
        PlanError: the spec requires a gang scheduler, and the cluster has none.
    """
    if spec.scheduling.gang is When.NEVER:
        return None
    order = [Gang.VOLCANO, Gang.COSCHEDULING, Gang.NATIVE_BETA, Gang.NATIVE_ALPHA2, Gang.NATIVE]
    if spec.scheduling.queue_name:
        order.insert(0, Gang.KUEUE)
    chosen = next((gang for gang in order if gang in present), None)
    if chosen is None and spec.scheduling.gang is When.ALWAYS:
        raise _build_no_gang_error(present, unknown)
    return chosen


def _build_no_gang_error(present: Collection[Gang], unknown: Sequence[str]) -> PlanError:
    """Returns the error for a spec that requires a gang scheduler if the cluster has none."""
    hints = ""
    fix = "Install one of the known gang schedulers, or set scheduling.gang: Auto"
    if Gang.KUEUE in present:
        hints += "; Kueue is installed, but scheduling.queueName is not set"
        fix = "Set scheduling.queueName, install another known gang scheduler, or set scheduling.gang: Auto"
    if unknown:
        hints += f"; the cluster serves {', '.join(unknown)}, which this operator does not know"
    return PlanError(
        "scheduling.gang: is Always, but the cluster has no gang scheduler that this resource can use "
        f"(known: {KNOWN_SCHEDULERS}){hints}. {fix}",
        reason="NoGangScheduler",
    )


def gang_name(group: EpochRef) -> str:
    """Returns the name of the gang of an epoch's pods."""
    return f"{group.owner.key.name}-{group.index}-{group.epoch}"


def gang_labels(spec: HeteroInferenceSpec, group: EpochRef, gang: Gang | None) -> dict[str, str]:
    """Returns a pod's labels for its gang.

    LABEL_GANG records the scheduler, so that a running group keeps its scheduler if the cluster gets another.
    """
    if gang is None:
        return {}
    labels = {names.LABEL_GANG: gang.value}
    match gang:
        case Gang.KUEUE:
            queue = spec.scheduling.queue_name
            labels |= {"kueue.x-k8s.io/queue-name": queue, KUEUE_POD_GROUP: gang_name(group)}
        case Gang.COSCHEDULING:
            labels |= {"scheduling.x-k8s.io/pod-group": gang_name(group)}
    return labels


def gang_annotations(group: EpochRef, gang: Gang | None, pods: int) -> dict[str, str]:
    """Returns a pod's annotations for its gang."""
    match gang:
        case Gang.KUEUE:
            return {
                "kueue.x-k8s.io/pod-group-total-count": str(pods),
                # Pods of a group are not replaced one by one. Kueue releases the pods when all have ended.
                "kueue.x-k8s.io/retriable-in-group": "false",
            }
        case Gang.VOLCANO:
            return {"scheduling.k8s.io/group-name": gang_name(group)}
    return {}


def gang_fields(spec: HeteroInferenceSpec, group: EpochRef, gang: Gang | None) -> dict[str, Any]:
    """Returns the fields of a pod's spec for its gang. The user's scheduler overrides the gang's."""
    gang_schedulers = {Gang.VOLCANO: _VOLCANO_SCHEDULER, Gang.COSCHEDULING: _COSCHEDULING_SCHEDULER}
    default_scheduler = gang_schedulers.get(gang, "") if gang else ""
    scheduler = spec.scheduling.scheduler_name or default_scheduler
    fields: dict[str, Any] = {"schedulerName": scheduler} if scheduler else {}
    if gang is Gang.NATIVE:
        fields["workloadRef"] = {"name": gang_name(group), "podGroup": _POD_GROUP}
    if gang in _POD_GROUP_VERSIONS:
        fields["schedulingGroup"] = {"podGroupName": gang_name(group)}
    return fields


def build_gang_object(
    spec: HeteroInferenceSpec, group: EpochRef, gang: Gang | None, pods: int
) -> dict[str, Any] | None:
    """Returns the object with the size of the gang for its scheduler.

    Returns None without a gang scheduler, and for Kueue, which reads the size from an annotation of the pods.
    """
    body: dict[str, Any] = {"minMember": pods}
    match gang:
        case Gang.VOLCANO:
            version, kind = "scheduling.volcano.sh/v1beta1", "PodGroup"
            if spec.scheduling.queue_name:
                body["queue"] = spec.scheduling.queue_name
            if spec.scheduling.priority_class_name:
                body["priorityClassName"] = spec.scheduling.priority_class_name
        case Gang.COSCHEDULING:
            version, kind = "scheduling.x-k8s.io/v1alpha1", "PodGroup"
        case Gang.NATIVE:
            version, kind = "scheduling.k8s.io/v1alpha1", "Workload"
            controller = {"apiGroup": names.API_GROUP, "kind": names.KIND, "name": group.owner.key.name}
            pod_group = {"name": _POD_GROUP, "policy": {"gang": {"minCount": pods}}}
            body = {"controllerRef": controller, "podGroups": [pod_group]}
        case Gang.NATIVE_ALPHA2 | Gang.NATIVE_BETA:
            version, kind = _POD_GROUP_VERSIONS[gang], "PodGroup"
            body = {"schedulingPolicy": {"gang": {"minCount": pods}}}
            if gang is Gang.NATIVE_BETA:
                # The loss of one pod ends the whole epoch, so the scheduler preempts all pods or none.
                body["disruptionMode"] = {"all": {}}
                if spec.scheduling.priority_class_name:
                    body["priorityClassName"] = spec.scheduling.priority_class_name
        case _:
            return None
    labels = {names.LABEL_GROUP: str(group.index), names.LABEL_EPOCH: str(group.epoch)}
    metadata = identity.metadata(group.owner, gang_name(group), labels)
    return {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": body}
