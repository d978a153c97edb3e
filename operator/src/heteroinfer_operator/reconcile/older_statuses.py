"""What other versions' statuses lack, and the sentences that those versions read back. Goes with 0.4.0. Pure.

0.1.0 and 0.2.0 before typed transitions took data out of messages. After a rollback they do so again: what is
written here stays word for word, or they would report it once more.
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
"""Effects of lost labels."""


def plan_notes(status: HeteroInferenceStatus) -> str | None:
    """Returns the notes on the plans in use of a status whose plans have none: the message of Planned."""
    planned = status.condition(ConditionType.PLANNED.value)
    if planned is None or planned.status is not ConditionStatus.TRUE or any(p.notes for p in status.plans):
        return None
    return planned.message[:MAX_TEXT] or None


def planned_message(plans: Iterable[PlanStatus]) -> str:
    """Returns the message of Planned while it is True, which is taken for the notes on plans."""
    return "; ".join(dict.fromkeys(plan.notes for plan in plans if plan.notes))


def reports_loss(status: HeteroInferenceStatus, words: str) -> bool:
    """Returns whether a status without `damagedPod` reports a lost label or owner in its messages."""
    model = status.condition(ConditionType.MODEL_READY.value)
    messages = [group.message for group in status.groups] + [model.message if model else ""]
    return any(words in message for message in messages if message)


def lost_label(owner: Owner, pod: str, lost: Mapping[str, str | None], *, effects: Sequence[str]) -> str:
    """Returns the words of a pod whose labels somebody changed.

    `lost` has the labels with their right values; None for one that the pod must not have.
    """
    lacks = [f"{label}={value}" for label, value in lost.items() if value is not None]
    wrong = [label for label, value in lost.items() if value is None]
    found = [f"has lost {', '.join(lacks)}"] if lacks else []
    found += [f"has {', '.join(wrong)}, which is the leader's"] if wrong else []
    command = " ".join([*lacks, *(f"{label}-" for label in wrong)])
    effect = f": {', and '.join(effects)}" if effects else ""
    return (
        f"pod {pod} {' and '.join(found)}{effect}; put it right: "
        f"kubectl label pod -n {owner.key.namespace} {pod} --overwrite {command}"
    )


def lost_owner(owner: Owner, pod: str) -> str:
    """Returns the words of a pod whose owner somebody took off."""
    patch = json.dumps({"metadata": {"ownerReferences": [owner.reference]}}, separators=(",", ":"))
    return (
        f"pod {pod} has lost its ownerReference: no watch of the operator shows it, and Kubernetes does "
        f"not delete it together with its {names.KIND}; put it back: "
        f"kubectl patch pod -n {owner.key.namespace} {pod} --type merge -p '{patch}'"
    )
