"""Bytes: what a rank may use, and what a stage's weights and KV cache take. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

from heteroinfer_contract.model_profile import ModelProfile
from heteroinfer_contract.plan import Device, EngineSettings
from heteroinfer_operator.errors import PlanError
from heteroinfer_operator.planning.engine_settings import ELEMENT_BYTES
from heteroinfer_operator.planning.inventory import Inventory
from heteroinfer_operator.planning.topology import Seat
from heteroinfer_operator.quantity import format_bytes, parse_bytes

GPU_USABLE: Final = Fraction(9, 10)
"""Share of a GPU's memory for weights and KV cache; the rest: activations, CUDA graphs, the driver."""
RANK_OVERHEAD_BYTES: Final = 2**30
"""Host memory of a CPU rank without weights and KV cache: Python, torch and vLLM, activations."""
LEADER_OVERHEAD_BYTES: Final = 2**30
"""Host memory of the API server and the scheduler, in the pod of rank 0."""
CPU_TABLE_COPIES: Final = 2
"""On CPUs embedding and head are packed and kept (vllm/.../vocab_parallel_embedding.py:66-71@v0.32.0)."""


def rank_budget(seat: Seat, inventory: Inventory) -> int | None:
    """Returns the bytes that a rank has for weights and KV cache, or None if that is unknown.

    Raises:
        PlanError: a CPU pod's memory is less than its processes take without a model.
    """
    role = seat.placed.role
    if seat.placed.device is Device.GPU:
        memory = (
            parse_bytes(role.device_memory)
            if role.device_memory
            else inventory.gpu_memory_bytes.get(role.name)
        )
        return None if memory is None else int(memory * GPU_USABLE)
    pod = _pod_memory(seat, inventory)
    if pod is None:
        return None
    overhead = role.ranks_per_pod * RANK_OVERHEAD_BYTES + (LEADER_OVERHEAD_BYTES if seat.pod == 0 else 0)
    if pod <= overhead:
        raise PlanError(
            f"role {role.name}: got {format_bytes(pod)} of memory a pod, expected more than the "
            f"{format_bytes(overhead)} that {role.ranks_per_pod} ranks"
            f"{' and the API server' if seat.pod == 0 else ''} take without a model; "
            "raise resources.limits.memory",
            reason="InsufficientMemory",
        )
    return (pod - overhead) // role.ranks_per_pod


def _pod_memory(seat: Seat, inventory: Inventory) -> int | None:
    role = seat.placed.role
    for amounts in (role.resources.limits, role.resources.requests) if role.resources else ():
        if amounts and "memory" in amounts:
            return parse_bytes(amounts["memory"])
    return inventory.host_memory_bytes.get(role.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of one rank's share of a model at the group's settings.

    Attributes:
        profile: of the model.
        tensor: ranks of a stage.
        scale: bytes of the engine's element type for one byte of the checkpoint.
        kv_bytes: KV cache of a token in a layer on one rank.
    """

    profile: ModelProfile
    tensor: int
    scale: Fraction
    kv_bytes: int

    @classmethod
    def of(cls, profile: ModelProfile, engine: EngineSettings, tensor: int) -> "Sizes":
        """Returns the sizes for these settings."""
        element = ELEMENT_BYTES[engine.dtype]
        # Quantized weights stay as they are, whatever the activations' type.
        scale = (
            Fraction(1)
            if profile.quantization
            else Fraction(element, ELEMENT_BYTES.get(profile.dtype, element))
        )
        heads = max(1, profile.num_kv_heads // tensor)
        whole = profile.kv_bytes_per_token_and_layer(element)
        return cls(
            profile=profile, tensor=tensor, scale=scale, kv_bytes=whole * heads // profile.num_kv_heads
        )

    def layers(self, first: int, end: int) -> int:
        """Returns the weights of layers first..end-1 on one rank, in bytes."""
        return self._share(sum(self.profile.layer_bytes[first:end]))

    def tables(self, stage: int, num_stages: int, device: Device) -> int:
        """Returns what a stage holds besides layers on one rank, in bytes: embedding first, head last.

        A tied head is the embedding again, unless both are in one stage.
        """
        profile = self.profile
        first, last = stage == 0, stage == num_stages - 1
        tables = profile.embedding_bytes if first else 0
        if last and not profile.tied_head:
            tables += profile.head_bytes
        elif last and not first:
            tables += profile.embedding_bytes
        copies = CPU_TABLE_COPIES if device is Device.CPU else 1
        return self._share(tables) * copies + (int(profile.other_bytes * self.scale) if last else 0)

    def read_per_step(self, first: int, end: int, *, last: bool) -> int:
        """Returns what one rank reads in a decode step, in bytes: its layers, and the head if last."""
        profile = self.profile
        head = profile.embedding_bytes if profile.tied_head else profile.head_bytes
        return self.layers(first, end) + (self._share(head) if last else 0)

    def _share(self, size: int) -> int:
        return -int(-size * self.scale // self.tensor)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBudget:
    """What a stage may hold: that of its tightest rank, since its ranks have equal shares.

    Attributes:
        role: name of the tightest rank's role.
        device: CPU if any of its ranks computes on one.
        budget: bytes of the tightest rank for weights and KV cache, or None if unknown.
        tables: of that, taken by embedding and head.
    """

    role: str
    device: Device
    budget: int | None
    tables: int

    @property
    def free_bytes(self) -> int | None:
        """Returns the bytes for layers and their KV cache, or None if unknown; may be negative."""
        return None if self.budget is None else self.budget - self.tables


def stage_budgets(
    stages: Sequence[Sequence[Seat]], sizes: Sizes, inventory: Inventory
) -> tuple[StageBudget, ...]:
    """Returns the budget of each stage; raises PlanError as rank_budget."""
    return tuple(
        min(
            (_seat_budget(seat, index, len(stages), seats, sizes, inventory) for seat in seats),
            # A rank of unknown memory bounds nothing as long as another's is known.
            key=lambda stage: (stage.free_bytes is None, stage.free_bytes or 0),
        )
        for index, seats in enumerate(stages)
    )


def _seat_budget(
    seat: Seat, index: int, num_stages: int, seats: Sequence[Seat], sizes: Sizes, inventory: Inventory
) -> StageBudget:
    has_cpu = any(other.placed.device is Device.CPU for other in seats)
    return StageBudget(
        role=seat.placed.role.name,
        device=Device.CPU if has_cpu else Device.GPU,
        budget=rank_budget(seat, inventory),
        tables=sizes.tables(index, num_stages, seat.placed.device),
    )


def longest_sequence_tokens(engine: EngineSettings) -> int:
    """Returns the tokens of KV cache without which no longest sequence could run, in whole blocks.

    One block more than the sequence, since vLLM keeps one for itself.
    """
    return (-(-engine.max_model_len // engine.block_size) + 1) * engine.block_size
