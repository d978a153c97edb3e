"""Who is to blame when a group ends. PURE: evidence in, one failure out.

When a rank dies, its peers raise within milliseconds, since their connections close.
Those errors are true and beside the point; this module tells them from the cause.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from signal import Signals

from heteroinfer_contract import names
from heteroinfer_contract.failure import Failure, FailureReason
from vllm_heteroinfer.pod.lost_peer import says_peer_is_lost


class Weight(IntEnum):
    """How likely a failure is the first cause; the lower, the likelier."""

    OWN_END = 0
    """It ended without an error of its own, which no peer can bring about."""
    OWN_ERROR = 1
    """It reported an error that is not about talking with peers."""
    LOST_PEER = 2
    """It could not talk with a peer: a consequence whenever anything else is known."""
    ENGINE = 3
    """The API server left, as it does when its engine loses a rank, or is silent, as it may be then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """A failure as one supervisor saw it.

    Attributes:
        failure: who, why.
        age_s: since it was seen, in seconds.
    """

    failure: Failure
    age_s: float = 0.0


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
"""SIGABRT is not here: C++ raises it for an uncaught error of a connection, too."""


def weigh(failure: Failure) -> Weight:
    """Returns how likely `failure` is the cause and not a consequence."""
    killed = failure.exit_code is not None and -failure.exit_code in _NEVER_A_CONSEQUENCE
    match failure.reason:
        case FailureReason.RANK_STOPPED | FailureReason.POD_LOST | FailureReason.PLAN_MISMATCH:
            return Weight.OWN_END
        case FailureReason.ENGINE_STOPPED:
            return Weight.ENGINE
        case FailureReason.RANK_EXITED:
            if killed:
                return Weight.OWN_END
            return Weight.LOST_PEER if is_communication_error(failure) else Weight.OWN_END
        case FailureReason.API_SERVER_EXITED:
            return Weight.OWN_END if killed else Weight.ENGINE
        case _:
            return Weight.LOST_PEER if is_communication_error(failure) else Weight.OWN_ERROR


def is_communication_error(failure: Failure) -> bool:
    """Returns whether the failure's words say that a peer went away."""
    if failure.reason in (FailureReason.BAD_SETTINGS, FailureReason.CONFIG_MISMATCH):
        return False  # `gloo` is a setting, too
    exited = failure.reason is FailureReason.RANK_EXITED
    # The supervisor's own words about an exit say nothing; the rank's last line does.
    return says_peer_is_lost(failure.last_log if exited else failure.message)


def blame(evidence: Sequence[Evidence]) -> Failure:
    """Returns the first cause among the evidence gathered; the oldest among equals.

    Args:
        evidence: at least one, with ages as of now.
    """
    return min(evidence, key=_order).failure


def _order(evidence: Evidence) -> tuple[Weight, float, int, int]:
    failure = evidence.failure
    pod = -1 if failure.pod is None else failure.pod
    rank = -1 if failure.rank is None else failure.rank
    return weigh(failure), -evidence.age_s, pod, rank


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Stuck:
    """A rank that does the same thing since long.

    Attributes:
        rank: global rank.
        pod: index of its pod.
        busy: what it does.
        busy_s: for how long, in seconds.
        waiting_for_rank: whom it waits for, None if it computes.
    """

    rank: int
    pod: int
    busy: str
    busy_s: float
    waiting_for_rank: int | None


def blame_stuck(stuck: Sequence[Stuck], step_timeout_s: float) -> Failure | None:
    """Returns the failure that names the rank which holds up the others, or None.

    A rank that waits for one which has been busy for more than half the deadline passes
    the blame on (it may have begun to wait first); one that waits for a rank which is
    not busy, or only just, keeps it, since its message is lost.

    Args:
        stuck: every busy rank, however short.
        step_timeout_s: the deadline, in seconds.
    """
    late = {s.rank: s for s in stuck if s.busy_s > step_timeout_s}
    slow = {s.rank: s for s in stuck if s.busy_s > step_timeout_s / 2}
    if not late:
        return None
    culprit = min(late.values(), key=lambda s: (s.waiting_for_rank is not None, -s.busy_s, s.rank))
    seen = {culprit.rank}
    while culprit.waiting_for_rank in slow and culprit.waiting_for_rank not in seen:
        culprit = slow[culprit.waiting_for_rank]
        seen.add(culprit.rank)
    waiting = f", waiting for rank {culprit.waiting_for_rank}" if culprit.waiting_for_rank is not None else ""
    others = sorted(set(late) - {culprit.rank})
    return Failure(
        reason=FailureReason.STEP_TIMEOUT,
        message=(
            f"rank {culprit.rank} has not finished '{culprit.busy}' in {culprit.busy_s:.0f} s{waiting}"
            f"{f'; ranks {others} wait as well' if others else ''}; expected at most {step_timeout_s:.0f} s "
            "(stepTimeout)"
        ),
        pod=culprit.pod,
        rank=culprit.rank,
    )
