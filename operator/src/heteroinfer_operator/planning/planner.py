"""Spec, model profile and inventory to a plan, or to the reason why there is none. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType
from typing import Final

from heteroinfer_contract.model_profile import ModelProfile
from heteroinfer_contract.plan import Device, EngineSettings, Plan, RankAssignment, eager_reason
from heteroinfer_operator.api import HeteroInferenceSpec
from heteroinfer_operator.errors import PlanError
from heteroinfer_operator.planning.inventory import Inventory
from heteroinfer_operator.planning.layers import check_explicit, explicit_layers, split_by_memory
from heteroinfer_operator.planning.memory import Sizes, StageBudget, gib, rank_budget, stage_budgets
from heteroinfer_operator.planning.settings import BLOCK_SIZE, engine_settings
from heteroinfer_operator.planning.topology import Seat, Topology, lay_out

READ_BYTES_PER_S: Final = MappingProxyType({Device.CPU: 60e9, Device.GPU: 3500e9})
"""Weights that a decode step reads a second.

CPU: 57-60 GB/s by 14 threads of a 16-core Xeon host; GPU: 13.3 GB in 3.99 ms on an H200
with CUDA graphs (both vLLM 0.32.0, bf16, 2026-11-20).
"""
_UNKNOWN_MEMORY_SEQUENCES: Final = 4
"""KV room, in longest sequences, where some rank's memory is unknown."""
_VOCAB_PADDING: Final = 64
"""vLLM pads the vocabulary to this before it splits it (vocab_parallel_embedding.py@v0.32.0)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A plan and what the user should know about it.

    Attributes:
        plan: the plan.
        notes: one line each.
        limiting_rank: the rank whose memory has room for the fewest KV blocks, as predicted; None
            where the memory of some rank is unknown.
    """

    plan: Plan
    notes: tuple[str, ...] = ()
    limiting_rank: int | None = None


def make_plan(
    spec: HeteroInferenceSpec,
    profile: ModelProfile,
    inventory: Inventory,
    *,
    served_name: str,
    model_path: str,
) -> Planned:
    """Returns the plan of a group. Equal arguments give an equal plan.

    Args:
        spec: what the user asks for.
        profile: sizes of the model.
        inventory: what there is to plan with.
        served_name: the model's name in the OpenAI API.
        model_path: where the ranks find the model.

    Raises:
        Shortage: GPUs are missing, and the spec says to wait for them.
        PlanError: there is no plan; the message says what is missing and by how much.
    """
    topology = lay_out(spec, inventory)
    _check_tensor(topology.tensor, profile)
    engine = engine_settings(
        spec,
        profile,
        has_cpu=topology.has_cpu,
        has_mixed_stage=topology.has_mixed_stage,
        served_name=served_name,
        model_path=model_path,
    )
    sizes = Sizes.of(profile, engine, topology.tensor)
    budgets = stage_budgets(topology.stages, sizes, inventory)
    min_tokens = _min_tokens(engine)
    layers = explicit_layers(spec, topology)
    if layers is None:
        layers = split_by_memory(budgets, sizes, min_tokens)
    else:
        check_explicit(layers, budgets, sizes, min_tokens)
    plan = Plan(
        mode=spec.parallelism.mode,
        tensor_parallel_size=topology.tensor,
        pipeline_parallel_size=len(topology.stages),
        ranks=_assign(topology, layers, budgets, sizes, engine),
        engine=engine,
    )
    advice = _advice(topology, sizes, inventory, min_tokens)
    if topology.has_mixed_stage:
        advice = (*_tensor_advice(plan), *_fits_gpus_alone(topology, profile, engine, inventory, min_tokens))
    return Planned(
        plan=plan,
        notes=(*topology.notes, *advice),
        limiting_rank=_limiting_rank(topology, layers, budgets, sizes),
    )


