"""PodDisruptionBudget of a group, or of all groups of a resource with several. Pure.

A group is one unit: the eviction of one pod ends its epoch, and the next starts elsewhere. The
budget lets one pod go, and no other of the group until it serves again, so that a drain of
node after node ends a group once a node and not in the middle of its start. It never blocks for
ever: a group without free capacity has no pods, one that fails gives its pods up, and one that sleeps,
which is not Ready, does not count on being spared.

Several groups share one budget: the API server takes one eviction off a budget before it answers, so two
drains never take two groups, and Kubernetes evicts no pod that two budgets select. While one group alone
serves, its pods are not evicted.
"""

from typing import Any, Final

from heteroinfer_contract import names
from heteroinfer_operator.manifests import identity
from heteroinfer_operator.manifests.identity import GroupRef, Owner

KIND: Final = "PodDisruptionBudget"


def build_disruption_budget(group: GroupRef, *, pods: int, asleep: bool) -> dict[str, Any]:
    """Returns the budget of a group of two pods or more; one pod alone may always go.

    A number and no percentage: the disruption controller would look for the pods' number in the
    resource's /scale, which counts groups.

    Args:
        asleep: whether its pods are not Ready on purpose.
    """
    metadata = identity.group_metadata(group, identity.group_service(group.owner, group.index))
    return _build(metadata, identity.group_labels(group), min_available=pods - 1, asleep=asleep)


def build_shared_budget(owner: Owner, *, min_available: int, asleep: bool) -> dict[str, Any]:
    """Returns the budget of all groups of a resource with several.

    Args:
        min_available: pods.
        asleep: whether pods of a group are not Ready on purpose.
    """
    metadata = identity.metadata(owner, identity.shared_budget(owner), {})
    selected = {names.LABEL_RESOURCE: owner.key.name, names.LABEL_COMPONENT: names.COMPONENT_WORKER}
    return _build(metadata, selected, min_available=min_available, asleep=asleep)


def _build(
    metadata: dict[str, Any], selected: dict[str, str], *, min_available: int, asleep: bool
) -> dict[str, Any]:
    return {
        "apiVersion": "policy/v1",
        "kind": KIND,
        "metadata": metadata,
        "spec": {
            "minAvailable": min_available,
            "selector": {"matchLabels": selected},
            "unhealthyPodEvictionPolicy": "AlwaysAllow" if asleep else "IfHealthyBudget",
        },
    }
