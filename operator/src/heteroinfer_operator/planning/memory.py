"""Bytes: what a rank may use, and what a stage's weights and KV cache take. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from typing import Final

from heteroinfer_contract.model_profile import ModelProfile
from heteroinfer_contract.plan import Device, EngineSettings
from heteroinfer_contract.printable import format_bytes
from heteroinfer_operator.api import RoleSpec
from heteroinfer_operator.errors import PlanError, PlanReason
from heteroinfer_operator.planning.gpu_floor import (
    BESIDE_ON_GPUS,
    GPU_USABLE,
    GpuFloor,
    gpu_memory,
    usable_gpu_memory,
)
from heteroinfer_operator.planning.inventory import Inventory
from heteroinfer_operator.planning.kv_cache import KvCache, build_kv_cache
from heteroinfer_operator.planning.packing import (
    WeightKernels,
    bytes_beside,
    filled_part,
    packed_part,
    packing_copies,
)
from heteroinfer_operator.planning.topology import Seat
from heteroinfer_operator.quantity import parse_bytes
from heteroinfer_operator.vllm_support.architectures import TABLES_ON_EVERY_STAGE
from heteroinfer_operator.vllm_support.engine_options import ELEMENT_BYTES, EngineOptions
from heteroinfer_operator.vllm_support.quantization import FOUR_BITS

RANK_OVERHEAD_BYTES: Final = 2**30
"""Host memory of a CPU rank without weights and KV cache: Python, torch and vLLM, activations."""
PACKED_IN_OVERHEAD_BYTES: Final = 3 * 2**27
"""Of RANK_OVERHEAD_BYTES, what may lie beside a layer while it is packed: of it a rank had taken 0.56 to
0.58 GiB by then (2026-11-25)."""
LEADER_OVERHEAD_BYTES: Final = 2**30
"""Host memory of the API server and the scheduler, in the pod of rank 0."""
CPU_TABLE_COPIES: Final = 2
"""On CPUs embedding and head are packed and kept (vllm/.../vocab_parallel_embedding.py:66-71@v0.32.0)."""


def rank_budget(seat: Seat, inventory: Inventory, gpu_floor: int) -> int | None:
    """Returns the bytes that a rank has for weights and KV cache, or None if that is unknown.

    Args:
        gpu_floor: what a GPU holds besides, at least, in bytes.

    Raises:
        PlanError: memory is less than its processes take without a model, or is in thousandths of bytes.
    """
    role = seat.placed.role
    _check_unit(role)
    if seat.placed.device is Device.GPU:
        memory = gpu_memory(role, inventory)
        if memory is not None and memory <= gpu_floor:
            raise PlanError(
                f"role {role.name}: got a GPU of {format_bytes(memory)}, expected more than the "
                f"{format_bytes(gpu_floor)} that {BESIDE_ON_GPUS} take; use a larger device, or set "
                "engine.eager: Always, which has no CUDA graphs",
                reason=PlanReason.INSUFFICIENT_MEMORY,
            )
        return None if memory is None else usable_gpu_memory(memory, gpu_floor)
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


def _check_unit(role: RoleSpec) -> None:
    """Raises PlanError for a memory limit such as 1500m: Kubernetes takes it for 1.5 bytes."""
    limits = role.resources.limits if role.resources else None
    limit = (limits or {}).get("memory", "")
    if limit.endswith("m"):
        raise PlanError(
            f"role {role.name}: got resources.limits.memory {limit}, which is thousandths of a byte; "
            f"write {limit[:-1]}Mi",
            reason=PlanReason.INSUFFICIENT_MEMORY,
        )


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
        tensor: ranks of a stage.
        scale: bytes of the engine's element type for one byte of the checkpoint, of plain weights.
        layer_bytes: weights of each layer on one rank as they are stored, in bytes: what a GPU has of them.
        quantized_bytes: of these, those in the model's scheme, which CPUs pack.
        filling_bytes: zeros that CPUs add to the experts of each layer.
        packing_bytes: what lies beside each layer on a CPU while it is packed.
        encoder_bytes: of the encoder, on each rank; 0 where it is not served.
        gpu_floor: what a GPU holds besides.
    """

    profile: ModelProfile
    tensor: int
    scale: Fraction
    layer_bytes: tuple[int, ...]
    quantized_bytes: tuple[int, ...]
    filling_bytes: tuple[int, ...]
    packing_bytes: tuple[int, ...]
    encoder_bytes: int
    gpu_floor: GpuFloor
    kv: KvCache

    @classmethod
    def of(cls, profile: ModelProfile, engine: EngineSettings, tensor: int, *, batches: int) -> "Sizes":
        """Returns the sizes for these settings, of a group with so many batches at once."""
        element = ELEMENT_BYTES[engine.dtype]
        scale = Fraction(element, ELEMENT_BYTES.get(profile.dtype, element))
        text_only = EngineOptions.of(engine.extra_args).is_text_only
        linear = scale * online_quantization(engine.extra_args, element)
        sizes = tuple(zip(profile.layer_bytes, plain_bytes(profile), strict=True))
        quantized = tuple(-(-(size - plain) // tensor) for size, plain in sizes)
        return cls(
            profile=profile,
            tensor=tensor,
            scale=scale,
            layer_bytes=tuple(-int(-(plain * linear + (size - plain)) // tensor) for size, plain in sizes),
            quantized_bytes=quantized,
            filling_bytes=tuple(
                ceil(kind.routed_bytes * (filled_part(kind, tensor) - 1) * scale / tensor)
                for kind in profile.layers
            ),
            packing_bytes=_packing_bytes(profile, quantized, scale, tensor),
            encoder_bytes=0 if text_only else int(profile.encoder_bytes * scale),
            gpu_floor=GpuFloor.of(profile, engine, tensor),
            kv=build_kv_cache(profile, engine, tensor=tensor, batches=batches),
        )

    def layers(self, first: int, end: int, kernels: WeightKernels = WeightKernels.GPU) -> int:
        """Returns the weights of layers first..end-1 on one rank as its kernels have them, in bytes."""
        if kernels is WeightKernels.GPU:
            return sum(self.layer_bytes[first:end])
        added = sum(self.quantized_bytes[first:end]) * (packed_part(self.profile.scheme, kernels) - 1)
        return sum(self.layer_bytes[first:end]) + sum(self.filling_bytes[first:end]) + ceil(added)

    def cache(self, first: int, end: int) -> int:
        """Returns the least KV cache of layers first..end-1 on one rank, in bytes: one longest sequence."""
        return self.kv.block_bytes(first, end) * self.kv.least_blocks

    def packing(self, first: int, end: int, kernels: WeightKernels = WeightKernels.GPU) -> int:
        """Returns what lies beside layers first..end-1 while the one that needs most is packed, in bytes.

        Layers are packed one by one once all are loaded, before there is a KV cache; 0 on GPUs.
        Source: vllm/model_executor/model_loader/base_loader.py::BaseModelLoader@v0.32.0.
        """
        return 0 if kernels is WeightKernels.GPU else max(self.packing_bytes[first:end], default=0)

    def loading(self, first: int, end: int, kernels: WeightKernels = WeightKernels.GPU) -> int:
        """Returns the most that one rank has of layers first..end-1 before there is a KV cache, in bytes.

        All are loaded as they are stored before the first is packed, and packed before the last is done.
        """
        most = max(self.layers(first, end), self.layers(first, end, kernels))
        return most + self.packing(first, end, kernels)

    def serving(self, first: int, end: int, kernels: WeightKernels = WeightKernels.GPU) -> int:
        """Returns layers first..end-1 with KV cache for one longest sequence on one rank, in bytes."""
        return self.layers(first, end, kernels) + self.cache(first, end)

    def needed(self, first: int, end: int, kernels: WeightKernels = WeightKernels.GPU) -> int:
        """Returns the least that one rank must have for layers first..end-1, in bytes.

        Their weights with KV cache for one longest sequence, or what it has while it loads them, whichever
        is more.
        """
        return max(self.serving(first, end, kernels), self.loading(first, end, kernels))

    def loads_to_more(self, first: int, end: int, kernels: WeightKernels) -> bool:
        """Returns whether loading layers first..end-1 is what needs most, and not KV cache."""
        return self.loading(first, end, kernels) > self.serving(first, end, kernels)

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


def _packing_bytes(
    profile: ModelProfile, quantized: Sequence[int], scale: Fraction, tensor: int
) -> tuple[int, ...]:
    copies = packing_copies(profile.scheme) if profile.scheme.name in FOUR_BITS else 0
    others = [
        ceil(bytes_beside(profile.layer(index), profile.scheme, scale) / tensor)
        for index in range(profile.num_layers)
    ]
    return tuple(
        max(copies * in_scheme, other - PACKED_IN_OVERHEAD_BYTES, 0)
        for in_scheme, other in zip(quantized, others, strict=True)
    )


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
    asked = EngineOptions.of(args).quantization
    eight_bits = asked.startswith(("fp8", "int8", "mxfp8"))
    return Fraction(1, element_bytes) if eight_bits else Fraction(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBudget:
    """What one rank may hold.

    Attributes:
        kernels: that its layers are packed for.
        budget: bytes for weights and KV cache, or None if unknown.
        tables: of that, taken by embedding and head.
        beside: of a GPU, bytes that are not in the budget if they are what bounds it, or 0.
    """

    role: str
    device: Device
    kernels: WeightKernels
    budget: int | None
    tables: int
    beside: int = 0

    @property
    def free_bytes(self) -> int | None:
        """Returns the bytes for layers and their KV cache, or None if unknown; may be negative."""
        return None if self.budget is None else self.budget - self.tables

    def left_bytes(self, sizes: Sizes, first: int, end: int) -> int | None:
        """Returns what layers first..end-1 leave for KV cache, or None if unknown; may be negative."""
        free = self.free_bytes
        return None if free is None else free - sizes.layers(first, end, self.kernels)

    def missing_bytes(self, sizes: Sizes, first: int, end: int) -> int | None:
        """Returns what it lacks for layers first..end-1, or None if unknown; <= 0 if nothing."""
        free = self.free_bytes
        return None if free is None else sizes.needed(first, end, self.kernels) - free


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBudget:
    """What the ranks of a stage may hold, which have equal shares of its layers.

    Attributes:
        ranks: each that differs from the others, in rank order.
    """

    ranks: tuple[RankBudget, ...]

    @property
    def device(self) -> Device:
        """Returns CPU if any of its ranks computes on one."""
        return Device.CPU if any(rank.device is Device.CPU for rank in self.ranks) else Device.GPU

    @property
    def is_known(self) -> bool:
        """Returns whether any rank's memory is known: one of unknown memory bounds nothing beside it."""
        return any(rank.budget is not None for rank in self.ranks)

    def kernels_of(self, role: str) -> WeightKernels:
        """Returns the kernels of a role's ranks here."""
        return next(rank.kernels for rank in self.ranks if rank.role == role)

    def tightest(self, sizes: Sizes, first: int, end: int) -> RankBudget:
        """Returns the rank of known memory, if any, that layers first..end-1 leave the least of it."""

        def left(rank: RankBudget) -> tuple[bool, int]:
            found = rank.left_bytes(sizes, first, end)
            return found is None, found or 0

        return min(self.ranks, key=left)

    def neediest(self, sizes: Sizes, first: int, end: int) -> RankBudget:
        """Returns the rank of known memory, if any, that lacks most for layers first..end-1."""

        def missing(rank: RankBudget) -> tuple[bool, int]:
            found = rank.missing_bytes(sizes, first, end)
            return found is not None, found or 0

        return max(self.ranks, key=missing)

    def left_bytes(self, sizes: Sizes, first: int, end: int) -> int | None:
        """Returns what layers first..end-1 leave its tightest rank for KV cache, or None if unknown."""
        return self.tightest(sizes, first, end).left_bytes(sizes, first, end)

    def missing_bytes(self, sizes: Sizes, first: int, end: int) -> int | None:
        """Returns what its neediest rank lacks for layers first..end-1, or None if unknown; <= 0 if none."""
        return self.neediest(sizes, first, end).missing_bytes(sizes, first, end)


def stage_budgets(
    stages: Sequence[Sequence[Seat]], sizes: Sizes, inventory: Inventory
) -> tuple[StageBudget, ...]:
    """Returns the budget of each stage; raises PlanError as rank_budget."""

    def of_rank(seat: Seat, stage: int) -> RankBudget:
        device = seat.placed.device
        floor = sizes.gpu_floor.total(
            embeds=stage == 0, samples=stage == len(stages) - 1, gpus=_gpus_by_nccl(stages[stage])
        )
        memory = gpu_memory(seat.placed.role, inventory) if device is Device.GPU else None
        bounds = memory is not None and floor > memory * (1 - GPU_USABLE)
        return RankBudget(
            role=seat.placed.role.name,
            device=device,
            kernels=_kernels(seat, inventory),
            budget=rank_budget(seat, inventory, floor),
            tables=sizes.tables(stage, len(stages), device),
            beside=floor if bounds else 0,
        )

    return tuple(
        StageBudget(ranks=tuple(dict.fromkeys(of_rank(seat, index) for seat in seats)))
        for index, seats in enumerate(stages)
    )


def _gpus_by_nccl(seats: Sequence[Seat]) -> int:
    """Returns the GPUs of a stage that speak by NCCL; with CPU ranks among them the bridge does it."""
    return len(seats) if all(seat.placed.device is Device.GPU for seat in seats) else 1


def _kernels(seat: Seat, inventory: Inventory) -> WeightKernels:
    """Returns the kernels of a rank; those for AMX, which need most memory, where a CPU may have it."""
    if seat.placed.device is Device.GPU:
        return WeightKernels.GPU
    return WeightKernels.AVX512 if seat.placed.role.name in inventory.without_amx else WeightKernels.AMX


def longest_sequence_tokens(engine: EngineSettings) -> int:
    """Returns the tokens of KV cache without which no longest sequence could run, in whole blocks.

    One block more than the sequence, since vLLM keeps one for itself.
    """
    return (-(-engine.max_model_len // engine.block_size) + 1) * engine.block_size
