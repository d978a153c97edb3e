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
    """Advice on one plan.

    Attributes:
        hybrid_not_needed: the note that CPU ranks could be left out, or "".
    """

    notes: tuple[str, ...] = ()
    hybrid_not_needed: str = ""


def advise(topology: Topology, plan: Plan, profile: ModelProfile, inventory: Inventory) -> Advice:
    """Returns notes on a plan."""
    if not topology.is_mixed:
        return Advice()
    notes = _pace(plan) if topology.has_mixed_stage else ()
    seats = [s for stage in topology.stages for s in stage if s.placed.device is Device.GPU]
    floor = GpuFloor.of(profile, plan.engine, topology.tensor).total(embeds=True, samples=True, gpus=1)
    usable = _usable_bytes(seats, inventory, floor)
    if usable is None:
        use = "find out whether CPUs are needed" if topology.has_mixed_stage else "plan layers by memory"
        return Advice(notes=(*notes, f"the GPUs' memory is unknown. Set deviceMemory to {use}"))
    if not _gpus_hold_all(topology, usable, plan, profile, inventory):
        return Advice(notes=notes)
    words = _not_needed(len(seats), usable, plan, profile)
    return Advice(notes=(*notes, words), hybrid_not_needed=words)


def _pace(plan: Plan) -> tuple[str, ...]:
    """Returns notes on a plan with a mixed stage."""
    slow_s, fast_s = (
        sum(
            max((r.predicted_step_s for r in plan.stage(stage) if r.device in devices), default=0.0)
            for stage in range(plan.pipeline_parallel_size)
        )
        for devices in ((Device.CPU, Device.GPU), (Device.GPU,))
    )
    pace = (
        f"every layer waits for its CPU ranks: a decode step reads weights for about {slow_s * 1e3:.1f} ms "
        f"on CPUs and {fast_s * 1e3:.1f} ms on GPUs. Mode Pipeline gives CPUs only the layers that the GPUs "
        "cannot hold, and keeps CUDA graphs"
    )
    return (str(eager_reason(plan)), pace)


def _gpus_hold_all(
    topology: Topology, usable: int, plan: Plan, profile: ModelProfile, inventory: Inventory
) -> bool:
    """Returns whether the GPUs alone could hold the model and the KV cache of one full-length request."""
    if topology.has_mixed_stage:
        return _whole_bytes(plan, profile) <= usable
    gpu_stages = tuple(s for s in topology.stages if s[0].placed.device is Device.GPU)
    sizes = Sizes.of(profile, plan.engine, topology.tensor, batches=len(gpu_stages))
    try:
        split_by_memory(stage_budgets(gpu_stages, sizes, inventory), sizes)
    except PlanError:
        return False
    return True


def _whole_bytes(plan: Plan, profile: ModelProfile) -> int:
    """Returns the bytes of the model and of one full-length request on one GPU."""
    whole = Sizes.of(profile, plan.engine, 1, batches=1)
    weights = whole.layers(0, profile.num_layers) + whole.tables(0, 1, Device.GPU)
    return weights + whole.cache(0, profile.num_layers)


def _usable_bytes(seats: Sequence[Seat], inventory: Inventory, floor: int) -> int | None:
    """Returns the bytes of all GPUs for weights and KV cache, or None if one GPU's memory is unknown."""
    known = [gpu_memory(seat.placed.role, inventory) for seat in seats]
    if None in known:
        return None
    return sum(usable_gpu_memory(memory, floor) for memory in known if memory is not None)


def _not_needed(count: int, usable: int, plan: Plan, profile: ModelProfile) -> str:
    gpus = "the GPU has" if count == 1 else f"the {count} GPUs have"
    return (
        f"hybrid not needed: the model takes {format_bytes(profile.total_bytes)}, "
        f"{format_bytes(_whole_bytes(plan, profile))} with KV cache for one request of "
        f"{plan.engine.max_model_len:,} tokens, and {gpus} {format_bytes(usable)} for it. CPU ranks add "
        "capacity, not speed. Remove them"
    )
