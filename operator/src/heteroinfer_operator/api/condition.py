"""Conditions in the shape of metav1.Condition. Pure."""

import re
from collections.abc import Iterable
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Final

from pydantic import AfterValidator, Field

from heteroinfer_operator.api.base import StatusModel, Time

_REASON: Final = r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$"
_MOST_REASON: Final = 128


UNREADABLE: Final = "Unreadable"
"""Reason in place of a stored reason that is not valid in a condition."""


def is_reason(word: str) -> bool:
    """Whether a word from outside the operator is valid as the reason of a condition."""
    return len(word) <= _MOST_REASON and re.fullmatch(_REASON, word) is not None


StoredReason = Annotated[
    str, Field(max_length=64), AfterValidator(lambda word: word if is_reason(word) else UNREADABLE)
]
"""A reason in the status that later becomes the reason of a condition; the schema takes any text."""


class ConditionType(StrEnum):
    """Conditions that the operator writes."""

    AVAILABLE = "Available"
    READY = "Ready"
    STALLED = "Stalled"
    PROGRESSING = "Progressing"
    PLANNED = "Planned"
    MODEL_READY = "ModelReady"
    CAPACITY_AVAILABLE = "CapacityAvailable"
    DEGRADED = "Degraded"
    FAILED = "Failed"


class ConditionStatus(StrEnum):
    """Status of a condition."""

    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class Condition(StatusModel):
    """An aspect of the resource's state, like metav1.Condition."""

    type: Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9]*$", min_length=1, max_length=64)]
    """Type of the condition, in CamelCase or as PREFIX/NAME."""
    status: ConditionStatus
    """Status of the condition: True, False or Unknown."""
    reason: Annotated[str, Field(pattern=_REASON, min_length=1, max_length=_MOST_REASON)]
    """Reason for the last transition, in CamelCase."""
    message: Annotated[str, Field(max_length=4096)] = ""
    """Details of the last transition."""
    last_transition_time: Time
    """Time of the last change of status."""
    observed_generation: Annotated[int, Field(ge=0, le=2**53)] | None = None
    """Generation of the spec for which the condition was set."""


def merge_conditions(
    current: Iterable[Condition], wanted: Iterable[Condition], *, now: datetime
) -> tuple[Condition, ...]:
    """Returns the wanted conditions, sorted by type, with their lastTransitionTime.

    A condition keeps its time if its status did not change. Otherwise it gets `now`.
    """
    before = {condition.type: condition for condition in current}

    def since(condition: Condition) -> datetime:
        old = before.get(condition.type)
        return old.last_transition_time if old is not None and old.status == condition.status else now

    return tuple(
        condition.changed(last_transition_time=since(condition).replace(microsecond=0))
        for condition in sorted(wanted, key=lambda item: item.type)
    )
