"""Errors of the operator and the command line; the class of an error chooses whether to try again.

Stdlib and the contract only; pure.
"""

from collections.abc import Iterable
from enum import StrEnum

from heteroinfer_contract.failure import FailureReason


class HeteroInferError(Exception):
    """Any error that is shown to the user as one message, without a traceback.

    Attributes:
        reason: CamelCase; becomes the reason of a condition and of an event; of the class, or given.
        message: got, expected, what to do.
    """

    reason: str = "Error"

    def __init__(self, message: str, *, reason: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.reason = str(reason) or type(self).reason


class SpecError(HeteroInferError):
    """A resource is not what its models say; permanent until the user changes it.

    Attributes:
        problems: one line each, `path: message`.
    """

    reason = "InvalidSpec"

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


class ModelError(HeteroInferError):
    """The model's files are missing, unreadable or no model; permanent until they or the URI change."""

    reason = FailureReason.MODEL_NOT_READABLE.value


class PlanReason(StrEnum):
    """Why there is no plan: the reason of a condition and of an event."""

    INSUFFICIENT_CAPACITY = "InsufficientCapacity"
    """Anything but GPUs is missing."""
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
    """There is no plan for this spec and model; permanent until one of them changes."""


class Shortage(PlanError):  # noqa: N818 - the word of the resource: planning.onGPUShortage
    """There is no plan now, since GPUs or other capacity is missing; temporary, look again when nodes do."""

    reason = PlanReason.INSUFFICIENT_GPU.value
