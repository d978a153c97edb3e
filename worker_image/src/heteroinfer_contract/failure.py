"""The reason that a group ended: the value that a supervisor writes as its termination message.

Stdlib only; pure.
"""

import json
from dataclasses import dataclass, replace
from enum import StrEnum

from heteroinfer_contract import codec
from heteroinfer_contract.errors import ContractError
from heteroinfer_contract.plan import MAX_WORLD_SIZE

MAX_TERMINATION_MESSAGE_BYTES = 4096
"""The part of a container's termination message that Kubernetes keeps (KEP: pod termination message)."""

MESSAGE_BYTES = 2600
LAST_LOG_BYTES = 1000
"""Maximum bytes of the message and of the log as JSON. The other fields of a failure need the rest of the
termination message."""


_LEFT_OUT = " ... "
MAX_EXIT_CODE = 255
MAX_SIGNAL = 64
"""The largest signal number on Linux (signal(7))."""


class FailureReason(StrEnum):
    """The cause of a group's end; CamelCase because events and conditions use it as their reason."""

    RANK_EXITED = "RankExited"
    """A rank's process ended; the failure contains its exit code or signal."""
    RANK_RAISED = "RankRaised"
    """A rank raised an exception; the message is its text."""
    RANK_STOPPED = "RankStopped"
    """A rank's process is stopped (SIGSTOP) or makes no progress."""
    API_SERVER_EXITED = "ApiServerExited"
    ENGINE_STOPPED = "EngineStopped"
    """vLLM's API server or its engine is stopped (SIGSTOP), or does not answer while all ranks are idle."""
    POD_LOST = "PodLost"
    """A pod's supervisor stopped sending heartbeats or closed its connection."""
    PLAN_MISMATCH = "PlanMismatch"
    """The handshake found different group uids, epochs or plan hashes."""
    CONFIG_MISMATCH = "ConfigMismatch"
    """Resolved settings or the model differ between ranks."""
    STARTUP_TIMEOUT = "StartupTimeout"
    STEP_TIMEOUT = "StepTimeout"
    """A rank did not finish a step before its deadline."""
    BAD_SETTINGS = "BadSettings"
    """The environment or the arguments are wrong; nothing was started."""
    MODEL_NOT_READABLE = "ModelNotReadable"
    MODEL_NOT_FOUND = "ModelNotFound"
    """The hub does not have the model or revision, or hides it from this user."""
    MODEL_ACCESS_DENIED = "ModelAccessDenied"
    """The hub requires a token, another token, or acceptance of the model's licence."""
    MODEL_HUB_UNREACHABLE = "ModelHubUnreachable"
    """The hub does not answer, or another server answers at its address."""
    MODEL_CACHE_FULL = "ModelCacheFull"
    MODEL_CACHE_NOT_WRITABLE = "ModelCacheNotWritable"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The culprit of a group's end.

    Attributes:
        pod: index of the culprit's pod, or None if no pod is to blame.
        rank: the culprit's rank, or None if the culprit is not a rank.
        exit_code: exit code of the culprit's process; negative for a signal, as in subprocess.
        time: Unix time at which the failure was observed, in seconds.
    """

    reason: FailureReason
    message: str
    pod: int | None = None
    rank: int | None = None
    exit_code: int | None = None
    last_log: str = ""
    time: float = 0.0

    def to_json(self) -> str:
        """Returns JSON of at most MAX_TERMINATION_MESSAGE_BYTES, shortened by `cut`."""
        return codec.to_json(self.cut())

    def cut(self) -> "Failure":
        """Returns the failure without the message's middle and the log's beginning, if it is too long.

        A message begins with the kind of error and often ends with its cause.
        """
        if len(codec.to_json(self)) <= MAX_TERMINATION_MESSAGE_BYTES:
            return self
        message = _cut_middle(self.message, MESSAGE_BYTES)
        last_log = _cut_one_end(self.last_log, LAST_LOG_BYTES, keeps_end=True)
        return replace(self, message=message, last_log=last_log)

    @classmethod
    def from_json(cls, text: str) -> "Failure | None":
        """Returns the failure in a termination message, or None if no worker wrote the message."""
        try:
            failure = codec.from_json(cls, text)
            failure.check()
        except ContractError:
            return None
        return failure

    def check(self) -> None:
        """Checks the properties that every reader relies on.

        Raises:
            ContractError: a pod, a rank, an exit code or a time is out of range.
        """
        for name, value in (("pod", self.pod), ("rank", self.rank)):
            if value is not None:
                codec.at_least(0, "Failure", **{name: value})
                codec.at_most(MAX_WORLD_SIZE - 1, "Failure", **{name: value})
        if self.exit_code is not None:
            codec.at_least(-MAX_SIGNAL, "Failure", exit_code=self.exit_code)
            codec.at_most(MAX_EXIT_CODE, "Failure", exit_code=self.exit_code)
        codec.at_least(0, "Failure", time=self.time)


def _cut_middle(text: str, limit_bytes: int) -> str:
    """Cuts out the middle of `text`, to `limit_bytes` of JSON. Keeps more of the beginning."""
    if len(json.dumps(text)) <= limit_bytes:
        return text
    beginning = _cut_one_end(text, limit_bytes * 2 // 3, keeps_end=False)
    end = _cut_one_end(
        text[len(beginning) :], limit_bytes - len(json.dumps(beginning)) - len(_LEFT_OUT), keeps_end=True
    )
    return beginning + _LEFT_OUT + end


def _cut_one_end(text: str, limit_bytes: int, *, keeps_end: bool) -> str:
    """Cuts the end of `text`, or with `keeps_end` its beginning, to `limit_bytes` of JSON."""
    while (size_bytes := len(json.dumps(text))) > limit_bytes:
        # Cut in proportion to the bytes, because an escaped character can take 12 bytes.
        kept_chars = len(text) * limit_bytes // (size_bytes + 1)
        text = text[len(text) - kept_chars :] if keeps_end else text[:kept_chars]
    return text
