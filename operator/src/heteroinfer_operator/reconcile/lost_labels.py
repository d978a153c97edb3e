"""Pods whose labels or owner another user removed: the effects, and the command that restores them. Pure.

The operator has no permission to change pods, so it reports the loss and the command to users. The epoch
continues: the name of a pod identifies its resource.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from heteroinfer_contract import names
from heteroinfer_operator.cluster import PodView
from heteroinfer_operator.manifests.identity import Owner
from heteroinfer_operator.reconcile import older_statuses, transitions
from heteroinfer_operator.reconcile.one_group.decision import GroupDecision
from heteroinfer_operator.reconcile.reading import epoch_of, index_of

REASON: Final = "PodLabelLost"
_CLIENT_LABELS: Final = frozenset({names.LABEL_RESOURCE, names.LABEL_COMPONENT, names.LABEL_LEADER})
"""Labels by which the Service of clients selects leaders."""
_GROUP_LABELS: Final = frozenset({names.LABEL_RESOURCE, names.LABEL_COMPONENT, names.LABEL_GROUP})
"""Labels by which a group's NetworkPolicy, headless Service and disruption budget select pods."""


class LostPod(NamedTuple):
    """A pod that lost a label or its owner, and the message about it."""

    pod: str
    description: str


def find_lost(owner: Owner, pods: Sequence[PodView]) -> LostPod | None:
    """Returns the first pod that lost a label, otherwise the first pod that lost its owner, or None.

    The message for the user comes from `older_statuses`, because older versions parse this message.
    """
    without_label = next((pod for pod in pods if _lost_selector_labels(pod)), None)
    if without_label is not None:
        return LostPod(without_label.name, _describe_lost_labels(owner, without_label))
    without_owner = next((pod for pod in pods if pod.lost_owner), None)
    if without_owner is not None:
        return LostPod(without_owner.name, older_statuses.lost_owner(owner, without_owner.name))
    return None


def is_cut_off(pods: Sequence[PodView]) -> bool:
    """Reports whether the Service for clients does not select the leader, because the leader lost labels.

    The leader is the pod with index 0, and the only pod of an epoch that the Service can select.
    """
    return not any(index_of(pod) == 0 and _CLIENT_LABELS.isdisjoint(pod.lost_labels) for pod in pods)


def with_lost_labels(owner: Owner, decision: GroupDecision, pods: Sequence[PodView]) -> GroupDecision:
    """Adds a lost label or owner of one of the group's pods to the decision and to the group's message."""
    current = [pod for pod in pods if epoch_of(pod) == decision.status.epoch and not pod.ended]
    loss = find_lost(owner, current) if decision.runs else None
    if loss is None:
        return decision
    return replace(
        decision,
        status=transitions.with_lost_label(decision.status, pod=loss.pod, description=loss.description),
        lost_labels_message=loss.description,
        is_cut_off=is_cut_off(current),
    )


def _lost_selector_labels(pod: PodView) -> dict[str, str | None]:
    """Returns the lost labels by which a Service or policy selects pods, with their correct values.

    The loss of other labels has no effect.
    """
    selecting = _CLIENT_LABELS | _GROUP_LABELS
    return {label: value for label, value in sorted(pod.lost_labels.items()) if label in selecting}


def _describe_lost_labels(owner: Owner, pod: PodView) -> str:
    """Returns the message about the lost labels of a pod, with their effects and the fix."""
    lost = _lost_selector_labels(pod)
    return older_statuses.lost_label(owner, pod.name, lost, effects=_effects_of_loss(pod, frozenset(lost)))


def _effects_of_loss(pod: PodView, lost: frozenset[str]) -> list[str]:
    """Returns the effects of lost labels of a worker pod, as texts; empty for a model pod."""
    if pod.labels.get(names.LABEL_COMPONENT) != names.COMPONENT_WORKER:
        return []
    effects = []
    is_leader = index_of(pod) == 0
    if is_leader and lost & _CLIENT_LABELS:
        effects.append(older_statuses.NO_CLIENTS)
    if not is_leader and names.LABEL_LEADER in lost:  # a follower has the label of a leader
        effects.append(older_statuses.NO_API)
    if lost & _GROUP_LABELS:
        effects.append(older_statuses.NO_POLICY)
    return effects
