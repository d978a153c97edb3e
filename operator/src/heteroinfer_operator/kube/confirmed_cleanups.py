"""Remembers which fetch pods may remove commits now, because the operator confirmed their lists.

A *fetch pod* downloads a model into its cache. Its *list* has the commits of the model that are in use: the
pod keeps these commits, and removes others.
"""

import time
from collections.abc import Callable, Sequence

from heteroinfer_contract.model_fetch import CONFIRMED_S
from heteroinfer_operator.cluster import CleanupPod


class ConfirmedCleanups:
    """The times at which the operator confirmed the lists of fetch pods.

    An earlier process of the operator may have confirmed any pod's list until this process started. So a pod
    without a confirmation of this process counts as confirmed at the start of this process.

    Args:
        clock: monotonic clock, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._started_s = clock()
        self._confirmed_s: dict[str, float] = {}

    def add(self, uid: str) -> None:
        """Records that the operator confirms the list of the pod with this uid now."""
        now_s = self._clock()
        self._confirmed_s = {
            known: at_s for known, at_s in self._confirmed_s.items() if now_s - at_s < CONFIRMED_S
        }
        self._confirmed_s[uid] = now_s

    def among(self, pods: Sequence[CleanupPod]) -> tuple[CleanupPod, ...]:
        """Returns the pods that may remove commits now, because their confirmation may still be valid."""
        now_s = self._clock()
        return tuple(
            cleanup
            for cleanup in pods
            if now_s - self._confirmed_s.get(cleanup.pod.uid, self._started_s) < CONFIRMED_S
        )
