"""Which epoch of a group is believed, and which of its pods count. Pure.

Pods that live win over the status: the status may be damaged, or be of a write whose deletes were never
sent. A pod counts only if the operator can have made it: others can create pods with any name, label and
owner.
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
    """What is believed of one group.

    Attributes:
        status: as last written, without what the pods refute.
        pods: of the group, of its epoch and of older ones.
        strangers: pods with the name and owner of a pod of the group that the operator has not made.
    """

    status: GroupStatus
    pods: tuple[PodView, ...]
    strangers: tuple[PodView, ...] = ()


def believe(context: Context, status: GroupStatus, pods: Sequence[PodView]) -> BelievedGroup:
    """Returns what is believed of a group."""
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
    """Returns the epoch of which all pods are there and none has ended, or None.

    The status is written before the pods of an ended epoch are deleted. If the operator dies in between, a
    pod of that epoch has ended or is missing, or the end is decided again. An epoch that lives on regardless
    and whose end is on record is believed only while it serves. Of two that are equal in this the status's is
    believed: others can make all pods of a higher one.
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
    """Returns whether the operator can have written a status's epoch, or has made pods of it."""
    return status.epoch <= context.largest_epoch or not by_epoch.keys().isdisjoint(
        {status.epoch, status.epoch - 1}
    )


def _can_be(context: Context, status: GroupStatus, epoch: int) -> bool:
    """Returns whether the operator can have made a pod of an epoch."""
    return epoch <= context.largest_epoch or epoch in {status.epoch, status.epoch - 1}


def _with_members_of(context: Context, status: GroupStatus, epoch: int, made: Made) -> GroupStatus:
    """Returns the status without entries of pods that the epoch cannot have."""

    def can_be(entry: RankEntry) -> bool:
        place = identity.find_place(context.owner, entry.pod)
        return place is not None and place[:2] == (status.index, epoch) and made.has(place[2])

    members = tuple(entry for entry in status.members if can_be(entry))
    return status if len(members) == len(status.members) else transitions.with_members(status, members)
