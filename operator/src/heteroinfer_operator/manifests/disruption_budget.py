"""PodDisruptionBudget of a group, or of all groups of a resource with several groups. Pure.

A group is one unit: the eviction of one pod ends its epoch, and the next epoch starts on other nodes. The
budget allows the eviction of one pod, and of no other pod of the group until the group serves again. A drain
of several nodes then ends a group once for each node, and never in the middle of its start. The budget never
blocks permanently: a group without free capacity has no pods, and a failing group deletes its pods. The pods
of a group that sleeps, or that waits for a pod that cannot start, may be evicted (`AlwaysAllow`), because the
group may stay unready for long.

Several groups share one budget, because Kubernetes evicts no pod that two budgets select. The API server
subtracts an eviction from the budget before it answers, so two drains never end two groups. If only one group
serves, its pods are not evicted. With several groups, pods that are not Ready may be evicted at any time,
even in the middle of a start: they serve no clients, and the budget still protects the Ready pods of the
other groups. Source:
`pkg/registry/core/pod/storage/eviction.go@v1.36.3`: with `AlwaysAllow` the eviction of a pod that is not
Ready neither checks nor changes the budget.
"""

from typing import Any, Final

from heteroinfer_contract import names
from heteroinfer_operator.manifests import identity
from heteroinfer_operator.manifests.identity import GroupRef, Owner

KIND: Final = "PodDisruptionBudget"


def build_disruption_budget(group: GroupRef, *, pods: int, protects_unready_pods: bool) -> dict[str, Any]:
    """Returns the budget of a group of at least two pods; a group of one pod has no budget.

    The budget has a number, not a percentage: for a percentage, the disruption controller would read the
    number of pods from the resource's /scale, which counts groups.

    Args:
        protects_unready_pods: False for a group that sleeps, or that waits for a pod that cannot start.
    """
    policy = "IfHealthyBudget" if protects_unready_pods else "AlwaysAllow"
    metadata = identity.group_metadata(group, identity.group_service(group.owner, group.index))
    return _build_budget(metadata, identity.group_labels(group), min_available=pods - 1, policy=policy)


def build_shared_budget(owner: Owner, *, min_available: int) -> dict[str, Any]:
    """Returns the budget that all groups of a resource share.

    Args:
        min_available: number of pods that must stay available.
    """
    metadata = identity.metadata(owner, identity.shared_budget(owner), {})
    worker_labels = {names.LABEL_RESOURCE: owner.key.name, names.LABEL_COMPONENT: names.COMPONENT_WORKER}
    return _build_budget(metadata, worker_labels, min_available=min_available, policy="AlwaysAllow")


def _build_budget(
    metadata: dict[str, Any], pod_labels: dict[str, str], *, min_available: int, policy: str
) -> dict[str, Any]:
    """Returns the PodDisruptionBudget for the pods with these labels."""
    return {
        "apiVersion": "policy/v1",
        "kind": KIND,
        "metadata": metadata,
        "spec": {
            "minAvailable": min_available,
            "selector": {"matchLabels": pod_labels},
            "unhealthyPodEvictionPolicy": policy,
        },
    }
