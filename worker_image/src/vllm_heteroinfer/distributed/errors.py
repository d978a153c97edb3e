"""Errors between ranks. They name the other rank, so that the supervisor can find the culprit."""

from vllm_heteroinfer.pod.lost_peer import PeerGoneError


class PeerLostError(PeerGoneError):
    """Another rank is gone or silent. The message names the awaited data and the time of the wait."""

    def __init__(self, peer: int, waited_s: float, detail: str, *, awaited: str = "hidden states") -> None:
        super().__init__(peer, f"waited {waited_s:.1f} s for {awaited} from rank {peer}, in vain: {detail}")


class CollectiveMismatchError(RuntimeError):
    """Two ranks of a process group called different collectives, so the result would be meaningless.

    Attributes:
        peer: global rank of the other rank.
    """

    def __init__(self, group: str, peer: int, here: str, there: str) -> None:
        self.peer = peer
        super().__init__(
            f"process group {group}: {here}, but {there}. All ranks must call the same collectives in the "
            "same order. The forward passes of these ranks differ, so the group must restart"
        )
