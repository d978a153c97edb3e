"""The memory of each rank, and the bytes that its weights and KV cache need. Pure."""

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
from heteroinfer_operator.planning.expert_ring import ExpertRing
from heteroinfer_operator.planning.gpu_floor import (
    BESIDE_ON_GPUS,
    BESIDE_WITHOUT_GRAPHS,
    GPU_USABLE,
    GpuFloor,
    gpu_memory,
    usable_gpu_memory,
)
from heteroinfer_operator.planning.inventory import Inventory
from heteroinfer_operator.planning.kv_cache import KvCache, build_kv_cache
from heteroinfer_operator.planning.packing import growth_bytes, packing_copy_bytes
from heteroinfer_operator.planning.topology import Seat, Topology
from heteroinfer_operator.quantity import parse_bytes
from heteroinfer_operator.vllm_support.architectures import TABLES_ON_EVERY_STAGE
from heteroinfer_operator.vllm_support.engine_options import ELEMENT_BYTES, EngineOptions

RANK_OVERHEAD_BYTES: Final = 2**30
"""Host memory that a CPU rank needs besides weights and KV cache: Python, torch, vLLM and activations."""
PACKED_IN_OVERHEAD_BYTES: Final = 3 * 2**27
"""Part of RANK_OVERHEAD_BYTES that packing may use: while ranks packed, they used 0.56 to 0.58 GiB of the
overhead for other purposes (2026-11-25)."""
LEADER_OVERHEAD_BYTES: Final = 2**30
"""Host memory of vLLM's API server and the scheduler, in the pod of rank 0."""
CPU_TABLE_COPIES: Final = 2
"""Number of copies of embedding and head on a CPU: one packed, one unpacked
(vllm/.../vocab_parallel_embedding.py:66-71@v0.32.0)."""


def rank_budget(seat: Seat, inventory: Inventory, gpu_floor: int, *, has_graphs: bool = True) -> int | None:
    """Returns a rank's bytes for weights and KV cache, or None if its memory is unknown.

    Args:
        gpu_floor: bytes that a GPU needs besides weights and KV cache.
        has_graphs: whether these bytes include memory for CUDA graphs.

    Raises:
        PlanError: the processes need more memory even without a model, or the limit has the unit m.
    """
    _check_memory_unit(seat.placed.role)
    if seat.placed.device is Device.GPU:
        return _gpu_rank_budget(seat.placed.role, inventory, gpu_floor, has_graphs=has_graphs)
    return _cpu_rank_budget(seat, inventory)


def _gpu_rank_budget(role: RoleSpec, inventory: Inventory, gpu_floor: int, *, has_graphs: bool) -> int | None:
    """Returns the budget of a rank on a GPU. `rank_budget` has the same Args and Raises."""
    memory_bytes = gpu_memory(role, inventory)
    if memory_bytes is None:
        return None
    if memory_bytes <= gpu_floor:
        or_eager = ", or set engine.eager: Always, which needs no CUDA graphs" if has_graphs else ""
        raise PlanError(
            f"role {role.name}: a GPU must have more memory than the {format_bytes(gpu_floor)} that "
            f"{BESIDE_ON_GPUS if has_graphs else BESIDE_WITHOUT_GRAPHS} need (got "
            f"{format_bytes(memory_bytes)}). Use a larger device{or_eager}",
            reason=PlanReason.INSUFFICIENT_MEMORY,
        )
    return usable_gpu_memory(memory_bytes, gpu_floor)


def _cpu_rank_budget(seat: Seat, inventory: Inventory) -> int | None:
    """Returns the budget of a rank on a CPU: an equal part of the pod's memory, without overhead.

    Returns None if the pod's memory is unknown. Raises PlanError if the overhead takes the whole memory.
    """
    role = seat.placed.role
    pod_bytes = pod_memory(role, inventory)
    if pod_bytes is None:
        return None
    has_leader = seat.pod == 0
    overhead_bytes = role.ranks_per_pod * RANK_OVERHEAD_BYTES + (LEADER_OVERHEAD_BYTES if has_leader else 0)
    if pod_bytes <= overhead_bytes:
        processes = "1 rank" if role.ranks_per_pod == 1 else f"{role.ranks_per_pod} ranks"
        if has_leader:
            processes += " and vLLM's API server"
        raise PlanError(
            f"role {role.name}: a pod must have more memory than the {format_bytes(overhead_bytes)} that "
            f"{processes} take without a model (got {format_bytes(pod_bytes)}). Raise "
            "resources.limits.memory",
            reason=PlanReason.INSUFFICIENT_MEMORY,
        )
    return (pod_bytes - overhead_bytes) // role.ranks_per_pod


