"""Groups that were scaled away and whose failures count when they come again. Pure.

An autoscaler goes down and up as load does: were each group that comes again a new one, a start that fails
would be tried without end, and the wait between two tries be jumped.
"""

from collections.abc import Collection

from heteroinfer_operator.api import GroupStatus, HeteroInferenceStatus, RetiredGroup
from heteroinfer_operator.reconcile import restarts
from heteroinfer_operator.reconcile.reconcile_context import Context


def known_groups(status: HeteroInferenceStatus) -> dict[int, GroupStatus]:
    """Returns by index what is known of each group, of those that were scaled away too."""
    kept = {group.index: GroupStatus(**dict(group)) for group in status.retired_groups}
    return kept | {group.index: group for group in status.groups}


def retire(
    context: Context, status: HeteroInferenceStatus, present: Collection[int]
) -> tuple[RetiredGroup, ...]:
    """Returns what is to be remembered of groups that there are not any more."""
    groups = [group for index, group in sorted(known_groups(status).items()) if index not in present]
    return tuple(_retired(group) for group in groups if _is_remembered(context, group))


def _is_remembered(context: Context, group: GroupStatus) -> bool:
    is_replaced = context.target.refusal is None and group.revision != context.target.name
    return not is_replaced and restarts.still_count(group.failures, context.life.restart, context.now)


def _retired(group: GroupStatus) -> RetiredGroup:
    """Returns what counts of a group; words of its last failure alone, since the status has a size."""
    bare = tuple(failure.changed(message="") for failure in group.failures[:-1])
    return RetiredGroup(
        index=group.index,
        epoch=group.epoch,
        revision=group.revision,
        restarts=group.restarts,
        next_epoch_time=group.next_epoch_time,
        failures=(*bare, *group.failures[-1:]),
    )
