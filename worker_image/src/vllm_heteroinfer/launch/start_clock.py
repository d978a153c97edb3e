"""Whether the start of a group stands still. PURE: views and times in, a yes or no out."""

from vllm_heteroinfer.launch.readiness import GroupView


class StartClock:
    """Measures for how long nothing has moved since all pods are connected.

    A rank moves when its phase changes or it has read more weights. Pods that are not connected
    stop the clock: their nodes may be pulling the image, which the operator sees.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._seen: object = None
        self._moved_at_s = 0.0

    def is_overdue(self, view: GroupView, now_s: float) -> bool:
        """Returns whether a start that is not complete has stood still for too long.

        Args:
            now_s: on a clock that never goes back and stands still while the supervisor has no turn, in
                seconds.
        """
        ranks = tuple((status.phase, status.loaded_bytes) for status in view.statuses())
        seen = (ranks, view.api_healthy)
        if view.missing_pods or seen != self._seen:
            self._seen, self._moved_at_s = seen, now_s
        return self.still_s(now_s) > self._timeout_s

    def still_s(self, now_s: float) -> float:
        """Returns since when nothing has moved, as far as `is_overdue` was told, in seconds."""
        return now_s - self._moved_at_s