def _check_host_tables(seat: Seat, table_bytes: int, inventory: Inventory) -> None:
    """Raises PlanError if the host of a GPU rank lacks memory for tables that vLLM keeps there.

    The rank is in the first stage, so the memory of the leader's processes counts, too.
    """
    role, pod_bytes = seat.placed.role, pod_memory(seat.placed.role, inventory)
    needed_bytes = role.ranks_per_pod * (table_bytes + RANK_OVERHEAD_BYTES) + LEADER_OVERHEAD_BYTES
    if table_bytes and pod_bytes is not None and pod_bytes < needed_bytes:
        raise PlanError(
            f"role {role.name}: {format_bytes(needed_bytes - pod_bytes)} of host memory is missing. vLLM "
            f"keeps the model's tables of n-grams ({format_bytes(table_bytes)}) in the memory of the GPU's "
            f"host, and a pod has {format_bytes(pod_bytes)}. Raise the role's resources.limits.memory",
            reason=PlanReason.INSUFFICIENT_MEMORY,
        )


def describe_host_tables(profile: ModelProfile, topology: Topology) -> tuple[str, ...]:
    """Returns a note about tables that stay in the host's memory; empty if the model has none."""
    if not profile.host_table_bytes:
        return ()
    role = topology.stages[0][0].placed.role.name
    size = format_bytes(profile.host_table_bytes)
    return (
        f"role {role}: vLLM keeps the model's tables of n-grams ({size}) in the memory of the GPU's host",
    )


def _check_memory_unit(role: RoleSpec) -> None:
    """Raises PlanError for a memory limit such as 1500m, which means 1.5 bytes to Kubernetes."""
    limits = role.resources.limits if role.resources else None
    limit = (limits or {}).get("memory", "")
    if limit.endswith("m"):
        raise PlanError(
            f"role {role.name}: resources.limits.memory must not have the unit m, which means thousandths of "
            f"a byte (got {limit}). Write {limit[:-1]}Mi",
            reason=PlanReason.INSUFFICIENT_MEMORY,
        )


