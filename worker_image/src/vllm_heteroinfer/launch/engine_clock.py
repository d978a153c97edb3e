"""Whether API server and engine answer while nothing keeps them from it. PURE: answers and times in."""

from heteroinfer_contract.failure import Failure, FailureReason

ANSWERS_WITHIN_S = 1.5
"""Without an answer for longer, a group is not ready."""


class EngineClock:
    """Measures for how long the API server and its engine have answered nothing while no rank was busy.

    An engine waits for the ranks in a step, and in every other call of them: until they are done its
    silence says nothing. So a long prefill, a sleep or a compilation stops both clocks.

    Args:
        now_s: on a clock that never goes back and stands still while the supervisor has no turn, in seconds.
    """

    def __init__(self, limit_s: float, now_s: float) -> None:
        self._limit_s = limit_s
        self._api_answered_s = self._engine_answered_s = now_s
        self._now_s = now_s

    def look(
        self,
        *,
        ranks_busy: bool,
        api_answers: bool,
        api_silent_s: float,
        engine_waits_s: float,
        now_s: float,
    ) -> None:
        """Takes in what is known now.

        Args:
            api_silent_s: for how long it has told its supervisor nothing over its channel, in seconds.
            engine_waits_s: how old the API server's oldest question is that the engine has not
                answered, in seconds; 0 if there is none.
        """
        self._now_s = now_s
        if ranks_busy:
            self._api_answered_s = now_s
        elif api_answers:
            self._api_answered_s = max(self._api_answered_s, now_s - api_silent_s)
        answered_s = now_s if ranks_busy else now_s - engine_waits_s
        self._engine_answered_s = max(self._engine_answered_s, answered_s)

    @property
    def engine_answers(self) -> bool:
        """Returns whether the engine would take a request now."""
        return self._now_s - self._engine_answered_s <= ANSWERS_WITHIN_S

    def overdue(self) -> Failure | None:
        """Returns the failure that names who has answered nothing for too long, or None."""
        for who, answered_s in (("API server", self._api_answered_s), ("engine", self._engine_answered_s)):
            silent_s = self._now_s - answered_s
            if silent_s > self._limit_s:
                return Failure(
                    reason=FailureReason.ENGINE_STOPPED,
                    message=(
                        f"the {who} (pod 0) has answered nothing for {silent_s:.0f} s, and no rank was busy; "
                        f"expected an answer within {self._limit_s:.0f} s (stepTimeout)"
                    ),
                    pod=0,
                )
        return None