def _check_tensor(tensor: int, profile: ModelProfile) -> None:
    heads, kv_heads = profile.num_attention_heads, profile.num_kv_heads
    vocab = -(-profile.vocab_size // _VOCAB_PADDING) * _VOCAB_PADDING
    for what, bad in (
        (f"{heads} attention heads", heads % tensor != 0),
        (f"{kv_heads} key/value heads", kv_heads % tensor != 0 and tensor % kv_heads != 0),
        (f"a vocabulary of {vocab} rows with padding", vocab % tensor != 0),
    ):
        if bad:
            raise PlanError(
                f"parallelism.tensor: got {tensor} ranks a stage, the model has {what}, "
                "which cannot be split by it; set a size that divides it",
                reason="UnsupportedParallelism",
            )


def _min_tokens(engine: EngineSettings) -> int:
    # One longest sequence, and the null block that vLLM keeps for itself.
    return (-(-engine.max_model_len // engine.block_size) + 1) * engine.block_size


def _assign(
    topology: Topology,
    layers: Sequence[int],
    budgets: Sequence[StageBudget],
    sizes: Sizes,
    engine: EngineSettings,
) -> tuple[RankAssignment, ...]:
    tokens = _kv_tokens(layers, budgets, sizes, engine)
    seats = [(stage, i, seat) for stage, seats in enumerate(topology.stages) for i, seat in enumerate(seats)]
    ends = tuple(accumulate(layers))
    ranks: list[RankAssignment] = []
    for rank, (stage, tensor_rank, seat) in enumerate(seats):
        first, end = ends[stage] - layers[stage], ends[stage]
        read = sizes.read_per_step(first, end, last=end == ends[-1])
        ranks.append(
            RankAssignment(
                rank=rank,
                local_rank=seat.local_rank,
                pod=seat.pod,
                role=seat.placed.role.name,
                device=seat.placed.device,
                stage=stage,
                tensor_rank=tensor_rank,
                first_layer=first,
                end_layer=end,
                kv_cache_bytes=tokens * (end - first) * sizes.kv_bytes,
                weight_bytes=sizes.layers(first, end) + sizes.tables(stage, len(layers), seat.placed.device),
                predicted_step_s=read
                * _sharing(seat, topology.stages[stage])
                / READ_BYTES_PER_S[seat.placed.device],
            )
        )
    return tuple(ranks)


def _sharing(seat: Seat, stage: Sequence[Seat]) -> int:
    """Returns how many ranks compute at the same time on the same memory: those of a stage in one CPU pod."""
    if seat.placed.device is Device.GPU:
        return 1
    return sum(1 for other in stage if other.pod == seat.pod)


def _kv_tokens(
    layers: Sequence[int], budgets: Sequence[StageBudget], sizes: Sizes, engine: EngineSettings
) -> int:
    """Returns the tokens of KV cache, whole blocks, that every rank gets.

    vLLM takes the least number of blocks over all ranks, so more on one of them is of no
    use; and no more than max_num_seqs sequences of full length can ever be used.
    """
    if any(stage.room is None for stage in budgets):
        useful = _UNKNOWN_MEMORY_SEQUENCES * engine.max_model_len
    else:
        useful = engine.max_num_seqs * engine.max_model_len + BLOCK_SIZE
    rooms = [room for room in _token_rooms(layers, budgets, sizes) if room is not None]
    return max(min([*rooms, useful]), _min_tokens(engine)) // BLOCK_SIZE * BLOCK_SIZE


def _token_rooms(layers: Sequence[int], budgets: Sequence[StageBudget], sizes: Sizes) -> list[int | None]:
    """Returns the tokens that each stage's memory has room for; None for a stage of unknown memory."""
    return [
        None
        if stage.room is None
        else (stage.room - sizes.layers(end - count, end)) // (count * sizes.kv_bytes)
        for stage, count, end in zip(budgets, layers, accumulate(layers), strict=True)
    ]


def _limiting_rank(
    topology: Topology, layers: Sequence[int], budgets: Sequence[StageBudget], sizes: Sizes
) -> int | None:
    rooms = [room for room in _token_rooms(layers, budgets, sizes) if room is not None]
    if len(rooms) < len(budgets):
        return None
    stage = rooms.index(min(rooms))
    seats = topology.stages[stage]
    tightest = next(i for i, seat in enumerate(seats) if seat.placed.role.name == budgets[stage].role)
    return stage * topology.tensor + tightest


def _tensor_advice(plan: Plan) -> tuple[str, ...]:
    """Returns what the user should know of a plan with a mixed stage."""
    slow_s, fast_s = (
        sum(
            max((r.predicted_step_s for r in plan.stage(stage) if r.device in devices), default=0.0)
            for stage in range(plan.pipeline_parallel_size)
        )
        for devices in ((Device.CPU, Device.GPU), (Device.GPU,))
    )
    pace = (
        f"every layer waits for its CPU ranks: a decode step reads weights for about {slow_s * 1e3:.1f} ms, "
        f"the GPU ranks' share takes {fast_s * 1e3:.1f} ms of it; mode Pipeline gives CPUs only the layers "
        "that GPUs can't hold, and keeps CUDA graphs"
    )
    return (str(eager_reason(plan)), pace)


def _fits_gpus_alone(
    topology: Topology, profile: ModelProfile, engine: EngineSettings, inventory: Inventory, min_tokens: int
) -> tuple[str, ...]:
    """Returns advice where GPUs split layers with CPUs: could they hold the model without them?"""
    seats = [s for stage in topology.stages for s in stage if s.placed.device is Device.GPU]
    budgets = [rank_budget(seat, inventory) for seat in seats]
    known = [budget for budget in budgets if budget is not None]
    if len(known) < len(budgets):
        return ("the GPUs' memory is unknown; set deviceMemory to know whether CPUs are needed at all",)
    whole = Sizes.of(profile, engine, 1)
    need = whole.layers(0, profile.num_layers) + whole.tables(0, 1, Device.GPU)
    need += profile.num_layers * whole.kv_bytes * min_tokens
    return (_fits_alone(profile),) if need <= sum(known) else ()


def _fits_alone(profile: ModelProfile) -> str:
    return (
        f"the model ({gib(profile.total_bytes)}) fits the GPUs alone; CPU ranks add capacity, not speed: "
        "remove them"
    )


def _advice(topology: Topology, sizes: Sizes, inventory: Inventory, min_tokens: int) -> tuple[str, ...]:
    if not topology.is_mixed:
        return ()
    gpu_stages = tuple(s for s in topology.stages if s[0].placed.device is Device.GPU)
    budgets = stage_budgets(gpu_stages, sizes, inventory)
    if any(stage.budget is None for stage in budgets):
        return ("the GPUs' memory is unknown; set deviceMemory to have layers planned by it",)
    try:
        split_by_memory(budgets, sizes, min_tokens)
    except PlanError:
        return ()
    return (_fits_alone(sizes.profile),)
