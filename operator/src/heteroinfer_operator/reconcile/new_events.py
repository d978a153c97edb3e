"""The events of a reconcile: users see them first in `kubectl describe`. Pure."""

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


def joined(events: Sequence[RecordEvent]) -> list[RecordEvent]:
    """Joins the events of all groups to one event for each reason: the limit is ten events a minute."""
    joined: dict[tuple[str, bool], list[str]] = {}
    for event in events:
        joined.setdefault((event.reason, event.warning), []).append(event.message)
    return [
        RecordEvent(reason=reason, message="; ".join(dict.fromkeys(words))[:1000], warning=warning)
        for (reason, warning), words in joined.items()
    ]


def lost_label_events(
    status: HeteroInferenceStatus,
    old: Mapping[int, GroupStatus],
    wanted: Sequence[GroupDecision],
    model: ModelDecision,
) -> list[RecordEvent]:
    """Reports each pod that has newly lost a label or its owner."""
    reported = {group.damaged_pod for group in old.values()}
    reported |= {status.model.damaged_pod} if status.model is not None else set()
    damaged = [(model.status.damaged_pod, model.lost_labels)]
    damaged += [(decision.status.damaged_pod, decision.lost_labels) for decision in wanted]
    return [
        RecordEvent(reason=LOST_LABEL, message=words, warning=True)
        for pod, words in damaged
        if words and pod not in reported and not older_statuses.reports_loss(status, words)
    ]


def forgery_events(context: Context, actions: Sequence[Action]) -> list[RecordEvent]:
    """Reports each ConfigMap that the operator deletes because another user wrote it."""
    refused = {refusal.name for refusal in context.refusals if refusal.retry_at > context.now}
    deleted = {action.name for action in actions if isinstance(action, DeleteObject)} - refused
    return [
        RecordEvent(
            reason="RecordNotSigned",
            message=f"ConfigMap {name}: the operator did not write this content (no valid code in annotation "
            f"{names.ANNOTATION_CODE}). The operator ignores and deletes it, and restores the content if it "
            "is in use. Check which users may write ConfigMaps in this namespace",
            warning=True,
        )
        for name in context.forged
        if name in deleted
    ]


def condition_events(before: HeteroInferenceStatus, after: HeteroInferenceStatus) -> list[RecordEvent]:
    """Reports each new problem in the conditions.

    Each reason is reported once for each revision of the spec. Missing capacity is reported only once,
    because the free capacity of nodes changes all the time.
    """
    reported = {
        _event_key(before, each) for each in before.conditions if each.status is not ConditionStatus.UNKNOWN
    }
    bad_if_false = {
        ConditionType.PLANNED.value,
        ConditionType.MODEL_READY.value,
        ConditionType.CAPACITY_AVAILABLE.value,
    }
    bad_if_true = {ConditionType.STALLED.value, ConditionType.FAILED.value}
    refused = [c for c in after.conditions if c.type in bad_if_false and c.status is ConditionStatus.FALSE]
    refused += [c for c in after.conditions if c.type in bad_if_true and c.status is ConditionStatus.TRUE]
    # `lost_label_events` reports lost labels.
    fresh = [c for c in refused if _event_key(after, c) not in reported and c.reason != LOST_LABEL]
    seen = {c.reason: c for c in fresh}
    return [RecordEvent(reason=c.reason, message=c.message[:1000], warning=True) for c in seen.values()]


def _event_key(status: HeteroInferenceStatus, condition: Condition) -> tuple[str, str, str | None]:
    lasts = condition.reason in CAPACITY_REASONS
    return condition.type, condition.reason, None if lasts else status.update_revision
