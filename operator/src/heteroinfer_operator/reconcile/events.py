"""Events of a reconcile: what people should look at first. Pure."""

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
from heteroinfer_operator.reconcile.group.decision import GroupDecision
from heteroinfer_operator.reconcile.group_planner import CAPACITY_REASONS
from heteroinfer_operator.reconcile.lost_labels import REASON as LOST_LABEL
from heteroinfer_operator.reconcile.model_decision import ModelDecision
from heteroinfer_operator.reconcile.reconcile_context import Context


def joined(events: Sequence[RecordEvent]) -> list[RecordEvent]:
    """Returns the events of all groups with one event for each reason: a minute has room for ten."""
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
    """Returns an event for each pod of which it is new that it lacks a label."""
    before = status.condition(ConditionType.MODEL_READY.value)
    said = [(model.lost_labels, before.message if before is not None else "")]
    for decision in wanted:
        group = old.get(decision.status.index)
        said.append((decision.lost_labels, (group.message if group is not None else "") or ""))
    return [
        RecordEvent(reason=LOST_LABEL, message=words, warning=True)
        for words, reported in said
        if words and words not in reported
    ]


def forgery_events(context: Context, actions: Sequence[Action]) -> list[RecordEvent]:
    """Returns an event for each ConfigMap that is deleted because somebody else wrote it."""
    refused = {refusal.name for refusal in context.refusals if refusal.retry_at > context.now}
    deleted = {action.name for action in actions if isinstance(action, DeleteObject)} - refused
    return [
        RecordEvent(
            reason="RecordNotSigned",
            message=f"ConfigMap {name}: the operator did not write this content (no valid code in annotation "
            f"{names.ANNOTATION_CODE}). It is ignored and deleted; a copy that is in use is written anew. "
            "Check who may write ConfigMaps in this namespace",
            warning=True,
        )
        for name in context.forged
        if name in deleted
    ]


def condition_events(before: Sequence[Condition], after: Sequence[Condition]) -> list[RecordEvent]:
    """Returns an event for each refusal that is new: people look at events first.

    What is free on nodes changes all the time: of missing capacity each reason is reported once.
    """
    reported = {
        _announced_as(condition) for condition in before if condition.status is not ConditionStatus.UNKNOWN
    }
    bad_if_false = {
        ConditionType.PLANNED.value,
        ConditionType.MODEL_READY.value,
        ConditionType.CAPACITY_AVAILABLE.value,
    }
    bad_if_true = {ConditionType.STALLED.value, ConditionType.FAILED.value}
    refused = [c for c in after if c.type in bad_if_false and c.status is ConditionStatus.FALSE]
    refused += [c for c in after if c.type in bad_if_true and c.status is ConditionStatus.TRUE]
    # A lost label has an event of its own, whatever else is wrong.
    fresh = [c for c in refused if _announced_as(c) not in reported and c.reason != LOST_LABEL]
    seen = {(c.reason, c.message): c for c in fresh}
    return [RecordEvent(reason=c.reason, message=c.message[:1000], warning=True) for c in seen.values()]


def _announced_as(condition: Condition) -> tuple[str, ...]:
    if condition.reason in CAPACITY_REASONS:
        return (condition.type, condition.reason)
    return (condition.type, condition.reason, condition.message)
