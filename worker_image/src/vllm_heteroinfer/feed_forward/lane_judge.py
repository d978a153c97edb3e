"""Finds the feed-forward rank that blocks the asking rank. Pure: callers pass the slab's words and the time.

A lane is the place of one feed-forward rank in the slab, with its asks and answers. For another pod, one lane
stands for all feed-forward ranks of the pod.
"""

from dataclasses import dataclass
from typing import Final

from vllm_heteroinfer.pod.turn_clock import TurnClock

LATE_TURN_GRACE_S: Final = 0.2
"""Extra time for a rank if the judge's check is late: what delays the check may delay the rank, too."""


class LaneError(RuntimeError):
    """A feed-forward rank did not answer in time, according to the asking rank.

    The leader's supervisor prefers a report of the feed-forward rank, or of its supervisor, to this error.
    """

    def __init__(self, rank: int, message: str) -> None:
        self.rank = rank
        super().__init__(message)


class LaneFailedError(LaneError):
    """A feed-forward rank answered that its computation failed. The rank's own report has the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlabState:
    """The slab's control words at one moment.

    Attributes:
        last_ask: number of the last ask.
        last_answers: for each lane, the number of the ask that was answered last.
        failed: for each lane, whether its last answer reports a failed computation.
        limit_s: seconds that a feed-forward rank may take for the last ask.
        gave_up: whether the GPU gave up waiting for an answer.
        given_up_lane: the lane for which the GPU waited when it gave up; None if unknown.
    """

    last_ask: int
    last_answers: tuple[int, ...]
    failed: tuple[bool, ...]
    limit_s: float
    gave_up: bool = False
    given_up_lane: int | None = None

    def find_unsuccessful_lane(self) -> int | None:
        """Returns the first lane without a successful answer to the last ask, or None.

        Such a lane has no answer yet, or an answer that reports a failed computation.
        """
        for lane, (last_answer, failed) in enumerate(zip(self.last_answers, self.failed, strict=True)):
            if last_answer != self.last_ask or failed:
                return lane
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The reason why the asking rank cannot continue.

    Attributes:
        lane: lane of the rank to blame; None if the GPU gave up although all lanes have answers.
        failed: whether the answer in the lane reports a failed computation.
        waited_s: seconds of the wait for the answer.
    """

    lane: int | None
    failed: bool
    waited_s: float


class LaneJudge:
    """Decides at regular times whether an answer is late.

    Does not count time in which its own thread did not run, because the ranks may not have run either.

    Args:
        interval_s: seconds between two calls of `judge`.
        now_s: seconds on a monotonic clock.
    """

    def __init__(self, interval_s: float, now_s: float) -> None:
        """Starts the wait at `now_s`. No ask was sent yet."""
        self._interval_s = interval_s
        self._clock = TurnClock(interval_s, now_s)
        self._last_ask = 0
        self._waiting_since_s = self._clock.awake_s(now_s)
        self._last_unsuccessful_lane: int | None = None

    def judge(self, state: SlabState, now_s: float) -> Verdict | None:
        """Returns a verdict if an answer is late or the GPU gave up waiting; otherwise None."""
        lateness_s = self._clock.turn(now_s)
        awake_s = self._clock.awake_s(now_s)  # counts only the time in which this thread ran
        if state.last_ask != self._last_ask:  # a new ask: the wait begins again
            self._last_ask, self._waiting_since_s = state.last_ask, awake_s
            self._last_unsuccessful_lane = None
        unsuccessful_lane = state.find_unsuccessful_lane()
        # If the GPU gave up, the step is lost even if the answer has arrived since.
        if unsuccessful_lane is None and not state.gave_up:
            self._waiting_since_s = awake_s
            return None
        waited_s = awake_s - self._waiting_since_s
        grace_s = LATE_TURN_GRACE_S if lateness_s > self._interval_s else 0.0
        if not state.gave_up and waited_s <= state.limit_s + grace_s:
            self._last_unsuccessful_lane = unsuccessful_lane
            return None
        # The lane for which the GPU waited comes first: the GPU sends further asks after it gave up, so
        # `unsuccessful_lane` may lack the answer to a later ask. The lane of the last check comes last: its
        # answer has arrived since.
        suspects = (state.given_up_lane, unsuccessful_lane, self._last_unsuccessful_lane)
        lane = next((suspect for suspect in suspects if suspect is not None), None)
        return Verdict(lane=lane, failed=lane is not None and state.failed[lane], waited_s=waited_s)
