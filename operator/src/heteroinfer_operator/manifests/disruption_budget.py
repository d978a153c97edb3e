"""PodDisruptionBudget of a group, or of all groups of a resource with several. Pure.

A group is one unit: the eviction of one pod ends its epoch, and the next starts elsewhere. The
budget lets one pod go, and no other of the group until it serves again, so that a drain of
node after node ends a group once a node and not in the middle of its start. It never blocks for
ever: a group without free capacity has no pods, and one that fails gives its pods up. A group that sleeps, or
that waits for a pod which cannot start, is not Ready for long: its pods may be evicted (`AlwaysAllow`).

Several groups share one budget: the API server takes one eviction off a budget before it answers, so two
drains never take two groups, and Kubernetes evicts no pod that two budgets select. While one group alone
serves, its pods are not evicted. Pods that are not Ready may be evicted at any time, also in the middle of a
start: they serve nobody, and the count protects the Ready pods of the other groups.
Source: `pkg/registry/core/pod/storage/eviction.go@v1.36.3`: with `AlwaysAllow` the eviction of a pod that is
not Ready neither asks nor changes the budget.
"""

from typing import Any, Final

from heteroinfer_contract import names
from heteroinfer_operator.manifests import identity
from heteroinfer_operator.manifests.identity import GroupRef, Owner

KIND: Final = "PodDisruptionBudget"


def build_disruption_budget(group: GroupRef, *, pods: int, spares_start: bool) -> dict[str, Any]:
    """Returns the budget of a group of two pods or more; one pod alone may always go.

    A number and no percentage: the disruption controller would look for the pods' number in the
    resource's /scale, which counts groups.

    Args:
        spares_start: whether pods that are not Ready yet stay until they are.
    """
    policy = "IfHealthyBudget" if spares_start else "AlwaysAllow"
    metadata = identity.group_metadata(group, identity.group_service(group.owner, group.index))
    return _build(metadata, identity.group_labels(group), min_available=pods - 1, policy=policy)


def build_shared_budget(owner: Owner, *, min_available: int) -> dict[str, Any]:
    """Returns the budget of all groups of a resource with several; `min_available` counts pods."""
    metadata = identity.metadata(owner, identity.shared_budget(owner), {})
    selected = {names.LABEL_RESOURCE: owner.key.name, names.LABEL_COMPONENT: names.COMPONENT_WORKER}
    return _build(metadata, selected, min_available=min_available, policy="AlwaysAllow")


def _build(
    metadata: dict[str, Any], selected: dict[str, str], *, min_available: int, policy: str
) -> dict[str, Any]:
    return {
        "apiVersion": "policy/v1",
        "kind": KIND,
        "metadata": metadata,
        "spec": {
            "minAvailable": min_available,
            "selector": {"matchLabels": selected},
            "unhealthyPodEvictionPolicy": policy,
        },
    }
