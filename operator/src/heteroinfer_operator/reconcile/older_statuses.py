"""Compatibility with statuses of older versions, and sentences that those versions parse. Pure.

Remove this module with 0.4.0. Version 0.1.0, and 0.2.0 before typed transitions, read data back from
messages, and would do so again after a rollback. The sentences here must stay word for word; otherwise those
versions would report the same fact a second time.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from heteroinfer_contract import names
from heteroinfer_operator.api import ConditionStatus, ConditionType, HeteroInferenceStatus, PlanStatus
from heteroinfer_operator.api.base import MAX_TEXT
from heteroinfer_operator.manifests.identity import Owner

NO_CLIENTS: Final = "no Service sends clients to it"
NO_API: Final = "clients are sent to it, and it has no API"
NO_POLICY: Final = "its group's NetworkPolicy does not select it"
"""Effects of lost labels on clients and policies."""


def plan_notes(status: HeteroInferenceStatus) -> str | None:
    """Reads the notes on plans from the message of Planned; None if plans have notes of their own."""
    planned = status.condition(ConditionType.PLANNED.value)
    if planned is None or planned.status is not ConditionStatus.TRUE or any(p.notes for p in status.plans):
        return None
    return planned.message[:MAX_TEXT] or None


def planned_message(plans: Iterable[PlanStatus]) -> str:
    """Returns the message of Planned while it is True. Older versions read the message as notes on plans."""
    return "; ".join(dict.fromkeys(plan.notes for plan in plans if plan.notes))


def already_reports(status: HeteroInferenceStatus, loss: str) -> bool:
    """Reports whether the messages of a status without `damagedPod` contain this loss."""
    model = status.condition(ConditionType.MODEL_READY.value)
    messages = [group.message for group in status.groups] + [model.message if model else ""]
    return any(loss in message for message in messages if message)


def lost_label(owner: Owner, pod: str, lost: Mapping[str, str | None], *, effects: Sequence[str]) -> str:
    """Describes a pod whose labels another user changed (frozen sentence).

    Args:
        lost: correct values of the changed labels; None for a label that the pod must not have.
        effects: effects of the change on clients and policies.
    """
    correct = [f"{label}={value}" for label, value in lost.items() if value is not None]
    not_allowed = [label for label, value in lost.items() if value is None]
    differences = [f"has lost {', '.join(correct)}"] if correct else []
    differences += [f"has {', '.join(not_allowed)}, which is the leader's"] if not_allowed else []
    command = " ".join([*correct, *(f"{label}-" for label in not_allowed)])
    effect = f": {', and '.join(effects)}" if effects else ""
    return (
        f"pod {pod} {' and '.join(differences)}{effect}; put it right: "
        f"kubectl label pod -n {owner.key.namespace} {pod} --overwrite {command}"
    )


def lost_owner(owner: Owner, pod: str) -> str:
    """Describes a pod whose owner another user removed (frozen sentence)."""
    patch = json.dumps({"metadata": {"ownerReferences": [owner.reference]}}, separators=(",", ":"))
    return (
        f"pod {pod} has lost its ownerReference: no watch of the operator shows it, and Kubernetes does "
        f"not delete it together with its {names.KIND}; put it back: "
        f"kubectl patch pod -n {owner.key.namespace} {pod} --type merge -p '{patch}'"
    )
