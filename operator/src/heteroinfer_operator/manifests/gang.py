"""What tells each gang scheduler that the pods of an epoch belong together, all of them or none. Pure.

| scheduler | a pod says | an object says |
|---|---|---|
| Kueue | labels queue-name and pod-group-name, annotation pod-group-total-count | |
| Volcano | annotation scheduling.k8s.io/group-name, schedulerName | PodGroup: minMember, queue |
| coscheduling | label scheduling.x-k8s.io/pod-group, schedulerName | PodGroup: minMember |
| kube-scheduler 1.35 | spec.workloadRef | Workload: gang.minCount |
| kube-scheduler 1.36, 1.37 | spec.schedulingGroup | PodGroup: schedulingPolicy.gang.minCount |

Names carry the epoch: no pod of an old epoch is counted for a new one.
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
"""Label of a pod: its gang, which is also the name of Kueue's Workload."""
_VOLCANO_SCHEDULER: Final = "volcano"
_COSCHEDULING_SCHEDULER: Final = "scheduler-plugins-scheduler"
"""Of the chart as-a-second-scheduler; where the plugin is in the default scheduler, set schedulerName."""
KNOWN: Final = (
    "Kueue (kueue.x-k8s.io/v1beta1, v1beta2), Volcano (scheduling.volcano.sh/v1beta1), coscheduling "
    "(scheduling.x-k8s.io/v1alpha1) and kube-scheduler (scheduling.k8s.io/v1alpha1 of Kubernetes 1.35, "
    "v1alpha2 of 1.36, v1beta1 of 1.37)"
)
"""In words, with the versions of their APIs."""
_POD_GROUP: Final = "ranks"
"""Name of the only pod group of a Workload of Kubernetes 1.35."""


_POD_GROUP_VERSIONS: Final[Mapping[Gang, str]] = MappingProxyType(
    {
        Gang.NATIVE_ALPHA2: "scheduling.k8s.io/v1alpha2",
        Gang.NATIVE_BETA: "scheduling.k8s.io/v1beta1",
    }
)
"""Of kube-scheduler's PodGroup, which needs no Workload."""


def choose_gang(
    spec: HeteroInferenceSpec, present: Collection[Gang], unknown: Sequence[str] = ()
) -> Gang | None:
    """Returns who places the groups of a resource, or None.

    Kueue only sees pods with a queue. Of several, one that was installed for it wins over
    kube-scheduler's own, and a newer version of that over an older one.

    Args:
        unknown: API versions of gang schedulers that are served, and not known here.

    Raises:
        PlanError: the spec wants a gang scheduler, and there is none that it could be.
    """
    if spec.scheduling.gang is When.NEVER:
        return None
    order = [Gang.VOLCANO, Gang.COSCHEDULING, Gang.NATIVE_BETA, Gang.NATIVE_ALPHA2, Gang.NATIVE]
    if spec.scheduling.queue_name:
        order.insert(0, Gang.KUEUE)
    found = next((gang for gang in order if gang in present), None)
    if found is None and spec.scheduling.gang is When.ALWAYS:
        hints = ["Kueue is there, but scheduling.queueName is not set"] if Gang.KUEUE in present else []
        if unknown:
            hints.append(f"the cluster serves {', '.join(unknown)}, which this operator does not know")
        raise PlanError(
            f"scheduling.gang: got Always, and the cluster has none of the gang schedulers {KNOWN}"
            f"{''.join(f'; {hint}' for hint in hints)}; install one, or set scheduling.gang: Auto",
            reason="NoGangScheduler",
        )
    return found


def gang_name(group: EpochRef) -> str:
    """Returns the name of an epoch's pods together."""
    return f"{group.owner.key.name}-{group.index}-{group.epoch}"


def gang_labels(spec: HeteroInferenceSpec, group: EpochRef, gang: Gang | None) -> dict[str, str]:
    """Returns what a pod says in its labels; its own kind of gang among them, for living groups."""
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
    """Returns what a pod says in its annotations."""
    match gang:
        case Gang.KUEUE:
            return {
                "kueue.x-k8s.io/pod-group-total-count": str(pods),
                # A group is not mended: Kueue lets go of its pods once all of them have ended.
                "kueue.x-k8s.io/retriable-in-group": "false",
            }
        case Gang.VOLCANO:
            return {"scheduling.k8s.io/group-name": gang_name(group)}
    return {}


def gang_fields(spec: HeteroInferenceSpec, group: EpochRef, gang: Gang | None) -> dict[str, Any]:
    """Returns what a pod says in its spec."""
    defaults = {Gang.VOLCANO: _VOLCANO_SCHEDULER, Gang.COSCHEDULING: _COSCHEDULING_SCHEDULER}
    scheduler = spec.scheduling.scheduler_name or (defaults.get(gang, "") if gang else "")
    fields: dict[str, Any] = {"schedulerName": scheduler} if scheduler else {}
    if gang is Gang.NATIVE:
        fields["workloadRef"] = {"name": gang_name(group), "podGroup": _POD_GROUP}
    if gang in _POD_GROUP_VERSIONS:
        fields["schedulingGroup"] = {"podGroupName": gang_name(group)}
    return fields


def build_gang_object(
    spec: HeteroInferenceSpec, group: EpochRef, gang: Gang | None, pods: int
) -> dict[str, Any] | None:
    """Returns the object that says how many pods belong together, or None where pods say it all."""
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
                # A preempted pod ends its whole epoch, so that the scheduler may as well take all pods.
                body["disruptionMode"] = {"all": {}}
                if spec.scheduling.priority_class_name:
                    body["priorityClassName"] = spec.scheduling.priority_class_name
        case _:
            return None
    labels = {names.LABEL_GROUP: str(group.index), names.LABEL_EPOCH: str(group.epoch)}
    metadata = identity.metadata(group.owner, gang_name(group), labels)
    return {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": body}
