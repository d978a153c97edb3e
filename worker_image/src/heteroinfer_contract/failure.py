"""Why a group ended: the value that a supervisor leaves as its termination message.

Stdlib only; pure.
"""

import json
from dataclasses import dataclass, replace
from enum import StrEnum

from heteroinfer_contract import codec
from heteroinfer_contract.errors import ContractError
from heteroinfer_contract.plan import MAX_WORLD_SIZE

MAX_TERMINATION_MESSAGE_BYTES = 4096
"""Kubernetes keeps no more of a container's termination message (KEP: pod termination message)."""

MESSAGE_BYTES = 2600
LAST_LOG_BYTES = 1000
"""Of it, as JSON; what is left holds the numbers."""


_LEFT_OUT = " ... "
MAX_EXIT_CODE = 255
MAX_SIGNAL = 64
"""Linux has no more (signal(7))."""


class FailureReason(StrEnum):
    """What ended a group; CamelCase, since it becomes an event's and a condition's reason."""

    RANK_EXITED = "RankExited"
    """A rank's process ended: exit code or signal in the failure."""
    RANK_RAISED = "RankRaised"
    """A rank raised; the message is the error."""
    RANK_STOPPED = "RankStopped"
    """A rank's process is stopped (SIGSTOP) or makes no progress."""
    API_SERVER_EXITED = "ApiServerExited"
    ENGINE_STOPPED = "EngineStopped"
    """The API server or its engine is stopped (SIGSTOP), or answers nothing while no rank is busy."""
    POD_LOST = "PodLost"
    """A pod's supervisor turned silent or closed its connection."""
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
    MODEL_NOT_FOUND = "ModelNotFound"
    """The hub has no such model or revision, or does not show it to us."""
    MODEL_ACCESS_DENIED = "ModelAccessDenied"
    """The hub wants a token, another token, or its licence accepted."""
    MODEL_HUB_UNREACHABLE = "ModelHubUnreachable"
    """The hub does not answer, or not as a hub does."""
    MODEL_CACHE_FULL = "ModelCacheFull"
    MODEL_CACHE_NOT_WRITABLE = "ModelCacheNotWritable"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The culprit of a group's end.

    Attributes:
        pod: index of the culprit's pod, or None if no pod is to blame.
        rank: the culprit's rank, or None if it is not a rank.
        exit_code: of the culprit's process; negative for a signal, as in subprocess.
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
        """Returns JSON of at most MAX_TERMINATION_MESSAGE_BYTES, of what `cut` keeps."""
        return codec.to_json(self.cut())

    def cut(self) -> "Failure":
        """Returns the failure as far as it fits: a message without its middle, a log without its front.

        An error's kind stands at its beginning, what caused it often at its end.
        """
        if len(codec.to_json(self)) <= MAX_TERMINATION_MESSAGE_BYTES:
            return self
        message = _fit_ends(self.message, MESSAGE_BYTES)
        last_log = _fit(self.last_log, LAST_LOG_BYTES, keep_end=True)
        return replace(self, message=message, last_log=last_log)

    @classmethod
    def from_json(cls, text: str) -> "Failure | None":
        """Returns the failure in a termination message, or None if it is none that a worker writes."""
        try:
            failure = codec.from_json(cls, text)
            failure.check()
        except ContractError:
            return None
        return failure

    def check(self) -> None:
        """Checks what every reader relies on.

        Raises:
            ContractError: a pod, a rank, an exit code or a time is one that there cannot be.
        """
        for name, value in (("pod", self.pod), ("rank", self.rank)):
            if value is not None:
                codec.at_least(0, "Failure", **{name: value})
                codec.at_most(MAX_WORLD_SIZE - 1, "Failure", **{name: value})
        if self.exit_code is not None:
            codec.at_least(-MAX_SIGNAL, "Failure", exit_code=self.exit_code)
            codec.at_most(MAX_EXIT_CODE, "Failure", exit_code=self.exit_code)
        codec.at_least(0, "Failure", time=self.time)


def _fit_ends(text: str, limit_bytes: int) -> str:
    """Returns as much of the two ends of `text` as fits as JSON, two thirds of it from the beginning."""
    if len(json.dumps(text)) <= limit_bytes:
        return text
    front = _fit(text, limit_bytes * 2 // 3, keep_end=False)
    end = _fit(text[len(front) :], limit_bytes - len(json.dumps(front)) - len(_LEFT_OUT), keep_end=True)
    return front + _LEFT_OUT + end


def _fit(text: str, limit_bytes: int, *, keep_end: bool) -> str:
    """Returns as much of `text` as fits as JSON; escapes make one character 12 bytes long."""
    while (size_bytes := len(json.dumps(text))) > limit_bytes:
        keep = len(text) * limit_bytes // (size_bytes + 1)
        text = text[len(text) - keep :] if keep_end else text[:keep]
    return text
