"""What goes wrong between ranks, worded so that the supervisor can name the culprit."""

from vllm_heteroinfer.pod.lost_peer import PeerGoneError


class PeerLostError(PeerGoneError):
    """Another rank is gone or silent; the text says for what this rank waited, and for how long."""

    def __init__(self, peer: int, waited_s: float, detail: str, *, awaited: str = "hidden states") -> None:
        super().__init__(
            peer, f"waited {waited_s:.1f} s for {awaited} of rank {peer}, which did not come: {detail}"
        )


class CollectiveMismatchError(RuntimeError):
    """Two ranks of a process group are at different collectives: what they would combine has no meaning.

    Attributes:
        peer: global rank of the one that differs from this one.
    """

    def __init__(self, group: str, peer: int, here: str, there: str) -> None:
        self.peer = peer
        super().__init__(
            f"process group {group}: {here}; {there}; every rank must call the same collectives in the same "
            "order: the forwards of these ranks differ, so the group must start again"
        )
