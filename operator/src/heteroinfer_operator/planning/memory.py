"""Memory of ranks, and the bytes that weights and KV cache of a stage take. Pure."""

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
from heteroinfer_operator.planning.packing import bytes_while_packed, grown_bytes
from heteroinfer_operator.planning.topology import Seat, Topology
from heteroinfer_operator.quantity import parse_bytes
from heteroinfer_operator.vllm_support.architectures import TABLES_ON_EVERY_STAGE
from heteroinfer_operator.vllm_support.engine_options import ELEMENT_BYTES, EngineOptions

RANK_OVERHEAD_BYTES: Final = 2**30
"""Host memory of a CPU rank without weights and KV cache: Python, torch and vLLM, activations."""
PACKED_IN_OVERHEAD_BYTES: Final = 3 * 2**27
"""Part of RANK_OVERHEAD_BYTES that packing may use: ranks had taken 0.56 to 0.58 GiB of the overhead when
they packed (2026-11-25)."""
LEADER_OVERHEAD_BYTES: Final = 2**30
"""Host memory of the API server and the scheduler, in the pod of rank 0."""
CPU_TABLE_COPIES: Final = 2
"""Number of copies of embedding and head on a CPU: one packed, one unpacked
(vllm/.../vocab_parallel_embedding.py:66-71@v0.32.0)."""


def rank_budget(seat: Seat, inventory: Inventory, gpu_floor: int) -> int | None:
    """Returns a rank's bytes for weights and KV cache, or None if its memory is unknown.

    Args:
        gpu_floor: bytes that a GPU holds besides weights and KV cache.

    Raises:
        PlanError: the memory is less than the processes take without a model, or in thousandths of bytes.
    """
    role = seat.placed.role
    _check_unit(role)
    if seat.placed.device is Device.GPU:
        memory = gpu_memory(role, inventory)
        if memory is not None and memory <= gpu_floor:
            raise PlanError(
                f"role {role.name}: a GPU must have more than the {format_bytes(gpu_floor)} that "
                f"{BESIDE_ON_GPUS} take (got {format_bytes(memory)}). Use a larger device, or set "
                "engine.eager: Always, which needs no CUDA graphs",
                reason=PlanReason.INSUFFICIENT_MEMORY,
            )
        return None if memory is None else usable_gpu_memory(memory, gpu_floor)
    pod = _pod_memory(seat, inventory)
    if pod is None:
        return None
    overhead = role.ranks_per_pod * RANK_OVERHEAD_BYTES + (LEADER_OVERHEAD_BYTES if seat.pod == 0 else 0)
    if pod <= overhead:
        raise PlanError(
            f"role {role.name}: a pod must have more memory than the {format_bytes(overhead)} that "
            f"{role.ranks_per_pod} rank{'s' * (role.ranks_per_pod > 1)}"
            f"{' and the API server' if seat.pod == 0 else ''} take without a model "
            f"(got {format_bytes(pod)}). Raise resources.limits.memory",
            reason=PlanReason.INSUFFICIENT_MEMORY,
        )
    return (pod - overhead) // role.ranks_per_pod


def _check_host_tables(seat: Seat, tables: int, inventory: Inventory) -> None:
    """Checks that the host of a GPU rank has memory for tables that vLLM keeps there; raises PlanError."""
    role, pod = seat.placed.role, _pod_memory(seat, inventory)
    need = role.ranks_per_pod * (tables + RANK_OVERHEAD_BYTES) + LEADER_OVERHEAD_BYTES
    if tables and pod is not None and pod < need:
        raise PlanError(
            f"role {role.name}: {format_bytes(need - pod)} of host memory is missing. vLLM keeps the model's "
            f"tables of n-grams ({format_bytes(tables)}) in the memory of the GPU's host, and a pod has "
            f"{format_bytes(pod)}. Raise the role's resources.limits.memory",
            reason=PlanReason.INSUFFICIENT_MEMORY,
        )


def host_tables(profile: ModelProfile, topology: Topology) -> tuple[str, ...]:
    """Returns a note on tables that stay in the host's memory, if the model has any."""
    if not profile.host_table_bytes:
        return ()
    role = topology.stages[0][0].placed.role.name
    size = format_bytes(profile.host_table_bytes)
    return (
        f"role {role}: vLLM keeps the model's tables of n-grams ({size}) in the memory of the GPU's host",
    )


