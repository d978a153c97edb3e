"""Bytes: what a rank may use, and what a stage's weights and KV cache take. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

from heteroinfer_contract.byte_size import format_bytes
from heteroinfer_contract.model_profile import ModelProfile
from heteroinfer_contract.plan import Device, EngineSettings
from heteroinfer_operator.errors import PlanError, PlanReason
from heteroinfer_operator.planning.architectures import TABLES_ON_EVERY_STAGE
from heteroinfer_operator.planning.engine_options import has_flag, option_value
from heteroinfer_operator.planning.inventory import Inventory
from heteroinfer_operator.planning.kv_cache import ELEMENT_BYTES, KvCache, build_kv_cache
from heteroinfer_operator.planning.topology import Seat
from heteroinfer_operator.quantity import parse_bytes

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
            f"{format_bytes(overhead)} that {role.ranks_per_pod} rank{'s' * (role.ranks_per_pod > 1)}"
            f"{' and the API server' if seat.pod == 0 else ''} need before a model is "
            "loaded; raise resources.limits.memory",
            reason=PlanReason.INSUFFICIENT_MEMORY,
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
        scale: bytes of the engine's element type for one byte of the checkpoint, of plain weights.
        layer_bytes: weights of each layer on one rank, in bytes.
        encoder_bytes: of the encoder, on each rank; 0 where it is not served.
        kv: the KV cache of one rank.
    """

    profile: ModelProfile
    tensor: int
    scale: Fraction
    layer_bytes: tuple[int, ...]
    encoder_bytes: int
    kv: KvCache

    @classmethod
    def of(cls, profile: ModelProfile, engine: EngineSettings, tensor: int, *, batches: int) -> "Sizes":
        """Returns the sizes for these settings, of a group with so many batches at once."""
        element = ELEMENT_BYTES[engine.dtype]
        scale = Fraction(element, ELEMENT_BYTES.get(profile.dtype, element))
        linear = scale * online_quantization(engine.extra_args, element)
        layers = tuple(
            -int(-(plain * linear + (size - plain)) // tensor)
            for size, plain in zip(profile.layer_bytes, plain_bytes(profile), strict=True)
        )
        return cls(
            profile=profile,
            tensor=tensor,
            scale=scale,
            layer_bytes=layers,
            encoder_bytes=0 if serves_text_only(engine.extra_args) else int(profile.encoder_bytes * scale),
            kv=build_kv_cache(profile, engine, tensor=tensor, batches=batches),
        )

    def layers(self, first: int, end: int) -> int:
        """Returns the weights of layers first..end-1 on one rank, in bytes."""
        return sum(self.layer_bytes[first:end])

    def cache(self, first: int, end: int) -> int:
        """Returns the least KV cache of layers first..end-1 on one rank, in bytes: one longest sequence."""
        return self.kv.block_bytes(first, end) * self.kv.least_blocks

    def tables(self, stage: int, num_stages: int, device: Device) -> int:
        """Returns what a stage holds besides layers on one rank, in bytes: embedding first, head last.

        A tied head is the embedding again, unless both are in one stage. The encoder is built on every rank,
        whole (vllm/model_executor/models@v0.32.0: what vLLM builds says tests/shapes).
        """
        profile = self.profile
        first, last = stage == 0, stage == num_stages - 1
        everywhere = profile.architecture in TABLES_ON_EVERY_STAGE
        tables = 0
        if first or everywhere or (last and profile.tied_head):
            tables += profile.embedding_bytes
        if last or everywhere:
            tables += profile.head_bytes
        tables += profile.layer_table_bytes
        copies = CPU_TABLE_COPIES if device is Device.CPU else 1
        other = int(profile.other_bytes * self.scale) if last else 0
        return self.share(tables) * copies + other + self.encoder_bytes

    def table_names(self, stage: int, num_stages: int) -> tuple[str, ...]:
        """Returns what those tables of a stage are, for people; the encoder is not among them."""
        first, last = stage == 0, stage == num_stages - 1
        everywhere = self.profile.architecture in TABLES_ON_EVERY_STAGE
        tied = self.profile.tied_head
        names = {
            "embedding": first or everywhere,
            "embedding as the head": last and tied and not (first or everywhere),
            "head": (last or everywhere) and not tied,
            "embeddings of each layer": self.profile.layer_table_bytes > 0,
        }
        return tuple(name for name, held in names.items() if held)

    @property
    def head_bytes(self) -> int:
        """Returns what one rank of the last stage reads of the head in a step, in bytes."""
        profile = self.profile
        return self.share(profile.embedding_bytes if profile.tied_head else profile.head_bytes)

    def share(self, size: int) -> int:
        """Returns one rank's part of plain weights, in bytes of the engine's type."""
        return -int(-size * self.scale // self.tensor)


def plain_bytes(profile: ModelProfile) -> tuple[int, ...]:
    """Returns the weights of each layer that are not quantized, in bytes of the checkpoint."""
    if not profile.quantization:
        return profile.layer_bytes
    if not profile.kinds:  # of version 0.1.0, which did not say
        return (0,) * profile.num_layers
    return tuple(
        size - kind.quantized_bytes - (kind.routed_bytes if kind.experts_quantized else 0)
        for size, kind in zip(profile.layer_bytes, profile.layers, strict=True)
    )


def online_quantization(args: Sequence[str], element_bytes: int) -> Fraction:
    """Returns what `--quantization` leaves of plain linear layers, of their bytes.

    vLLM quantizes at load what the checkpoint has not
    (vllm/config/quantization.py::OnlineQuantizationConfigArgs@v0.32.0).
    """
    asked = option_value(args, "--quantization", "-q") or ""
    eight_bits = asked.startswith(("fp8", "int8", "mxfp8"))
    return Fraction(1, element_bytes) if eight_bits else Fraction(1)


def serves_text_only(args: Sequence[str]) -> bool:
    """Returns whether the user leaves the encoder out."""
    return has_flag(args, "--language-model-only")


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
