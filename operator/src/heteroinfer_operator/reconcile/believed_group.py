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
from heteroinfer_operator.reconcile.one_group.made import EpochOrigin
from heteroinfer_operator.reconcile.reading import epoch_of, index_of
from heteroinfer_operator.reconcile.reconcile_context import Context


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedGroup:
    """A group's status and pods after the check.

    Attributes:
        status: last written status, without values that contradict the pods.
        pods: pods of the group's current epoch and of older epochs.
        strangers: pods that the operator did not create, although their name and owner are those of a pod of
            the group.
    """

    status: GroupStatus
    pods: tuple[PodView, ...]
    strangers: tuple[PodView, ...] = ()


def check_against_pods(context: Context, status: GroupStatus, pods: Sequence[PodView]) -> CheckedGroup:
    """Removes status values that the operator cannot have written, and pods that it cannot have created.

    The current epoch is the running epoch. If no epoch runs, it is the highest epoch that the operator can
    have created.
    """
    by_epoch: dict[int, list[PodView]] = defaultdict(list)
    for pod in pods:
        by_epoch[epoch_of(pod)].append(pod)
    running_epoch = _find_running_epoch(context, status, by_epoch)
    # Pods of an older epoch still run: the operator wrote the new epoch, and died before it deleted them.
    is_ahead_of_pods = running_epoch is not None and status.epoch > running_epoch
    if is_ahead_of_pods or not _status_epoch_is_possible(context, status, by_epoch):
        status = transitions.without_epoch(status)
    possible_epochs = [epoch for epoch in by_epoch if _pod_epoch_is_possible(context, status, epoch)]
    newest_epoch = max([status.epoch, *possible_epochs])
    epoch = newest_epoch if running_epoch is None else running_epoch
    current_pods = by_epoch.get(epoch, ())
    origin = EpochOrigin.from_pods(context, status, current_pods)
    older_pods = [pod for pod in pods if epoch_of(pod) < epoch]
    possible_pods = [pod for pod in current_pods if origin.can_have_pod(index_of(pod))]
    own_uids = {pod.uid for pod in (*older_pods, *possible_pods)}
    return CheckedGroup(
        status=_without_impossible_members(context, status, epoch, origin),
        pods=tuple(pod for pod in pods if pod.uid in own_uids),
        strangers=tuple(pod for pod in pods if pod.uid not in own_uids),
    )


def _find_running_epoch(
    context: Context, status: GroupStatus, by_epoch: Mapping[int, Sequence[PodView]]
) -> int | None:
    """Returns the epoch whose pods all exist and have not ended; None without such an epoch.

    If the status already contains the end of an epoch, this epoch counts only while all its pods are Ready.
    Then the end is ignored: the operator writes an end before it deletes the pods, and may die in between. If
    the end was right, a pod has ended or is missing, or the operator finds the end again.

    Of several such epochs, an epoch with only Ready pods takes precedence, then the epoch of the status, then
    the highest epoch. The epoch of the status comes before a higher epoch, because other users can create all
    pods of a higher epoch.
    """
    ended_epochs = {failure.epoch for failure in status.failures}
    candidates: list[tuple[bool, bool, int]] = []
    for epoch, pods in by_epoch.items():
        origin = EpochOrigin.from_pods(context, status, pods)
        possible_pods = [pod for pod in pods if origin.can_have_pod(index_of(pod))]
        have_all_pods = bool(possible_pods) and not origin.missing_indices(possible_pods)
        is_whole = have_all_pods and not any(pod.ended for pod in possible_pods)
        # Without the number of pods, a missing pod would go unnoticed.
        serves = origin.knows_pod_count and all(pod.ready for pod in possible_pods)
        if is_whole and (serves or epoch not in ended_epochs):
            candidates.append((serves, epoch == status.epoch, epoch))
    if not candidates:
        return None
    _, _, running_epoch = max(candidates)
    return running_epoch


def _status_epoch_is_possible(
    context: Context, status: GroupStatus, by_epoch: Mapping[int, Sequence[PodView]]
) -> bool:
    """Reports whether the operator can have written the epoch in this status.

    The number must be at most `largest_epoch`, or pods of this epoch or of the epoch before it must exist:
    the operator writes an epoch to the status before it creates the epoch's pods.
    """
    return status.epoch <= context.largest_epoch or not by_epoch.keys().isdisjoint(
        {status.epoch, status.epoch - 1}
    )


def _pod_epoch_is_possible(context: Context, status: GroupStatus, epoch: int) -> bool:
    """Reports whether the operator can have created a pod of this epoch.

    The number must be at most `largest_epoch`, or be the epoch in the status or the epoch before that.
    """
    return epoch <= context.largest_epoch or epoch in {status.epoch, status.epoch - 1}


def _without_impossible_members(
    context: Context, status: GroupStatus, epoch: int, origin: EpochOrigin
) -> GroupStatus:
    """Removes the entries of pods that the epoch cannot have."""

    def is_possible(entry: RankEntry) -> bool:
        """Reports whether this group and epoch can have a pod with the name in the entry."""
        parsed_name = identity.parse_worker_name(context.owner, entry.pod)
        if parsed_name is None:
            return False
        group, epoch_in_name, pod_index = parsed_name
        return (group, epoch_in_name) == (status.index, epoch) and origin.can_have_pod(pod_index)

    members = tuple(entry for entry in status.members if is_possible(entry))
    return status if len(members) == len(status.members) else transitions.with_members(status, members)
