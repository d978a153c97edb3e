"""The events of a reconcile. Users see them first in `kubectl describe`. Pure."""

from collections.abc import Mapping, Sequence

from heteroinfer_contract import names
from heteroinfer_operator.api import (
    Condition,
    ConditionStatus,
    ConditionType,
    GroupStatus,
    HeteroInferenceStatus,
)
from heteroinfer_operator.cluster import Action, DeleteObject, RecordEvent
from heteroinfer_operator.reconcile import older_statuses
from heteroinfer_operator.reconcile.group_planner import CAPACITY_REASONS
from heteroinfer_operator.reconcile.lost_labels import REASON as LOST_LABEL
from heteroinfer_operator.reconcile.model_decision import ModelDecision
from heteroinfer_operator.reconcile.one_group.decision import GroupDecision
from heteroinfer_operator.reconcile.reconcile_context import Context


def join_events(events: Sequence[RecordEvent]) -> list[RecordEvent]:
    """Joins events of the same reason. A resource may have only ten events a minute."""
    messages: dict[tuple[str, bool], list[str]] = {}
    for event in events:
        messages.setdefault((event.reason, event.warning), []).append(event.message)
    return [
        RecordEvent(reason=reason, message="; ".join(dict.fromkeys(texts))[:1000], warning=warning)
        for (reason, warning), texts in messages.items()
    ]


def lost_label_events(
    status: HeteroInferenceStatus,
    last_statuses: Mapping[int, GroupStatus],
    wanted: Sequence[GroupDecision],
    model: ModelDecision,
) -> list[RecordEvent]:
    """Returns an event for each pod that has newly lost a label or its owner."""
    reported = {group.damaged_pod for group in last_statuses.values()}
    if status.model is not None:
        reported.add(status.model.damaged_pod)
    damaged = [(model.status.damaged_pod, model.lost_labels_message)]
    damaged += [(decision.status.damaged_pod, decision.lost_labels_message) for decision in wanted]
    return [
        RecordEvent(reason=LOST_LABEL, message=message, warning=True)
        for pod, message in damaged
        if message and pod not in reported and not older_statuses.already_reports(status, message)
    ]


def forgery_events(context: Context, actions: Sequence[Action]) -> list[RecordEvent]:
    """Returns an event for each ConfigMap that the operator deletes because another user wrote it."""
    # The operator does not delete an object now if the last delete was refused and its retry is not due.
    waiting_for_retry = {refusal.name for refusal in context.refusals if refusal.retry_at > context.now}
    deletes = {action.name for action in actions if isinstance(action, DeleteObject)}
    deleted_now = deletes - waiting_for_retry
    return [
        RecordEvent(
            reason="RecordNotSigned",
            message=f"ConfigMap {name}: the operator did not write this content (no valid code in annotation "
            f"{names.ANNOTATION_CODE}). The operator ignores and deletes this ConfigMap, and restores the "
            "content if a group uses it. Check which users may write ConfigMaps in this namespace",
            warning=True,
        )
        for name in context.forged
        if name in deleted_now
    ]


def condition_events(before: HeteroInferenceStatus, after: HeteroInferenceStatus) -> list[RecordEvent]:
    """Returns an event for each new problem in the conditions.

    A problem is new if the earlier conditions did not report it for the same revision of the spec. Missing
    capacity is not new if the earlier conditions reported it for any revision.
    """
    # An Unknown condition reports no problem, even if its reason is the same.
    reported = {
        _identity_of_problem(before, condition)
        for condition in before.conditions
        if condition.status is not ConditionStatus.UNKNOWN
    }
    bad_if_false = {
        ConditionType.PLANNED.value,
        ConditionType.MODEL_READY.value,
        ConditionType.CAPACITY_AVAILABLE.value,
    }
    bad_if_true = {ConditionType.STALLED.value, ConditionType.FAILED.value}
    false_conditions = [each for each in after.conditions if each.status is ConditionStatus.FALSE]
    true_conditions = [each for each in after.conditions if each.status is ConditionStatus.TRUE]
    problems = [each for each in false_conditions if each.type in bad_if_false]
    problems += [each for each in true_conditions if each.type in bad_if_true]
    new_by_reason = {  # several conditions may report one problem
        problem.reason: problem
        for problem in problems
        if _identity_of_problem(after, problem) not in reported
        and problem.reason != LOST_LABEL  # `lost_label_events` reports lost labels
    }
    return [
        RecordEvent(reason=problem.reason, message=problem.message[:1000], warning=True)
        for problem in new_by_reason.values()
    ]


def _identity_of_problem(status: HeteroInferenceStatus, condition: Condition) -> tuple[str, str, str | None]:
    """Returns the identity of a problem: condition, reason and revision of the spec.

    The operator writes one event for each identity. Missing capacity has no revision in its identity, so it
    is reported once for all revisions.
    """
    is_capacity = condition.reason in CAPACITY_REASONS
    return condition.type, condition.reason, None if is_capacity else status.update_revision
