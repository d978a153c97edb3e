"""The state of a group as the leader's supervisor sees it; /group serves it as JSON.

Stdlib only; pure.
"""

import dataclasses
import re
from dataclasses import dataclass
from enum import StrEnum

from heteroinfer_contract import codec
from heteroinfer_contract.errors import ContractError
from heteroinfer_contract.plan import MAX_WORLD_SIZE, Plan

MAX_SECONDS = 1e9
"""Maximum of every duration that a rank reports: thirty years."""
MAX_BLOCKS = 2**31
"""Maximum blocks of a KV cache. Multiplied by the tokens of a block, the number still fits JSON."""
MAX_TRANSPORTS = 8
"""Maximum number of transports of a rank."""
_TRANSPORT = re.compile(r"(stages|ranks):[a-z0-9_]{1,57}")
"""A transport of a rank, at most 64 characters. NCCL's longest names are those of network plug-ins, such as
`ranks:nccl_net_aws_libfabric`; `nccl_log.py` passes on at most 41 characters of them."""
_SHOWN_RANKS = 8
"""Number of ranks that an error shows."""
MAX_COUNT = 2**53
"""Maximum of all other numbers, and of the bytes of all ranks together: the largest whole number in JSON."""


class RankPhase(StrEnum):
    """The phases of a rank's start, in order."""

    STARTING = "Starting"
    CONNECTING = "Connecting"
    LOADING = "Loading"
    WARMING_UP = "WarmingUp"
    READY = "Ready"
    SLEEPING = "Sleeping"
    """The rank was ready and released memory until its wake-up (POST /sleep, POST /wake_up)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStatus:
    """The current state of one rank.

    Attributes:
        loaded_bytes: weights read so far, estimated from the progress in the checkpoint; 0 if unknown.
        total_bytes: weights to read; 0 if unknown.
        steps: model steps run since warm-up.
        step_s: moving average of the time of a decode step. The next three attributes are parts of this time.
        kv_blocks: KV blocks of the rank, equal on all ranks; 0 while unknown.
        kv_room_blocks: KV blocks that fitted into the rank's memory when the memory was measured, whatever
            the plan; 0 while unknown.
        kv_room_bytes: bytes of `kv_room_blocks`.
        locked_memory_bytes: memory that the rank had locked or pinned when it became ready; 0 if the kernel
            does not count locked memory, None while unknown.
        locked_memory_limit_bytes: maximum memory that the rank may lock; None if there is no limit, or
            while unknown.
        transports: how tensors of the rank travel between `stages` and between `ranks` of a stage, such as
            `ranks:nccl_p2p`.
        gpu_experts_from: minimum number of rows of a step in which this rank's GPU computes experts of
            feed-forward ranks, as measured; 0 if CPUs compute all experts, None while unknown.
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
    locked_memory_bytes: int | None = None
    locked_memory_limit_bytes: int | None = None
    transports: tuple[str, ...] = ()
    gpu_experts_from: int | None = None

    def check(self) -> None:
        """Checks that all numbers are in range; raises ContractError that names the field."""
        not_numbers = {"phase", "transports"}
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        numbers = {
            name: value for name, value in fields.items() if name not in not_numbers and value is not None
        }
        durations = {name: value for name, value in numbers.items() if name.endswith("_s")}
        codec.at_least(0, "RankStatus", **numbers)
        codec.at_most(MAX_SECONDS, "RankStatus", **durations)
        codec.at_most(MAX_COUNT, "RankStatus", **numbers)
        codec.at_most(MAX_BLOCKS, "RankStatus", kv_blocks=self.kv_blocks)
        codec.at_most(MAX_TRANSPORTS, "RankStatus", transports=len(self.transports))
        if not all(map(_TRANSPORT.fullmatch, self.transports)):
            raise ContractError(
                f"RankStatus.transports: each must match {_TRANSPORT.pattern} (got {list(self.transports)}). "
                f"{codec.SAME_VERSION}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupReport(codec.JsonValue):
    """The current state of a group, as its leader sees it.

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
        """Checks the properties that every reader relies on.

        Raises:
            ContractError: ranks are not 0..n-1 in order, or a number is out of range.
        """
        codec.at_least(0, "GroupReport", epoch=self.epoch)
        codec.at_most(
            MAX_WORLD_SIZE, "GroupReport", ranks=len(self.ranks), missing_pods=len(self.missing_pods)
        )
        if [rank.rank for rank in self.ranks] != list(range(len(self.ranks))):
            first_ranks = [rank.rank for rank in self.ranks[:_SHOWN_RANKS]]
            raise ContractError(
                f"GroupReport.ranks: must be ranks 0..n-1 in order (got {first_ranks}, ...). "
                f"{codec.SAME_VERSION}"
            )
        for rank in self.ranks:
            rank.check()
        for name in ("loaded_bytes", "total_bytes"):
            codec.at_most(MAX_COUNT, "GroupReport", **{name: sum(getattr(rank, name) for rank in self.ranks)})

    def covers(self, plan: Plan) -> bool:
        """Returns whether the report has exactly the plan's ranks, each in the plan's pod."""
        return [rank.pod for rank in self.ranks] == [rank.pod for rank in plan.ranks]
