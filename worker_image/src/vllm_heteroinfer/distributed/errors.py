"""Errors between ranks. They name the other rank, so that the supervisor can find the culprit."""

from typing import Final

from vllm_heteroinfer.pod.lost_peer import PeerGoneError

_SHORTEST_WAIT_S: Final = 0.05
"""Shortest wait that a message mentions, in seconds."""


class PeerLostError(PeerGoneError):
    """Another rank is gone or silent.

    Args:
        waited_s: seconds of the wait. The message leaves out a short wait.
        detail: cause or circumstances, without a fix.
        awaited: data that this rank waited for.
    """

    def __init__(self, peer: int, waited_s: float, detail: str, *, awaited: str = "hidden states") -> None:
        within = f" within {waited_s:.1f} s" if waited_s >= _SHORTEST_WAIT_S else ""
        super().__init__(
            peer, f"rank {peer}: did not provide {awaited}{within} ({detail}). Read the log of rank {peer}"
        )


class CollectiveMismatchError(RuntimeError):
    """Two ranks of a process group called different collectives, so the result would be meaningless.

    Attributes:
        peer: global rank of the other rank.
    """

    def __init__(self, group: str, peer: int, own_call: str, peer_call: str) -> None:
        self.peer = peer
        super().__init__(
            f"process group {group}: {own_call}, but {peer_call} (all ranks must call the same collectives "
            "in the same order). The group restarts. If the error repeats, report it, and name the model"
        )
