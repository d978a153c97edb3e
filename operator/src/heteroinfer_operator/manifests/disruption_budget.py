"""PodDisruptionBudget of a group. Pure.

A group is one unit: the eviction of one pod ends its epoch, and the next starts elsewhere. The
budget lets one pod go, and no other of the group until it serves again, so that a drain of
node after node ends a group once a node and not in the middle of its start. It never blocks for
ever: a group without free capacity has no pods, one that fails gives its pods up, and one that sleeps,
which is not Ready, does not count on being spared.
"""

from typing import Any, Final

from heteroinfer_operator.manifests import identity
from heteroinfer_operator.manifests.identity import GroupRef

KIND: Final = "PodDisruptionBudget"


def build_disruption_budget(group: GroupRef, *, pods: int, asleep: bool) -> dict[str, Any]:
    """Returns the budget of a group of two pods or more; one pod alone may always go.

    A number and no percentage: the disruption controller would look for the pods' number in the
    resource's /scale, which counts groups.

    Args:
        asleep: whether its pods are not Ready on purpose.
    """
    return {
        "apiVersion": "policy/v1",
        "kind": KIND,
        "metadata": identity.group_metadata(group, identity.group_service(group.owner, group.index)),
        "spec": {
            "minAvailable": pods - 1,
            "selector": {"matchLabels": identity.group_labels(group)},
            "unhealthyPodEvictionPolicy": "AlwaysAllow" if asleep else "IfHealthyBudget",
        },
    }
