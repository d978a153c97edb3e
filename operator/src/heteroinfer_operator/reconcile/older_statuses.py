"""What statuses that earlier versions wrote lack. Goes with 0.4.0, when no status of 0.1 is left. Pure."""

from heteroinfer_operator.api import ConditionStatus, ConditionType, HeteroInferenceStatus
from heteroinfer_operator.api.base import MAX_TEXT


def plan_notes(status: HeteroInferenceStatus) -> str:
    """Returns the notes on the plans in use: 0.1.0 kept them as the message of Planned alone."""
    planned = status.condition(ConditionType.PLANNED.value)
    return planned.message[:MAX_TEXT] if planned and planned.status is ConditionStatus.TRUE else ""
