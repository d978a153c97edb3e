"""Remembers the pods that were deleted before they had a node. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from heteroinfer_operator.cluster import ResourceKey
from heteroinfer_operator.kube.trim import PodRecord
from heteroinfer_operator.manifests.identity import Owner, parse_worker_name
from heteroinfer_operator.nodes.node_assignment import Gang
from heteroinfer_operator.reconcile.group_planner import read_gang


@dataclass(slots=True)
class NeverPlaced:
    """The pods that were deleted before they had a node, by resource.

    The API server removes such a pod immediately, without a grace period, so no reconcile sees the pod end.
    Only the watch's event of the deletion shows that the pod had no node.
    """

    _pods: dict[ResourceKey, dict[str, str]] = field(default_factory=dict)
    """The uid of the pod's owner, by resource and pod name."""

    def record_deleted(self, pod: PodRecord) -> None:
        """Records a deleted pod if it never had a node, because a new pod of the epoch can replace it.

        Does not record a pod of a Kueue gang: Kueue keeps the name of the deleted pod, so no pod of the same
        epoch can replace this pod.
        """
        is_replaceable = read_gang([pod.view]) is not Gang.KUEUE
        if not pod.view.node and not pod.view.started and is_replaceable:
            self._pods.setdefault(pod.key, {})[pod.view.name] = pod.owner_uid

    def forget_existing(self, key: ResourceKey, name: str) -> None:
        """Forgets a deleted pod, because a pod with this name exists now."""
        self._pods.get(key, {}).pop(name, None)

    def names(self, owner: Owner, epochs: Mapping[int, int]) -> frozenset[str]:
        """Returns the names of a resource's pods that were deleted before they had a node.

        Removes the pods of epochs that are over.

        Args:
            epochs: stored epoch of each group, by group index.
        """
        owner_uids = self._pods.pop(owner.key, {})
        current_pods = {
            name: uid
            for name, uid in owner_uids.items()
            if uid == owner.uid and _is_current(owner, name, epochs)
        }
        if current_pods:
            self._pods[owner.key] = current_pods
        return frozenset(current_pods)

    def forget(self, key: ResourceKey) -> None:
        """Removes the pods of a resource that is gone."""
        self._pods.pop(key, None)


def _is_current(owner: Owner, name: str, epochs: Mapping[int, int]) -> bool:
    """Reports whether a pod's name belongs to the stored epoch of its group, or to a later epoch."""
    parsed_name = parse_worker_name(owner, name)
    if parsed_name is None:
        return False
    group, epoch, _ = parsed_name
    return epoch >= epochs.get(group, 0)
