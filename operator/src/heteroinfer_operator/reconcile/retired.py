"""Groups that were scaled away; their failures still count after a scale-up. Pure.

An autoscaler removes and adds groups with the load. If each added group began without failures, a failing
start would repeat without end and without the wait between attempts.
"""

from collections.abc import Collection

from heteroinfer_operator.api import GroupStatus, HeteroInferenceStatus, RetiredGroup
from heteroinfer_operator.reconcile import restarts
from heteroinfer_operator.reconcile.reconcile_context import Context


def known_groups(status: HeteroInferenceStatus) -> dict[int, GroupStatus]:
    """Returns the last status of each group by index, including groups that were scaled away."""
    kept = {group.index: GroupStatus(**dict(group)) for group in status.retired_groups}
    return kept | {group.index: group for group in status.groups}


def build_retired_groups(
    context: Context, status: HeteroInferenceStatus, present: Collection[int]
) -> tuple[RetiredGroup, ...]:
    """Returns entries for groups that no longer exist but whose failures still count."""
    groups = [group for index, group in sorted(known_groups(status).items()) if index not in present]
    return tuple(_build_entry(group) for group in groups if _still_matters(context, group))


def _still_matters(context: Context, group: GroupStatus) -> bool:
    """Reports whether the failures of a group that was scaled away would affect its next start."""
    is_replaced = context.target.refusal is None and group.revision != context.target.name
    return not is_replaced and restarts.still_count(group.failures, context.life.restart, context.now)


def _build_entry(group: GroupStatus) -> RetiredGroup:
    """Returns the values of a group that still count; keeps only the last failure's message to save space."""
    without_messages = tuple(failure.changed(message="") for failure in group.failures[:-1])
    return RetiredGroup(
        index=group.index,
        epoch=group.epoch,
        revision=group.revision,
        restarts=group.restarts,
        next_epoch_time=group.next_epoch_time,
        failures=(*without_messages, *group.failures[-1:]),
    )
