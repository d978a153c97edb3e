"""Why a group ended: the value that a supervisor leaves as its termination message.

Stdlib only.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

from heteroinfer_contract import codec
from heteroinfer_contract.errors import ContractError

MAX_TERMINATION_MESSAGE_BYTES = 4096
"""Kubernetes keeps no more of a container's termination message (KEP: pod termination message)."""


class FailureReason(StrEnum):
    """What ended a group; CamelCase, since it becomes an event's and a condition's reason."""

    RANK_EXITED = "RankExited"
    """A rank's process ended: exit code or signal in the failure."""
    RANK_RAISED = "RankRaised"
    """A rank raised; the message is the error."""
    RANK_STOPPED = "RankStopped"
    """A rank's process is stopped (SIGSTOP) or makes no progress."""
    API_SERVER_EXITED = "ApiServerExited"
    POD_LOST = "PodLost"
    """A pod's supervisor fell silent or closed its connection."""
    PLAN_MISMATCH = "PlanMismatch"
    """Hand-shake: group uid, epoch or plan hash differ."""
    CONFIG_MISMATCH = "ConfigMismatch"
    """Resolved settings or the model differ between ranks."""
    STARTUP_TIMEOUT = "StartupTimeout"
    STEP_TIMEOUT = "StepTimeout"
    """A rank did not finish a step before its deadline."""
    BAD_SETTINGS = "BadSettings"
    """The environment or the arguments are wrong; nothing was started."""
    MODEL_NOT_READABLE = "ModelNotReadable"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The culprit of a group's end.

    Attributes:
        reason: the kind of failure.
        message: one line for people: got, expected, what to do.
        pod: index of the culprit's pod, or None if no pod is to blame.
        rank: the culprit's rank, or None if it is not a rank.
        exit_code: of the culprit's process; negative for a signal, as in subprocess.
        last_log: the culprit's last line of log.
        time: Unix time at which it was seen, in seconds.
    """

    reason: FailureReason
    message: str
    pod: int | None = None
    rank: int | None = None
    exit_code: int | None = None
    last_log: str = ""
    time: float = 0.0

    def to_json(self) -> str:
        """Returns JSON of at most MAX_TERMINATION_MESSAGE_BYTES: long texts are cut at their front or end."""
        text = codec.to_json(self)
        if len(text.encode()) <= MAX_TERMINATION_MESSAGE_BYTES:
            return text
        return codec.to_json(replace(self, message=self.message[:600], last_log=self.last_log[-300:]))

    @classmethod
    def from_json(cls, text: str) -> "Failure | None":
        """Returns the failure in a termination message, or None if the message is not one."""
        try:
            return codec.from_json(cls, text)
        except ContractError:
            return None
