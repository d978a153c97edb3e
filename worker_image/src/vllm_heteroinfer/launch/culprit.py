"""Decides which failure is the cause of a group's end. Pure.

When a rank dies, its connections close, and its peers raise errors within milliseconds. Those errors are only
consequences. This module separates consequences from the cause. It uses the marks that pod/lost_peer.py sets
on such errors, and never the text of an error.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from signal import Signals

from heteroinfer_contract import names
from heteroinfer_contract.failure import Failure, FailureReason
from vllm_heteroinfer.pod.lost_peer import Lost


class Weight(IntEnum):
    """Kind of a failure; a lower value is more likely the first cause."""

    OWN_END = 0
    """The process ended without an error, which no peer can cause."""
    OWN_ERROR = 1
    """The process reported an error that does not concern the connection to a peer."""
    ACCUSED = 2
    """Another process named this process as the culprit; its own end or error would prove more."""
    LOST_PEER = 3
    """The process lost a peer: a consequence of any other known failure."""
    ENGINE = 4
    """vLLM's API server left or is silent, which also happens after its engine loses a rank."""
    LOST_ENGINE = 5
    """The process lost the engine: a consequence of the engine's end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """A failure that one supervisor observed.

    Attributes:
        lost: the other process that the culprit lost, if this loss ended the culprit.
        accused: whether another process reported the failure, instead of the culprit or the culprit's
            supervisor.
    """

    failure: Failure
    age_s: float = 0.0
    lost: Lost | None = None
    accused: bool = False


_NEVER_A_CONSEQUENCE = frozenset(
    {
        Signals.SIGKILL,
        Signals.SIGTERM,
        Signals.SIGINT,
        Signals.SIGSEGV,
        Signals.SIGBUS,
        Signals.SIGILL,
        Signals.SIGFPE,
    }
)
"""Signals that only the process itself or an outsider causes.

SIGABRT is not in this set: C++ raises SIGABRT for an uncaught error, which can be an error of a connection.
So SIGABRT counts as an error.
"""
_LOSSES = {Lost.RANK: Weight.LOST_PEER, Lost.ENGINE: Weight.LOST_ENGINE}


def weigh(evidence: Evidence) -> Weight:
    """Classifies a failure; a lower Weight is more likely the first cause."""
    if evidence.lost is not None:
        return _LOSSES[evidence.lost]
    return Weight.ACCUSED if evidence.accused else _weigh_own_end(evidence.failure)


def _weigh_own_end(failure: Failure) -> Weight:
    """Classifies a failure that the process itself or its supervisor reported, without a lost peer.

    The end of a rank counts as its own end, except after SIGABRT (see _NEVER_A_CONSEQUENCE). The end or
    silence of vLLM's API server is usually a consequence of an engine that has lost a rank, except after a
    signal in that set.
    """
    exit_code = failure.exit_code or 0
    is_never_a_consequence = -exit_code in _NEVER_A_CONSEQUENCE
    match failure.reason:
        case FailureReason.ENGINE_STOPPED:
            return Weight.ENGINE
        case FailureReason.RANK_EXITED:
            return Weight.OWN_ERROR if -exit_code == Signals.SIGABRT else Weight.OWN_END
        case FailureReason.API_SERVER_EXITED:
            return Weight.OWN_END if is_never_a_consequence else Weight.ENGINE
        case FailureReason.RANK_STOPPED | FailureReason.POD_LOST | FailureReason.PLAN_MISMATCH:
            return Weight.OWN_END
        case _:
            return Weight.OWN_ERROR


def most_likely_cause(evidence: Sequence[Evidence]) -> Failure:
    """Returns the most likely cause; the oldest failure among equals.

    A process's own report has priority over other processes' reports about it, in any order of arrival.

    Args:
        evidence: at least one item, with current ages.
    """
    return min(evidence, key=_sort_key).failure


def _sort_key(evidence: Evidence) -> tuple[Weight, float, int, int]:
    """Returns a sort key: by weight, then the oldest failure first, then by pod and rank."""
    failure = evidence.failure
    pod = -1 if failure.pod is None else failure.pod
    rank = -1 if failure.rank is None else failure.rank
    return weigh(evidence), -evidence.age_s, pod, rank


def exit_code(failure: Failure, own_pod: int) -> int:
    """Returns the exit code of the supervisor of `own_pod` after `failure` ended the group."""
    match failure.reason:
        case FailureReason.PLAN_MISMATCH | FailureReason.CONFIG_MISMATCH:
            return names.EXIT_REFUSED
        case FailureReason.STARTUP_TIMEOUT:
            return names.EXIT_STARTUP_TIMEOUT
        case FailureReason.BAD_SETTINGS if failure.pod in (None, own_pod) and failure.exit_code is None:
            return names.EXIT_USAGE  # no process has ended, so the supervisor itself found the bad settings
        case _:
            return names.EXIT_RANK_FAILED if failure.pod == own_pod else names.EXIT_PEER_FAILED
