"""Who is to blame when a group ends. PURE: evidence in, one failure out.

When a rank dies, its peers raise within milliseconds, since their connections close.
Those errors are true and beside the point; this module tells them from the cause. The code that raised them
marked them (pod/lost_peer.py): no words of an error decide.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from signal import Signals

from heteroinfer_contract import names
from heteroinfer_contract.failure import Failure, FailureReason
from vllm_heteroinfer.pod.lost_peer import Lost


class Weight(IntEnum):
    """How likely a failure is the first cause; the lower, the likelier."""

    OWN_END = 0
    """It ended without an error of its own, which no peer can bring about."""
    OWN_ERROR = 1
    """It reported an error that is not about talking with peers."""
    ACCUSED = 2
    """Another process says that it is at fault; its own end or error is nearer to the cause."""
    LOST_PEER = 3
    """It could not talk with a peer: a consequence whenever anything else is known."""
    ENGINE = 4
    """The API server left, as it does when its engine loses a rank, or is silent, as it may be then."""
    LOST_ENGINE = 5
    """It lost the engine: a consequence of the engine's end, whatever ended that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """A failure as one supervisor saw it.

    Attributes:
        lost: which other process the culprit says it has lost, if that ended it.
        accused: whether another process names the culprit, not it itself or its supervisor.
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
"""SIGABRT is not here: C++ raises it for an uncaught error, of a connection too. It weighs as an error."""
_LOSSES = {Lost.RANK: Weight.LOST_PEER, Lost.ENGINE: Weight.LOST_ENGINE}


def weigh(evidence: Evidence) -> Weight:
    """Returns how likely a failure is the cause and not a consequence."""
    failure = evidence.failure
    if evidence.accused or evidence.lost is not None:
        return Weight.ACCUSED if evidence.lost is None else _LOSSES[evidence.lost]
    code = 0 if failure.exit_code is None else failure.exit_code
    killed = -code in _NEVER_A_CONSEQUENCE
    match failure.reason:
        case FailureReason.ENGINE_STOPPED:
            return Weight.ENGINE
        case FailureReason.RANK_EXITED:
            return Weight.OWN_ERROR if -code == Signals.SIGABRT else Weight.OWN_END
        case FailureReason.API_SERVER_EXITED:
            return Weight.OWN_END if killed else Weight.ENGINE
        case FailureReason.RANK_STOPPED | FailureReason.POD_LOST | FailureReason.PLAN_MISMATCH:
            return Weight.OWN_END
        case _:
            return Weight.OWN_ERROR


def blame(evidence: Sequence[Evidence]) -> Failure:
    """Returns the first cause among the evidence gathered; the oldest among equals.

    A process's own word comes before what others say of it, in whatever order they arrive.

    Args:
        evidence: at least one, with ages as of now.
    """
    return min(evidence, key=_order).failure


def _order(evidence: Evidence) -> tuple[Weight, float, int, int]:
    failure = evidence.failure
    pod = -1 if failure.pod is None else failure.pod
    rank = -1 if failure.rank is None else failure.rank
    return weigh(evidence), -evidence.age_s, pod, rank


def exit_code(failure: Failure, own_pod: int) -> int:
    """Returns the exit code of the supervisor of `own_pod` when `failure` ended its group."""
    match failure.reason:
        case FailureReason.PLAN_MISMATCH | FailureReason.CONFIG_MISMATCH:
            return names.EXIT_REFUSED
        case FailureReason.STARTUP_TIMEOUT:
            return names.EXIT_STARTUP_TIMEOUT
        case FailureReason.BAD_SETTINGS if failure.pod in (None, own_pod) and failure.exit_code is None:
            return names.EXIT_USAGE
        case _:
            return names.EXIT_RANK_FAILED if failure.pod == own_pod else names.EXIT_PEER_FAILED
