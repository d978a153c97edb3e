"""Which feed-forward rank holds up the rank that asks, and its accusation. PURE: words and times in."""

from dataclasses import dataclass
from typing import Final

from vllm_heteroinfer.pod.turn_clock import TurnClock

LATE_TURN_GRACE_S: Final = 0.2
"""In a turn that comes late, a lane gets so much more: its own next turn may come after the judge's."""


class LaneError(RuntimeError):
    """A feed-forward rank did not answer in time; the text says what to do.

    It is an accusation by the rank that asks: the lane's own report and its supervisor's weigh more.
    """

    def __init__(self, rank: int, message: str) -> None:
        self.rank = rank
        super().__init__(message)


class LaneFailedError(LaneError):
    """A feed-forward rank answered that its computation failed; its own report says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What the slab shows at one moment.

    Attributes:
        asked: number of the last ask.
        answered: of each lane, the number of the last ask that it answered.
        failed: of each lane, whether that answer was that its computation failed.
        limit_s: how long a lane may take for the last ask, in seconds.
        given_up_lane: the lane that the device waited for then, None if it is not known.
    """

    asked: int
    answered: tuple[int, ...]
    failed: tuple[bool, ...]
    limit_s: float
    gave_up: bool = False
    given_up_lane: int | None = None

    def late_lane(self) -> int | None:
        """Returns the first lane that has not answered the last ask, or has answered that it failed."""
        for lane, (answered, failed) in enumerate(zip(self.answered, self.failed, strict=True)):
            if answered != self.asked or failed:
                return lane
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Why the rank that asks cannot go on.

    Attributes:
        lane: the lane to blame; None if the device gave up and no lane was seen late.
        failed: whether the lane answered that its computation failed.
        waited_s: how long the lane was waited for, in seconds.
    """

    lane: int | None
    failed: bool
    waited_s: float


class LaneJudge:
    """Judges lanes by regular looks at the slab, and counts no time in which it had no turn itself.

    Args:
        interval_s: between two looks, in seconds.
        now_s: on a clock that never goes back, in seconds.
    """

    def __init__(self, interval_s: float, now_s: float) -> None:
        self._interval_s = interval_s
        self._clock = TurnClock(interval_s, now_s)
        self._asked = 0
        self._since_s = self._clock.awake_s(now_s)
        self._last_late: int | None = None

    def look(self, seen: Look, now_s: float) -> Verdict | None:
        """Takes in a look; returns a verdict once a lane is late for longer than its limit, else None."""
        late_turn = self._clock.turn(now_s) > self._interval_s
        awake_s = self._clock.awake_s(now_s)
        if seen.asked != self._asked:
            self._asked, self._since_s, self._last_late = seen.asked, awake_s, None
        late = seen.late_lane()
        # If the device gave up, the step is lost, also if the lane has answered since.
        if late is None and not seen.gave_up:
            self._since_s = awake_s
            return None
        waited_s = awake_s - self._since_s
        grace_s = LATE_TURN_GRACE_S if late_turn else 0.0
        if not seen.gave_up and waited_s <= seen.limit_s + grace_s:
            self._last_late = late
            return None
        # The device knows best: after it gave up it goes on asking, and any lane may be computing now.
        found = (seen.given_up_lane, late, self._last_late)
        lane = next((each for each in found if each is not None), None)
        return Verdict(lane=lane, failed=lane is not None and seen.failed[lane], waited_s=waited_s)
