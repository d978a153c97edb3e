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
"""Reason that stands for a stored reason which no condition can have."""


def is_reason(word: str) -> bool:
    """Returns whether a word of somebody else's can be a condition's reason."""
    return len(word) <= _MOST_REASON and re.fullmatch(_REASON, word) is not None


StoredReason = Annotated[
    str, Field(max_length=64), AfterValidator(lambda word: word if is_reason(word) else UNREADABLE)
]
"""A reason in the status that becomes the reason of a condition; the schema takes any text."""


class ConditionType(StrEnum):
    """Conditions of a HeteroInference."""

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
    """Whether a condition holds."""

    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class Condition(StatusModel):
    """One aspect of the resource."""

    type: Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9]*$", min_length=1, max_length=64)]
    """CamelCase."""
    status: ConditionStatus
    """Whether it holds."""
    reason: Annotated[str, Field(pattern=_REASON, min_length=1, max_length=_MOST_REASON)]
    """CamelCase, for programs."""
    message: Annotated[str, Field(max_length=4096)] = ""
    """For people."""
    last_transition_time: Time
    """When status last changed."""
    observed_generation: Annotated[int, Field(ge=0, le=2**53)] | None = None
    """Generation of the spec that it is about."""


def merge_conditions(
    current: Iterable[Condition], wanted: Iterable[Condition], *, now: datetime
) -> tuple[Condition, ...]:
    """Returns the wanted conditions, sorted by type, with the time of their last real change.

    A condition whose status is as before keeps its lastTransitionTime; another one gets `now`.
    """
    before = {condition.type: condition for condition in current}

    def since(condition: Condition) -> datetime:
        old = before.get(condition.type)
        return old.last_transition_time if old is not None and old.status == condition.status else now

    return tuple(
        condition.changed(last_transition_time=since(condition).replace(microsecond=0))
        for condition in sorted(wanted, key=lambda item: item.type)
    )
