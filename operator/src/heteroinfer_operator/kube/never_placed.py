"""Remembers the pods that were deleted before they had a node. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from heteroinfer_operator.cluster import ResourceKey
from heteroinfer_operator.kube.trim import PodRecord
from heteroinfer_operator.manifests.identity import Owner, find_place
from heteroinfer_operator.nodes.node_assignment import Gang
from heteroinfer_operator.reconcile.group_planner import gang_of


@dataclass(slots=True)
class NeverPlaced:
    """The pods that vanished without a node, by resource.

    The API server removes such a pod at once, without a grace period, so no reconcile sees it end. Its last
    state is in the watch's event. A process that missed the event cannot know this.
    """

    _pods: dict[ResourceKey, dict[str, str]] = field(default_factory=dict)
    """The uid of the pod's owner, by resource and pod name."""

    def note_deleted(self, pod: PodRecord) -> None:
        """Notes a pod that a watch reported as deleted, in its last state.

        Kueue keeps the name of each pod of its gang, so no other pod of that epoch can have it.
        """
        if not pod.view.node and not pod.view.started and gang_of([pod.view]) is not Gang.KUEUE:
            self._pods.setdefault(pod.key, {})[pod.view.name] = pod.owner_uid

    def note_shown(self, key: ResourceKey, name: str) -> None:
        """Forgets a pod whose name a stored pod has."""
        self._pods.get(key, {}).pop(name, None)

    def names(self, owner: Owner, epochs: Mapping[int, int]) -> frozenset[str]:
        """Returns the names of a resource's pods, and forgets those of epochs that are over.

        Args:
            epochs: stored epoch of each group, by group index.
        """
        known = self._pods.pop(owner.key, {})
        kept = {
            name: uid for name, uid in known.items() if uid == owner.uid and _is_current(owner, name, epochs)
        }
        if kept:
            self._pods[owner.key] = kept
        return frozenset(kept)

    def forget(self, key: ResourceKey) -> None:
        """Forgets the pods of a resource that is gone."""
        self._pods.pop(key, None)


def _is_current(owner: Owner, name: str, epochs: Mapping[int, int]) -> bool:
    place = find_place(owner, name)
    return place is not None and place[1] >= epochs.get(place[0], 0)
