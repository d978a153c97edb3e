"""Conditions in the shape of metav1.Condition. Pure."""

import re
from collections.abc import Iterable
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, Final

from pydantic import AfterValidator, ConfigDict, Field

from heteroinfer_operator.api.base import StatusModel, Time

_TYPE: Final = (
    r"^([a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*/)?"
    r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])$"
)
_REASON: Final = r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$"
_MAX_REASON: Final = 128
"""Longest reason that the operator writes, in characters; metav1.Condition allows 1024."""
MAX_CONDITIONS: Final = 64
_MAX_OTHER_BYTES: Final = 64 * 1024
"""Maximum bytes of types, reasons and messages that the operator keeps of other controllers' conditions. The
schema allows 2 MiB of conditions, but etcd refuses an object of 1.5 MiB, so the operator could not write such
a status."""


UNREADABLE: Final = "Unreadable"
"""Replaces a stored reason that is not valid in a condition."""


def is_reason(word: str) -> bool:
    """Reports whether a word from outside the operator is valid as the reason of a condition."""
    return len(word) <= _MAX_REASON and re.fullmatch(_REASON, word) is not None


StoredReason = Annotated[
    str, Field(max_length=64), AfterValidator(lambda word: word if is_reason(word) else UNREADABLE)
]
"""A reason in the status that later becomes the reason of a condition. The schema accepts any text."""


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


def _require_message(schema: dict[str, Any]) -> None:
    """Makes `message` required in the schema, although the operator also reads conditions without it."""
    schema["required"] = ["lastTransitionTime", "message", "reason", "status", "type"]


class Condition(StatusModel):
    """An aspect of the resource's state, with the schema of metav1.Condition."""

    model_config = ConfigDict(json_schema_extra=_require_message)

    type: Annotated[str, Field(pattern=_TYPE, min_length=1, max_length=316)]
    """Type of the condition, in CamelCase or as PREFIX/NAME."""
    status: ConditionStatus
    """Whether the condition holds. True: it holds. False: it does not hold. Unknown: the operator does not
    know yet."""
    reason: Annotated[str, Field(pattern=_REASON, min_length=1, max_length=1024)]
    """Reason for the last transition, in CamelCase."""
    message: Annotated[str, Field(max_length=32768)] = ""
    """Details of the last transition."""
    last_transition_time: Time
    """Time of the last change of status."""
    observed_generation: Annotated[int, Field(ge=0, le=2**53)] | None = None
    """Generation of the spec for which the condition was set."""


def merge_conditions(
    current: Iterable[Condition], wanted: Iterable[Condition], *, now: datetime
) -> tuple[Condition, ...]:
    """Returns the wanted conditions and those of other controllers, sorted by type.

    A wanted condition keeps its lastTransitionTime if its status did not change. Otherwise it gets `now`.
    Conditions of types that the operator never writes belong to other controllers. Such
    conditions are kept, up to MAX_CONDITIONS and _MAX_OTHER_BYTES.
    """
    current_by_type = {condition.type: condition for condition in current}
    wanted = tuple(wanted)
    own_types = {*ConditionType, *(condition.type for condition in wanted)}
    other_conditions = [
        condition for condition in current_by_type.values() if condition.type not in own_types
    ]

    def transition_time(condition: Condition) -> datetime:
        """Returns the time of the last change of the condition's status, which may be now."""
        current_condition = current_by_type.get(condition.type)
        return (
            current_condition.last_transition_time
            if current_condition is not None and current_condition.status == condition.status
            else now
        )

    own_conditions = [
        condition.changed(last_transition_time=transition_time(condition).replace(microsecond=0))
        for condition in wanted
    ]
    kept_others, num_bytes = [], 0
    for condition in other_conditions[: MAX_CONDITIONS - len(own_conditions)]:
        num_bytes += sum(len(text.encode()) for text in (condition.type, condition.reason, condition.message))
        if num_bytes > _MAX_OTHER_BYTES:
            break
        kept_others.append(condition)
    return tuple(sorted([*own_conditions, *kept_others], key=lambda condition: condition.type))
