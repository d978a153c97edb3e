"""What the leader's supervisor knows of its group now; served as JSON on /group.

Stdlib only.
"""

from dataclasses import dataclass
from enum import StrEnum

from heteroinfer_contract import codec


class RankPhase(StrEnum):
    """How far a rank has come, in order."""

    STARTING = "Starting"
    CONNECTING = "Connecting"
    LOADING = "Loading"
    WARMING_UP = "WarmingUp"
    READY = "Ready"
    SLEEPING = "Sleeping"
    """Was ready, and has given memory back until it is woken (POST /sleep, POST /wake_up)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStatus:
    """One rank now.

    Attributes:
        rank: global rank.
        pod: index of its pod.
        phase: how far it has come.
        loaded_bytes: weights read so far, counted by how much of the checkpoint it is through; 0
            when unknown.
        total_bytes: weights to read; 0 when unknown.
        steps: model steps run since warm-up.
        step_s: moving average of a decode step, in seconds.
        compute_s: of which its own compute.
        wait_s: of which waiting for peers.
        transfer_s: of which sending and receiving.
        heartbeat_age_s: since the rank was last seen alive, in seconds.
        kv_blocks: KV blocks it has, as many as every other rank; 0 while unknown.
        kv_room_blocks: KV blocks that its memory had room for when it was measured, whatever
            was planned; 0 while unknown.
        kv_room_bytes: that room, in bytes.
    """

    rank: int
    pod: int
    phase: RankPhase = RankPhase.STARTING
    loaded_bytes: int = 0
    total_bytes: int = 0
    steps: int = 0
    step_s: float = 0.0
    compute_s: float = 0.0
    wait_s: float = 0.0
    transfer_s: float = 0.0
    heartbeat_age_s: float = 0.0
    kv_blocks: int = 0
    kv_room_blocks: int = 0
    kv_room_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStatus:
    """A group now, as its leader sees it.

    Attributes:
        group_uid: as in PodLaunch.
        epoch: as in PodLaunch.
        plan_hash: of the plan it runs.
        ready: whether a request would be answered now.
        message: what it waits for when not ready.
        ranks: by rank.
    """

    group_uid: str
    epoch: int
    plan_hash: str
    ready: bool
    message: str
    ranks: tuple[RankStatus, ...]

    def to_json(self) -> str:
        """Returns the one JSON text of this status."""
        return codec.to_json(self)

    @classmethod
    def from_json(cls, text: str) -> "GroupStatus":
        """Returns the status that `text` holds; raises ContractError naming the field."""
        return codec.from_json(cls, text)
