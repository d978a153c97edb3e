"""Finds the feed-forward rank that blocks the asking rank. PURE: takes the slab's words and times."""

from dataclasses import dataclass
from typing import Final

from vllm_heteroinfer.pod.turn_clock import TurnClock

LATE_TURN_GRACE_S: Final = 0.2
"""Extra time for a lane if the check is late: a machine that delays this thread delays the lane, too."""


class LaneError(RuntimeError):
    """A feed-forward rank did not answer in time, according to the asking rank.

    The supervisor believes a report of that rank itself, or of its supervisor, more than this error.
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
        asked: number of the last ask.
        answered: for each lane, the number of the last ask that it answered.
        failed: for each lane, whether that answer reports a failed computation.
        limit_s: seconds that a lane may take for the last ask.
        gave_up: whether the device gave up waiting for an answer.
        given_up_lane: the lane for which the device waited when it gave up; None if unknown.
    """

    asked: int
    answered: tuple[int, ...]
    failed: tuple[bool, ...]
    limit_s: float
    gave_up: bool = False
    given_up_lane: int | None = None

    def find_late_lane(self) -> int | None:
        """Returns the first lane that failed or has not answered the last ask; None without such a lane."""
        for lane, (answered, failed) in enumerate(zip(self.answered, self.failed, strict=True)):
            if answered != self.asked or failed:
                return lane
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The reason why the asking rank cannot continue.

    Attributes:
        lane: the lane to blame; None if the device gave up and no lane was late.
        failed: whether the lane answered that its computation failed.
        waited_s: seconds waited for the lane.
    """

    lane: int | None
    failed: bool
    waited_s: float


class LaneJudge:
    """Judges the lanes at regular times. Ignores time in which its own thread did not run.

    Args:
        interval_s: seconds between two calls of `judge`.
        now_s: seconds on a monotonic clock.
    """

    def __init__(self, interval_s: float, now_s: float) -> None:
        """Starts before the first ask, with no late lane."""
        self._interval_s = interval_s
        self._clock = TurnClock(interval_s, now_s)
        self._last_ask = 0
        self._waiting_since_s = self._clock.awake_s(now_s)
        self._last_late_lane: int | None = None

    def judge(self, state: SlabState, now_s: float) -> Verdict | None:
        """Returns a verdict if a lane exceeds its limit or the device gave up waiting; otherwise None."""
        check_is_late = self._clock.turn(now_s) > self._interval_s
        awake_s = self._clock.awake_s(now_s)  # counts only the time in which this thread ran
        if state.asked != self._last_ask:  # a new ask: the wait begins again
            self._last_ask, self._waiting_since_s, self._last_late_lane = state.asked, awake_s, None
        late_lane = state.find_late_lane()
        # If the device gave up, the step is lost even if the lane has answered since.
        if late_lane is None and not state.gave_up:
            self._waiting_since_s = awake_s
            return None
        waited_s = awake_s - self._waiting_since_s
        grace_s = LATE_TURN_GRACE_S if check_is_late else 0.0
        if not state.gave_up and waited_s <= state.limit_s + grace_s:
            self._last_late_lane = late_lane
            return None
        # The lane for which the device waited comes first. The device sends further asks after it gave up, so
        # another lane may be late now.
        suspects = (state.given_up_lane, late_lane, self._last_late_lane)
        known_suspects = [suspect for suspect in suspects if suspect is not None]
        lane = known_suspects[0] if known_suspects else None
        return Verdict(lane=lane, failed=lane is not None and state.failed[lane], waited_s=waited_s)
