"""Advice on a plan: the pace of mixed stages, and whether CPU ranks are needed at all. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from heteroinfer_contract.model_profile import ModelProfile
from heteroinfer_contract.plan import Device, Plan, eager_reason
from heteroinfer_contract.printable import format_bytes
from heteroinfer_operator.errors import PlanError
from heteroinfer_operator.planning.gpu_floor import GpuFloor, gpu_memory, usable_gpu_memory
from heteroinfer_operator.planning.inventory import Inventory
from heteroinfer_operator.planning.layers import split_by_memory
from heteroinfer_operator.planning.memory import Sizes, stage_budgets
from heteroinfer_operator.planning.topology import Seat, Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """Notes for the user on one plan.

    Attributes:
        notes: all notes, one line each.
        hybrid_not_needed: the note that the GPUs need no CPU ranks, which is also one of `notes`; "" without
            this note.
    """

    notes: tuple[str, ...] = ()
    hybrid_not_needed: str = ""


def advise(topology: Topology, plan: Plan, profile: ModelProfile, inventory: Inventory) -> Advice:
    """Returns notes on a plan with GPU and CPU ranks.

    The notes report unknown GPU memory, GPUs that wait for CPUs in every layer, and CPU ranks that are not
    needed.
    """
    if not topology.is_mixed:
        return Advice()
    notes = _waiting_notes(plan) if topology.has_mixed_stage else ()
    gpu_seats = [seat for stage in topology.stages for seat in stage if seat.placed.device is Device.GPU]
    # The floor of a GPU that is in both the first and the last stage, which is the largest. NCCL's buffers
    # are left out (gpus=1).
    floor = GpuFloor.for_settings(profile, plan.engine, topology.tensor).total(
        embeds=True, samples=True, gpus=1
    )
    usable_bytes = _usable_gpu_bytes(gpu_seats, inventory, floor)
    if usable_bytes is None:
        effect = (
            "the plan cannot show whether CPUs are needed"
            if topology.has_mixed_stage
            else "the plan divides the layers without regard to it"
        )
        return Advice(notes=(*notes, f"the GPUs' memory is unknown, so {effect}. Set roles[].deviceMemory"))
    if not _gpus_fit_all(topology, usable_bytes, plan, profile, inventory):
        return Advice(notes=notes)
    note = _not_needed_note(len(gpu_seats), usable_bytes, plan, profile)
    return Advice(notes=(*notes, note), hybrid_not_needed=note)


def _waiting_notes(plan: Plan) -> tuple[str, ...]:
    """Returns the notes on a plan in which GPUs wait for CPUs in every layer."""
    stages = [plan.stage(stage) for stage in range(plan.pipeline_parallel_size)]
    all_ranks_s = sum(max(rank.predicted_step_s for rank in ranks) for ranks in stages)
    gpus_s = sum(
        max((rank.predicted_step_s for rank in ranks if rank.device is Device.GPU), default=0.0)
        for ranks in stages
    )
    waiting = (
        f"every layer waits for its CPU ranks: a decode step reads weights for about "
        f"{all_ranks_s * 1e3:.1f} ms on CPUs and {gpus_s * 1e3:.1f} ms on GPUs. If this is too slow, use "
        "mode Pipeline, which gives CPUs only the layers that the GPUs cannot hold, and keeps CUDA graphs"
    )
    return (str(eager_reason(plan)), waiting)


def _gpus_fit_all(
    topology: Topology, usable_bytes: int, plan: Plan, profile: ModelProfile, inventory: Inventory
) -> bool:
    """Reports whether GPUs without CPU ranks can hold the model and the KV cache of one full-length request.

    Args:
        usable_bytes: bytes of all GPUs together for weights and KV cache.
    """
    if topology.has_mixed_stage:  # without CPU ranks, the GPUs would split each layer among themselves
        return _one_gpu_bytes(plan, profile) <= usable_bytes
    gpu_stages = tuple(stage for stage in topology.stages if stage[0].placed.device is Device.GPU)
    sizes = Sizes.for_settings(profile, plan.engine, topology.tensor, batches=len(gpu_stages))
    try:
        split_by_memory(stage_budgets(gpu_stages, sizes, inventory), sizes)
    except PlanError:
        return False
    return True


def _one_gpu_bytes(plan: Plan, profile: ModelProfile) -> int:
    """Returns the bytes of the model and of the KV cache for one full-length request on a single GPU."""
    one_gpu_sizes = Sizes.for_settings(profile, plan.engine, tensor=1, batches=1)
    weights = one_gpu_sizes.layer_weight_bytes(0, profile.num_layers) + one_gpu_sizes.table_bytes(
        0, 1, Device.GPU
    )
    return weights + one_gpu_sizes.cache_bytes(0, profile.num_layers)


def _usable_gpu_bytes(seats: Sequence[Seat], inventory: Inventory, floor: int) -> int | None:
    """Returns the sum of all GPUs' bytes for weights and KV cache; None if one GPU's memory is unknown."""
    memory_of_gpus = [gpu_memory(seat.placed.role, inventory) for seat in seats]
    if None in memory_of_gpus:
        return None
    return sum(usable_gpu_memory(memory, floor) for memory in memory_of_gpus if memory is not None)


def _not_needed_note(num_gpus: int, usable_bytes: int, plan: Plan, profile: ModelProfile) -> str:
    """Returns the note that the GPUs need no CPU ranks, with the sizes that prove this."""
    subject = "the GPU has" if num_gpus == 1 else f"the {num_gpus} GPUs have"
    return (
        f"CPU ranks are not needed: the model takes {format_bytes(profile.total_bytes)}, or "
        f"{format_bytes(_one_gpu_bytes(plan, profile))} with KV cache for one request of "
        f"{plan.engine.max_model_len:,} tokens, and {subject} {format_bytes(usable_bytes)} for both. CPU "
        "ranks add capacity, not speed. Remove the CPU roles"
    )
