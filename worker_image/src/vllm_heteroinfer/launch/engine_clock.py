"""Detects that vLLM's API server or engine does not answer while no rank is busy. Pure."""

from heteroinfer_contract.failure import Failure, FailureReason

ANSWERS_WITHIN_S = 1.5
"""Longest time without an answer of the engine in which a group is still ready."""


class EngineClock:
    """Measures how long vLLM's API server and the engine have not answered while no rank was busy.

    During a step or another call, the engine waits for the ranks and cannot answer. So a long prefill, a
    sleep or a compilation stops both clocks.

    Args:
        now_s: seconds on a monotonic clock that pauses while the supervisor is not scheduled.
    """

    def __init__(self, limit_s: float, now_s: float) -> None:
        self._limit_s = limit_s
        self._api_answered_s = self._engine_answered_s = now_s
        self._now_s = now_s

    def update(
        self,
        *,
        ranks_busy: bool,
        api_answers: bool,
        api_silent_s: float,
        engine_unanswered_s: float,
        now_s: float,
    ) -> None:
        """Updates the clocks with the current observations. While a rank is busy, both clocks stay at 0.

        A time of an answer never moves back, so older observations do not replace newer ones.

        Args:
            api_answers: whether vLLM's API server answered the last health check.
            api_silent_s: seconds since the last message of vLLM's API server to its supervisor.
            engine_unanswered_s: seconds for which vLLM's API server has waited for the engine's answer; 0
                without such a wait.
        """
        self._now_s = now_s
        if ranks_busy:
            self._api_answered_s = now_s
        elif api_answers:  # a server that answers no health check is silent, even if it sends messages
            self._api_answered_s = max(self._api_answered_s, now_s - api_silent_s)
        answered_s = now_s if ranks_busy else now_s - engine_unanswered_s
        self._engine_answered_s = max(self._engine_answered_s, answered_s)

    @property
    def engine_answers(self) -> bool:
        """Whether the engine answers now."""
        return self._now_s - self._engine_answered_s <= ANSWERS_WITHIN_S

    def find_overdue(self) -> Failure | None:
        """Returns the failure of vLLM's API server or engine that has not answered for too long, or None."""
        for part, answered_s in (
            ("vLLM's API server", self._api_answered_s),
            ("vLLM's engine", self._engine_answered_s),
        ):
            silent_s = self._now_s - answered_s
            if silent_s > self._limit_s:
                return Failure(
                    reason=FailureReason.ENGINE_STOPPED,
                    message=(
                        f"{part} (pod 0) has not answered for {silent_s:.0f} s although no rank was "
                        f"busy. The limit is {self._limit_s:.0f} s (stepTimeout). Read the log of pod 0"
                    ),
                    pod=0,
                )
        return None
