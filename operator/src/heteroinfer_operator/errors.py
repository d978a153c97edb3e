"""Errors of the operator and the command line. The class of an error decides whether to retry.

Imports only the standard library and the contract. Pure.
"""

from collections.abc import Iterable
from enum import StrEnum

from heteroinfer_contract.failure import FailureReason


class HeteroInferError(Exception):
    """An error that users see as one message, without a traceback.

    Attributes:
        reason: reason of the condition and the event, in CamelCase. Default: the reason of the class.
        message: the problem and its fix.
    """

    reason: str = "Error"

    def __init__(self, message: str, *, reason: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.reason = str(reason) or type(self).reason


class SpecError(HeteroInferError):
    """The resource does not match its schema. Permanent until the user changes the resource.

    Attributes:
        problems: one line for each problem, `path: message`.
    """

    reason = "InvalidSpec"

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


class ModelError(HeteroInferError):
    """The model's files are missing, unreadable or invalid. Permanent until the files or the URI change."""

    reason = FailureReason.MODEL_NOT_READABLE.value


class PlanReason(StrEnum):
    """Why planning failed: the reason of the condition and the event."""

    INSUFFICIENT_CAPACITY = "InsufficientCapacity"
    """Capacity other than GPUs is missing."""
    INSUFFICIENT_GPU = "InsufficientGPU"
    INSUFFICIENT_MEMORY = "InsufficientMemory"
    LAYERS_MISMATCH = "LayersMismatch"
    MAX_MODEL_LEN_TOO_LONG = "MaxModelLenTooLong"
    PLAN_LOST = "PlanLost"
    REFUSED_ARGUMENT = "RefusedArgument"
    TOO_MANY_STAGES = "TooManyStages"
    UNSUPPORTED_DTYPE = "UnsupportedDType"
    UNSUPPORTED_MODEL = "UnsupportedModel"
    UNSUPPORTED_PARALLELISM = "UnsupportedParallelism"
    WORLD_SIZE_MISMATCH = "WorldSizeMismatch"


class PlanError(HeteroInferError):
    """No plan exists for this spec and model. Permanent until the spec or the model changes."""


class Shortage(PlanError):  # noqa: N818 - named like the field planning.onGPUShortage
    """No plan exists now, because GPUs or other capacity is missing. Retry when nodes change."""

    reason = PlanReason.INSUFFICIENT_GPU.value
