"""What the leader's supervisor knows of its group now; served as JSON on /group.

Stdlib only; pure.
"""

import dataclasses
from dataclasses import dataclass
from enum import StrEnum

from heteroinfer_contract import codec
from heteroinfer_contract.errors import ContractError
from heteroinfer_contract.plan import MAX_WORLD_SIZE, Plan

MAX_SECONDS = 1e9
"""Of any time that a rank tells: thirty years."""
MAX_BLOCKS = 2**31
"""Of a KV cache: with the tokens of a block they are a number that JSON keeps."""
MAX_COUNT = 2**53
"""Of bytes of all ranks together, and of all else: the largest whole number that JSON keeps."""


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
        loaded_bytes: weights read so far, counted by how much of the checkpoint it is through; 0
            when unknown.
        total_bytes: weights to read; 0 when unknown.
        steps: model steps run since warm-up.
        step_s: moving average of a decode step, in seconds.
        kv_blocks: KV blocks it has, as many as every other rank; 0 while unknown.
        kv_room_blocks: KV blocks that its memory could hold when it was measured, whatever
            was planned; 0 while unknown.
        kv_room_bytes: that headroom, in bytes.
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

    def check(self) -> None:
        """Checks that no number is one that there cannot be; raises ContractError naming it."""
        numbers = (field.name for field in dataclasses.fields(self) if field.name != "phase")
        values = {name: getattr(self, name) for name in numbers}
        codec.at_least(0, "RankStatus", **values)
        codec.at_most(MAX_SECONDS, "RankStatus", **{k: v for k, v in values.items() if k.endswith("_s")})
        codec.at_most(MAX_COUNT, "RankStatus", **values)
        codec.at_most(MAX_BLOCKS, "RankStatus", kv_blocks=self.kv_blocks)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupReport(codec.JsonValue):
    """A group now, as its leader sees it.

    Attributes:
        missing_pods: indices of the pods that have not connected to the leader.
    """

    reads_tolerantly = True
    group_uid: str
    epoch: int
    plan_hash: str
    ready: bool
    message: str
    ranks: tuple[RankStatus, ...]
    missing_pods: tuple[int, ...] = ()

    def check(self) -> None:
        """Checks what every reader relies on.

        Raises:
            ContractError: ranks are not 0..n-1 in order, or a number is one that there cannot be.
        """
        codec.at_least(0, "GroupReport", epoch=self.epoch)
        codec.at_most(
            MAX_WORLD_SIZE, "GroupReport", ranks=len(self.ranks), missing_pods=len(self.missing_pods)
        )
        if [rank.rank for rank in self.ranks] != list(range(len(self.ranks))):
            raise ContractError("GroupReport.ranks: expected ranks 0..n-1 in order")
        for rank in self.ranks:
            rank.check()
        for name in ("loaded_bytes", "total_bytes"):
            codec.at_most(MAX_COUNT, "GroupReport", **{name: sum(getattr(rank, name) for rank in self.ranks)})

    def covers(self, plan: Plan) -> bool:
        """Returns whether it tells of every rank of a plan, each in its pod."""
        return [rank.pod for rank in self.ranks] == [rank.pod for rank in plan.ranks]