def pod_memory(role: RoleSpec, inventory: Inventory) -> int | None:
    """Returns the memory of a pod in bytes: limit, request or measured memory; None if unknown."""
    for amounts in (role.resources.limits, role.resources.requests) if role.resources else ():
        if amounts and "memory" in amounts:
            return parse_bytes(amounts["memory"])
    return inventory.host_memory_bytes.get(role.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of one rank's share of a model at the group's settings.

    Attributes:
        tensor: number of ranks in a stage.
        scale: bytes of the engine's element type per byte of the checkpoint, for unquantized weights.
        layer_bytes: stored weights of each layer on one rank, in bytes; a GPU holds them in this form.
        packing_growth_bytes: bytes by which each layer is larger in a CPU's packed form; may be negative.
        packing_bytes: additional bytes while a CPU packs each layer.
        encoder_bytes: encoder on each rank, in bytes; 0 if the group does not serve it.
        gpu_floor: memory that a GPU needs besides weights and KV cache.
        kv: KV cache of one rank.
        ring: memory of the GPU for experts of feed-forward ranks, or None.
    """

    profile: ModelProfile
    tensor: int
    scale: Fraction
    layer_bytes: tuple[int, ...]
    packing_growth_bytes: tuple[int, ...]
    packing_bytes: tuple[int, ...]
    encoder_bytes: int
    gpu_floor: GpuFloor
    kv: KvCache
    ring: ExpertRing | None = None

    @classmethod
    def for_settings(
        cls,
        profile: ModelProfile,
        engine: EngineSettings,
        tensor: int,
        *,
        batches: int,
        ring: ExpertRing | None = None,
    ) -> "Sizes":
        """Returns the sizes of one rank for these settings.

        Args:
            tensor: number of ranks in a stage.
            batches: batches that may be scheduled at once.
            ring: memory of the GPU for experts of feed-forward ranks, or None.
        """
        element_bytes = ELEMENT_BYTES[engine.dtype]
        scale = Fraction(element_bytes, ELEMENT_BYTES.get(profile.dtype, element_bytes))
        text_only = EngineOptions.of(engine.extra_args).is_text_only
        unquantized_ratio = scale * online_quantization_ratio(engine.extra_args, element_bytes)
        layer_bytes = [
            unquantized_bytes * unquantized_ratio + (size - unquantized_bytes)
            for size, unquantized_bytes in zip(
                profile.layer_bytes, unquantized_layer_bytes(profile), strict=True
            )
        ]
        packing_copies = (packing_copy_bytes(profile, kind, scale) / tensor for kind in profile.layers)
        return cls(
            profile=profile,
            tensor=tensor,
            scale=scale,
            layer_bytes=tuple(ceil(size / tensor) for size in layer_bytes),
            packing_growth_bytes=tuple(
                ceil(growth_bytes(profile, kind, tensor, scale, element_bytes) / tensor)
                for kind in profile.layers
            ),
            packing_bytes=tuple(
                max(ceil(packing_copy) - PACKED_IN_OVERHEAD_BYTES, 0) for packing_copy in packing_copies
            ),
            encoder_bytes=0 if text_only else int(profile.encoder_bytes * scale),
            gpu_floor=GpuFloor.for_settings(profile, engine, tensor, ring),
            kv=build_kv_cache(profile, engine, ranks_of_stage=tensor, batches_at_once=batches),
            ring=ring,
        )

    def layer_weight_bytes(self, first: int, end: int, device: Device = Device.GPU) -> int:
        """Returns the bytes of the weights of layers first..end-1 on one rank, as its device holds them.

        A CPU packs the weights, which changes their size.
        """
        growth = sum(self.packing_growth_bytes[first:end]) if device is Device.CPU else 0
        return sum(self.layer_bytes[first:end]) + growth

    def cache_bytes(self, first: int, end: int) -> int:
        """Returns the bytes of KV cache for one full-length request in layers first..end-1 on one rank."""
        return self.kv.block_bytes(first, end) * self.kv.min_blocks

    def packing_peak_bytes(self, first: int, end: int, device: Device = Device.GPU) -> int:
        """Returns the additional bytes while the largest of layers first..end-1 is packed; 0 on GPUs.

        vLLM packs layers one by one after it has loaded all, and before it allocates the KV cache. Source:
        vllm/model_executor/model_loader/base_loader.py::BaseModelLoader@v0.32.0.
        """
        return max(self.packing_bytes[first:end], default=0) if device is Device.CPU else 0

    def loading_bytes(self, first: int, end: int, device: Device = Device.GPU) -> int:
        """Returns the peak bytes of layers first..end-1 on one rank before it has a KV cache.

        The rank packs its layers one by one. If packing makes layers smaller, the peak is at the first layer,
        while all others are still in stored form. Otherwise the peak is at the last layer, when all others
        are packed.
        """
        stored_bytes = self.layer_weight_bytes(first, end)
        packed_bytes = self.layer_weight_bytes(first, end, device)
        return max(stored_bytes, packed_bytes) + self.packing_peak_bytes(first, end, device)

    def serving_bytes(self, first: int, end: int, device: Device = Device.GPU) -> int:
        """Returns the bytes of layers first..end-1 on one rank, with KV cache for one full-length request."""
        return self.layer_weight_bytes(first, end, device) + self.cache_bytes(first, end)

    def needed_bytes(self, first: int, end: int, device: Device = Device.GPU) -> int:
        """Returns the bytes that one rank needs both to load and to serve layers first..end-1."""
        return max(self.serving_bytes(first, end, device), self.loading_bytes(first, end, device))

    def loading_exceeds_serving(self, first: int, end: int, device: Device) -> bool:
        """Reports whether layers first..end-1 need more memory while they load than while they serve."""
        return self.loading_bytes(first, end, device) > self.serving_bytes(first, end, device)

    def table_bytes(self, stage: int, num_stages: int, device: Device) -> int:
        """Returns the bytes on one rank of a stage's parts besides layers: embedding, head and encoder.

        The first stage has the embedding, the last stage has the head. A tied head is a second copy of the
        embedding, unless both are in one stage. Every rank has the whole encoder
        (vllm/model_executor/models@v0.32.0; tests/shapes compares these sizes with vLLM's).
        """
        profile = self.profile
        is_first, is_last = stage == 0, stage == num_stages - 1
        on_all_stages = profile.architecture in TABLES_ON_EVERY_STAGE
        divided_bytes = profile.layer_table_bytes  # the ranks of a stage divide these tables
        if is_first or on_all_stages or (is_last and profile.tied_head):
            divided_bytes += profile.embedding_bytes
        if is_last or on_all_stages:
            divided_bytes += profile.head_bytes
        copies = CPU_TABLE_COPIES if device is Device.CPU else 1
        other_bytes = int(profile.other_bytes * self.scale) if is_last else 0
        return self.rank_share_bytes(divided_bytes) * copies + other_bytes + self.encoder_bytes

    def table_names(self, stage: int, num_stages: int) -> tuple[str, ...]:
        """Returns the names of the parts that a stage has besides layers and encoder, for messages."""
        is_first, is_last = stage == 0, stage == num_stages - 1
        on_all_stages = self.profile.architecture in TABLES_ON_EVERY_STAGE
        is_tied = self.profile.tied_head
        names = {
            "embedding": is_first or on_all_stages,
            "embedding as the head": is_last and is_tied and not (is_first or on_all_stages),
            "head": (is_last or on_all_stages) and not is_tied,
            "embeddings of each layer": self.profile.layer_table_bytes > 0,
        }
        return tuple(name for name, is_present in names.items() if is_present)

    @property
    def head_bytes(self) -> int:
        """Bytes of the head that one rank of the last stage reads in a step."""
        profile = self.profile
        return self.rank_share_bytes(profile.embedding_bytes if profile.tied_head else profile.head_bytes)

    def rank_share_bytes(self, size: int) -> int:
        """Returns one rank's share of unquantized weights, in bytes of the engine's element type.

        Args:
            size: bytes of these weights in the checkpoint.
        """
        return ceil(size * self.scale / self.tensor)


def unquantized_layer_bytes(profile: ModelProfile) -> tuple[int, ...]:
    """Returns the bytes of each layer's weights that the checkpoint stores unquantized."""
    if not profile.quantization:
        return profile.layer_bytes
    if not profile.kinds:  # profiles of version 0.1.0 lack them; all weights count as quantized
        return (0,) * profile.num_layers
    # `quantized_bytes` does not include the routed experts, so they are subtracted separately.
    return tuple(
        size - kind.quantized_bytes - (kind.routed_bytes if kind.experts_quantized else 0)
        for size, kind in zip(profile.layer_bytes, profile.layers, strict=True)
    )


def online_quantization_ratio(args: Sequence[str], element_bytes: int) -> Fraction:
    """Returns the size of unquantized linear layers under `--quantization`, relative to their size without.

    vLLM quantizes layers at load if the checkpoint is not quantized
    (vllm/config/quantization.py::OnlineQuantizationConfigArgs@v0.32.0).
    """
    method = EngineOptions.of(args).quantization
    eight_bits = method.startswith(("fp8", "int8", "mxfp8"))
    return Fraction(1, element_bytes) if eight_bits else Fraction(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBudget:
    """Memory of one rank.

    Attributes:
        role: name of the rank's role.
        budget: bytes for weights, KV cache and ring, or None if unknown.
        table_bytes: part of the budget for embedding, head and encoder.
        reserved_bytes: bytes that a GPU needs besides weights and KV cache, if they limit its budget;
            otherwise 0.
        ring_bytes: part of the budget for experts of feed-forward ranks.
    """

    role: str
    device: Device
    budget: int | None
    table_bytes: int
    reserved_bytes: int = 0
    ring_bytes: int = 0

    @property
    def free_bytes(self) -> int | None:
        """Bytes for layers and their KV cache, or None if unknown; may be negative."""
        return None if self.budget is None else self.budget - self.table_bytes - self.ring_bytes

    def left_bytes(self, sizes: Sizes, first: int, end: int) -> int | None:
        """Returns the bytes for KV cache after layers first..end-1, or None if unknown; may be negative."""
        free = self.free_bytes
        return None if free is None else free - sizes.layer_weight_bytes(first, end, self.device)

    def missing_bytes(self, sizes: Sizes, first: int, end: int) -> int | None:
        """Returns the bytes that the rank lacks for layers first..end-1, or None if unknown.

        The value is <= 0 if the layers fit.
        """
        free = self.free_bytes
        return None if free is None else sizes.needed_bytes(first, end, self.device) - free


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
        """Returns the rank with the fewest bytes left for KV cache after layers first..end-1.

        A rank of unknown memory is returned only if the memory of all ranks is unknown.
        """

        def left(rank: RankBudget) -> tuple[bool, int]:
            left_bytes = rank.left_bytes(sizes, first, end)
            return left_bytes is None, left_bytes or 0

        return min(self.ranks, key=left)

    def neediest(self, sizes: Sizes, first: int, end: int) -> RankBudget:
        """Returns the rank that lacks the most bytes for layers first..end-1.

        A rank of unknown memory is returned only if the memory of all ranks is unknown.
        """

        def missing(rank: RankBudget) -> tuple[bool, int]:
            missing_bytes = rank.missing_bytes(sizes, first, end)
            return missing_bytes is not None, missing_bytes or 0

        return max(self.ranks, key=missing)

    def left_bytes(self, sizes: Sizes, first: int, end: int) -> int | None:
        """Returns the bytes for KV cache on the tightest rank after layers first..end-1.

        Returns None if the memory of all ranks is unknown.
        """
        return self.tightest(sizes, first, end).left_bytes(sizes, first, end)

    def missing_bytes(self, sizes: Sizes, first: int, end: int) -> int | None:
        """Returns the bytes that the neediest rank lacks for layers first..end-1; <= 0 if the layers fit.

        Returns None if the memory of all ranks is unknown.
        """
        return self.neediest(sizes, first, end).missing_bytes(sizes, first, end)


def stage_budgets(
    stages: Sequence[Sequence[Seat]], sizes: Sizes, inventory: Inventory
) -> tuple[StageBudget, ...]:
    """Returns the budget of each stage.

    Raises:
        PlanError: a GPU or a pod lacks memory (`rank_budget`, `_check_host_tables`).
    """

    def budget_of_seat(seat: Seat, stage: int) -> RankBudget:
        """Returns the budget of one rank."""
        device = seat.placed.device
        floor = sizes.gpu_floor.total(
            embeds=stage == 0, samples=stage == len(stages) - 1, gpus=_num_nccl_gpus(stages[stage])
        )
        memory = gpu_memory(seat.placed.role, inventory) if device is Device.GPU else None
        if device is Device.GPU and stage == 0:  # only the first layers use tables of n-grams
            _check_host_tables(seat, sizes.profile.host_table_bytes // sizes.tensor, inventory)
        # GPU_USABLE leaves a tenth of the memory free. A floor counts only if it is larger than this tenth.
        floor_bounds_budget = memory is not None and floor > memory * (1 - GPU_USABLE)
        return RankBudget(
            role=seat.placed.role.name,
            device=device,
            budget=rank_budget(seat, inventory, floor, has_graphs=sizes.gpu_floor.graphs > 0),
            table_bytes=sizes.table_bytes(stage, len(stages), device),
            reserved_bytes=floor if floor_bounds_budget else 0,
            ring_bytes=0 if sizes.ring is None else sizes.ring.total_bytes,
        )

    return tuple(
        StageBudget(ranks=tuple(dict.fromkeys(budget_of_seat(seat, index) for seat in seats)))
        for index, seats in enumerate(stages)
    )


def _num_nccl_gpus(seats: Sequence[Seat]) -> int:
    """Returns the number of GPUs of a stage that communicate through NCCL.

    Returns 1 for a stage with a CPU rank: all its ranks communicate through the bridge.
    """
    return len(seats) if all(seat.placed.device is Device.GPU for seat in seats) else 1
