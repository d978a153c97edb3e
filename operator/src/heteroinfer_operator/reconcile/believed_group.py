"""Determines the real epoch of a group, and which pods belong to the group. Pure.

Running pods take precedence over the status: the status may be damaged, or the operator may have died after
it wrote the status and before it deleted the pods. A pod belongs to the group only if the operator can have
created it: other users can create pods with any name, label and owner.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from heteroinfer_operator.api import GroupStatus, RankEntry
from heteroinfer_operator.cluster import PodView
from heteroinfer_operator.manifests import identity
from heteroinfer_operator.reconcile import transitions
from heteroinfer_operator.reconcile.one_group.made import Made
from heteroinfer_operator.reconcile.reading import epoch_of, index_of
from heteroinfer_operator.reconcile.reconcile_context import Context


@dataclass(frozen=True, slots=True, kw_only=True)
class BelievedGroup:
    """A group's status and pods after the check.

    Attributes:
        status: last written status without the values that the pods refute.
        pods: pods of the group's current epoch and of older epochs.
        strangers: pods that the operator did not create, with the name and owner of a pod of the group.
    """

    status: GroupStatus
    pods: tuple[PodView, ...]
    strangers: tuple[PodView, ...] = ()


def believe(context: Context, status: GroupStatus, pods: Sequence[PodView]) -> BelievedGroup:
    """Checks a group's status against its pods."""
    by_epoch: dict[int, list[PodView]] = defaultdict(list)
    for pod in pods:
        by_epoch[epoch_of(pod)].append(pod)
    living = _find_living(context, status, by_epoch)
    if not _is_believed(context, status, by_epoch) or (living is not None and status.epoch > living):
        status = transitions.without_epoch(status)
    newest = max([status.epoch, *(epoch for epoch in by_epoch if _can_be(context, status, epoch))])
    epoch = newest if living is None else living
    current = by_epoch.get(epoch, ())
    made = Made.of(context, status, current)
    own = {pod.uid for found in by_epoch for pod in by_epoch[found] if found < epoch}
    own |= {pod.uid for pod in current if made.has(index_of(pod))}
    return BelievedGroup(
        status=_with_members_of(context, status, epoch, made),
        pods=tuple(pod for pod in pods if pod.uid in own),
        strangers=tuple(pod for pod in pods if pod.uid not in own),
    )


def _find_living(
    context: Context, status: GroupStatus, by_epoch: Mapping[int, Sequence[PodView]]
) -> int | None:
    """Finds the epoch whose pods all exist, with none ended, or None.

    The operator writes the status before it deletes the pods of an ended epoch. If it dies in between, a pod
    of that epoch has ended or is missing, or the operator decides the end again. An epoch with a recorded end
    that still runs counts only while it serves. Between two equal candidates the epoch of the status wins:
    other users can create all pods of a higher epoch.
    """
    recorded = {failure.epoch for failure in status.failures}
    found: list[tuple[bool, bool, int]] = []
    for epoch, pods in by_epoch.items():
        made = Made.of(context, status, pods)
        own = [pod for pod in pods if made.has(index_of(pod))]
        serves = made.is_known and all(pod.ready for pod in own)
        is_whole = bool(own) and not made.missing(own) and not any(pod.ended for pod in own)
        if is_whole and (serves or epoch not in recorded):
            found.append((serves, epoch == status.epoch, epoch))
    return max(found)[2] if found else None


def _is_believed(context: Context, status: GroupStatus, by_epoch: Mapping[int, Sequence[PodView]]) -> bool:
    """Checks whether the operator can have written the status's epoch, or has created pods of that epoch."""
    return status.epoch <= context.largest_epoch or not by_epoch.keys().isdisjoint(
        {status.epoch, status.epoch - 1}
    )


def _can_be(context: Context, status: GroupStatus, epoch: int) -> bool:
    """Checks whether the operator can have created a pod of this epoch."""
    return epoch <= context.largest_epoch or epoch in {status.epoch, status.epoch - 1}


def _with_members_of(context: Context, status: GroupStatus, epoch: int, made: Made) -> GroupStatus:
    """Removes the entries of pods that the epoch cannot have."""

    def can_be(entry: RankEntry) -> bool:
        place = identity.find_place(context.owner, entry.pod)
        return place is not None and place[:2] == (status.index, epoch) and made.has(place[2])

    members = tuple(entry for entry in status.members if can_be(entry))
    return status if len(members) == len(status.members) else transitions.with_members(status, members)