def _check_unit(role: RoleSpec) -> None:
    """Refuses a memory limit such as 1500m, which means 1.5 bytes to Kubernetes; raises PlanError."""
    limits = role.resources.limits if role.resources else None
    limit = (limits or {}).get("memory", "")
    if limit.endswith("m"):
        raise PlanError(
            f"role {role.name}: resources.limits.memory {limit} means thousandths of a byte. "
            f"Write {limit[:-1]}Mi",
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
        scale: bytes of the engine's element type per byte of the checkpoint, for plain weights.
        layer_bytes: stored weights of each layer on one rank, in bytes; a GPU holds them in this form.
        grown_bytes: bytes of each layer that a CPU holds besides `layer_bytes`; may be negative.
        packing_bytes: additional bytes while a CPU packs each layer.
        encoder_bytes: encoder on each rank, in bytes; 0 if it is not served.
        gpu_floor: bytes that a GPU holds besides weights and KV cache.
    """

    profile: ModelProfile
    tensor: int
    scale: Fraction
    layer_bytes: tuple[int, ...]
    grown_bytes: tuple[int, ...]
    packing_bytes: tuple[int, ...]
    encoder_bytes: int
    gpu_floor: GpuFloor
    kv: KvCache

    @classmethod
    def of(cls, profile: ModelProfile, engine: EngineSettings, tensor: int, *, batches: int) -> "Sizes":
        """Returns the sizes for these settings.

        Args:
            batches: batches that may be scheduled at once.
        """
        element = ELEMENT_BYTES[engine.dtype]
        scale = Fraction(element, ELEMENT_BYTES.get(profile.dtype, element))
        text_only = EngineOptions.of(engine.extra_args).is_text_only
        linear = scale * online_quantization(engine.extra_args, element)
        sizes = tuple(zip(profile.layer_bytes, plain_bytes(profile), strict=True))
        packing = (bytes_while_packed(profile, kind, scale) / tensor for kind in profile.layers)
        return cls(
            profile=profile,
            tensor=tensor,
            scale=scale,
            layer_bytes=tuple(-int(-(plain * linear + (size - plain)) // tensor) for size, plain in sizes),
            grown_bytes=tuple(
                ceil(grown_bytes(profile, kind, tensor, scale) / tensor) for kind in profile.layers
            ),
            packing_bytes=tuple(max(ceil(each) - PACKED_IN_OVERHEAD_BYTES, 0) for each in packing),
            encoder_bytes=0 if text_only else int(profile.encoder_bytes * scale),
            gpu_floor=GpuFloor.of(profile, engine, tensor),
            kv=build_kv_cache(profile, engine, tensor=tensor, batches=batches),
        )

    def layers(self, first: int, end: int, device: Device = Device.GPU) -> int:
        """Returns the bytes of the weights of layers first..end-1 on one rank, in its kernels' form."""
        grown = sum(self.grown_bytes[first:end]) if device is Device.CPU else 0
        return sum(self.layer_bytes[first:end]) + grown

    def cache(self, first: int, end: int) -> int:
        """Returns the bytes of KV cache of one full-length request in layers first..end-1 on one rank."""
        return self.kv.block_bytes(first, end) * self.kv.least_blocks

    def packing(self, first: int, end: int, device: Device = Device.GPU) -> int:
        """Returns the additional bytes while the largest of layers first..end-1 is packed; 0 on GPUs.

        vLLM packs layers one by one after it has loaded all, and before it allocates the KV cache.
        Source: vllm/model_executor/model_loader/base_loader.py::BaseModelLoader@v0.32.0.
        """
        return max(self.packing_bytes[first:end], default=0) if device is Device.CPU else 0

    def loading(self, first: int, end: int, device: Device = Device.GPU) -> int:
        """Returns the peak bytes of layers first..end-1 on one rank before it has a KV cache.

        All layers are loaded in stored form before the first is packed, and all but the last are packed when
        that one is.
        """
        most = max(self.layers(first, end), self.layers(first, end, device))
        return most + self.packing(first, end, device)

    def serving(self, first: int, end: int, device: Device = Device.GPU) -> int:
        """Returns the bytes of layers first..end-1 with KV cache for one full-length request on one rank."""
        return self.layers(first, end, device) + self.cache(first, end)

    def needed(self, first: int, end: int, device: Device = Device.GPU) -> int:
        """Returns the least bytes that one rank needs for layers first..end-1.

        That is the larger of two sums: weights with KV cache for one full-length request, and the peak while
        layers are loaded and packed.
        """
        return max(self.serving(first, end, device), self.loading(first, end, device))

    def loads_to_more(self, first: int, end: int, device: Device) -> bool:
        """Returns whether layers first..end-1 need more memory while they load than while they serve."""
        return self.loading(first, end, device) > self.serving(first, end, device)

    def tables(self, stage: int, num_stages: int, device: Device) -> int:
        """Returns the bytes of a stage besides layers on one rank: the embedding, the head, the encoder.

        The first stage has the embedding, the last the head. A tied head is a second copy of the embedding,
        unless both are in one stage. Every rank has the whole encoder
        (vllm/model_executor/models@v0.32.0; tests/shapes compares these sizes with vLLM's).
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
        """Returns the names of a stage's tables, without the encoder, for people."""
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
        """Bytes of the head that one rank of the last stage reads in a step."""
        profile = self.profile
        return self.share(profile.embedding_bytes if profile.tied_head else profile.head_bytes)

    def share(self, size: int) -> int:
        """Returns one rank's part of plain weights, in bytes of the engine's element type."""
        return -int(-size * self.scale // self.tensor)


def plain_bytes(profile: ModelProfile) -> tuple[int, ...]:
    """Returns the bytes of each layer's unquantized weights in the checkpoint."""
    if not profile.quantization:
        return profile.layer_bytes
    if not profile.kinds:  # version 0.1.0 did not record them
        return (0,) * profile.num_layers
    return tuple(
        size - kind.quantized_bytes - (kind.routed_bytes if kind.experts_quantized else 0)
        for size, kind in zip(profile.layer_bytes, profile.layers, strict=True)
    )


def online_quantization(args: Sequence[str], element_bytes: int) -> Fraction:
    """Returns the share of their bytes that plain linear layers keep under `--quantization`.

    vLLM quantizes layers at load if the checkpoint is not quantized
    (vllm/config/quantization.py::OnlineQuantizationConfigArgs@v0.32.0).
    """
    asked = EngineOptions.of(args).quantization
    eight_bits = asked.startswith(("fp8", "int8", "mxfp8"))
    return Fraction(1, element_bytes) if eight_bits else Fraction(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBudget:
    """Memory of one rank.

    Attributes:
        budget: bytes for weights and KV cache, or None if unknown.
        tables: part of the budget that embedding and head take.
        beside: bytes that a GPU keeps free, if they bound the budget; otherwise 0.
    """

    role: str
    device: Device
    budget: int | None
    tables: int
    beside: int = 0

    @property
    def free_bytes(self) -> int | None:
        """Bytes for layers and their KV cache, or None if unknown; may be negative."""
        return None if self.budget is None else self.budget - self.tables

    def left_bytes(self, sizes: Sizes, first: int, end: int) -> int | None:
        """Returns the bytes that layers first..end-1 leave for KV cache, or None; may be negative."""
        free = self.free_bytes
        return None if free is None else free - sizes.layers(first, end, self.device)

    def missing_bytes(self, sizes: Sizes, first: int, end: int) -> int | None:
        """Returns the bytes missing for layers first..end-1, or None if unknown; <= 0 if they fit."""
        free = self.free_bytes
        return None if free is None else sizes.needed(first, end, self.device) - free


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBudget:
    """Memory of a stage's ranks, which have equal shares of its layers.

    Attributes:
        ranks: the distinct budgets of its ranks, in rank order.
    """

    ranks: tuple[RankBudget, ...]

    @property
    def device(self) -> Device:
        """CPU if any rank of the stage computes on a CPU."""
        return Device.CPU if any(rank.device is Device.CPU for rank in self.ranks) else Device.GPU

    @property
    def is_known(self) -> bool:
        """Whether the memory of any rank is known: a rank of unknown memory does not bound the stage."""
        return any(rank.budget is not None for rank in self.ranks)

    def tightest(self, sizes: Sizes, first: int, end: int) -> RankBudget:
        """Returns the rank with the least memory left by layers first..end-1; unknown memory sorts last."""

        def left(rank: RankBudget) -> tuple[bool, int]:
            found = rank.left_bytes(sizes, first, end)
            return found is None, found or 0

        return min(self.ranks, key=left)

    def neediest(self, sizes: Sizes, first: int, end: int) -> RankBudget:
        """Returns the rank that lacks most memory for layers first..end-1; unknown memory sorts last."""

        def missing(rank: RankBudget) -> tuple[bool, int]:
            found = rank.missing_bytes(sizes, first, end)
            return found is not None, found or 0

        return max(self.ranks, key=missing)

    def left_bytes(self, sizes: Sizes, first: int, end: int) -> int | None:
        """Returns the bytes that layers first..end-1 leave the tightest rank for KV cache, or None."""
        return self.tightest(sizes, first, end).left_bytes(sizes, first, end)

    def missing_bytes(self, sizes: Sizes, first: int, end: int) -> int | None:
        """Returns the bytes that the neediest rank lacks for these layers, or None; <= 0 if they fit."""
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
        if device is Device.GPU and stage == 0:  # n-grams belong to the first layers
            _check_host_tables(seat, sizes.profile.host_table_bytes // sizes.tensor, inventory)
        bounds = memory is not None and floor > memory * (1 - GPU_USABLE)
        return RankBudget(
            role=seat.placed.role.name,
            device=device,
            budget=rank_budget(seat, inventory, floor),
            tables=sizes.tables(stage, len(stages), device),
            beside=floor if bounds else 0,
        )

    return tuple(
        StageBudget(ranks=tuple(dict.fromkeys(of_rank(seat, index) for seat in seats)))
        for index, seats in enumerate(stages)
    )


def _gpus_by_nccl(seats: Sequence[Seat]) -> int:
    """Returns the GPUs of a stage that use NCCL; a stage with CPU ranks uses the bridge instead."""
    return len(seats) if all(seat.placed.device is Device.GPU for seat in seats) else 1
