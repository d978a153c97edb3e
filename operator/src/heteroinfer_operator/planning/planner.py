"""Spec, model profile and inventory to a plan, or to the reason why there is none. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from heteroinfer_contract.model_profile import ModelProfile
from heteroinfer_contract.plan import (
    MAX_WORLD_SIZE,
    Device,
    EngineSettings,
    Mode,
    Plan,
    RankAssignment,
    batches_at_once,
)
from heteroinfer_operator.api import HeteroInferenceSpec
from heteroinfer_operator.errors import PlanError, PlanReason
from heteroinfer_operator.nodes.node_assignment import NodeAssignment
from heteroinfer_operator.planning.advice import Advice, advise
from heteroinfer_operator.planning.engine_settings import engine_settings
from heteroinfer_operator.planning.feed_forward import (
    Remote,
    choose_remote,
    feed_forward_notes,
    feed_forward_ranks,
    feed_forward_rates,
)
from heteroinfer_operator.planning.inventory import Inventory
from heteroinfer_operator.planning.layers import check_explicit, explicit_layers, split_by_memory
from heteroinfer_operator.planning.memory import Sizes, StageBudget, longest_sequence_tokens, stage_budgets
from heteroinfer_operator.planning.prediction import Load, count_reads
from heteroinfer_operator.planning.rates import Rates, cpu_rates, gpu_rates
from heteroinfer_operator.planning.topology import Seat, Topology, lay_out
from heteroinfer_operator.vllm_support.cpu_ranks import check_load_format, check_remote_support, check_support
from heteroinfer_operator.vllm_support.quantization import check_quantization
from heteroinfer_operator.vllm_support.served_architectures import check_architecture

_UNKNOWN_MEMORY_SEQUENCES: Final = 4
"""KV headroom, in longest sequences, where some rank's memory is unknown."""
_VOCAB_PADDING: Final = 64
"""vLLM pads the vocabulary to this before it splits it (vocab_parallel_embedding.py@v0.32.0)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRequest:
    """What is to be planned.

    Attributes:
        spec: what the user asks for.
        profile: sizes of the model.
        served_name: the model's name in the OpenAI API.
        model_path: where the ranks find the model.
    """

    spec: HeteroInferenceSpec
    profile: ModelProfile
    served_name: str
    model_path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A plan and what the user should know about it.

    Attributes:
        plan: the plan.
        request: what was planned.
        inventory: what there was to plan with.
        budgets: what each stage may hold.
        sizes: of one rank's share of the model.
        rates: how fast each rank is taken to work, by rank.
        remote: what feed-forward ranks have of the model, or None without them.
        notes: one line each.
        limiting_rank: the rank whose memory holds the fewest KV blocks, as predicted; None
            where the memory of some rank is unknown.
        hybrid_not_needed: why CPU ranks could be left out, which is also one of the notes, or "".
        on_cpus: why GPU roles compute on CPUs, which is also one of the notes, or "".
        node_assignment: where its pods fit, as far as nodes are known.
        missing: what is missing on nodes that somebody else will have to wait for, or "".
    """

    plan: Plan
    request: GroupRequest
    inventory: Inventory
    budgets: tuple[StageBudget, ...]
    sizes: Sizes
    rates: tuple[Rates, ...]
    remote: Remote | None = None
    notes: tuple[str, ...] = ()
    limiting_rank: int | None = None
    hybrid_not_needed: str = ""
    on_cpus: str = ""
    node_assignment: NodeAssignment = NodeAssignment()  # noqa: RUF009 - frozen
    missing: str = ""


def make_plan(request: GroupRequest, inventory: Inventory) -> Planned:
    """Returns the plan of a group. Equal arguments give an equal plan.

    Args:
        request: what is to be planned.
        inventory: what there is to plan with.

    Raises:
        PlanError: there is no plan; the message says what is missing and by how much.
    """
    spec, profile = request.spec, request.profile
    topology = lay_out(spec, inventory)
    _check_tensor(topology.tensor, profile)
    engine = engine_settings(
        spec,
        profile,
        has_cpu=topology.has_cpu or spec.parallelism.mode is Mode.FEED_FORWARD,
        has_mixed_stage=topology.has_mixed_stage,
        tensor=topology.tensor,
        served_name=request.served_name,
        model_path=request.model_path,
    )
    warnings = check_architecture(profile)
    check_quantization(profile, engine)
    first = topology.stages[0][0].placed
    features = inventory.cpu_features
    cpus = {role: features.get(role) for role in topology.cpu_roles}
    warnings += check_support(profile, engine, cpus, stages=len(topology.stages), first=first.device)
    if topology.has_cpu and spec.parallelism.mode is not Mode.FEED_FORWARD:
        check_load_format(engine)
    remote = choose_remote(topology, profile, engine, inventory)
    if remote is not None and not topology.has_cpu:
        theirs_cpus = {first.role.name: features.get(first.role.name)}
        warnings += check_remote_support(profile, remote.profile, engine, theirs_cpus)
    kept = profile if remote is None else remote.kept
    batches = batches_at_once(spec.parallelism.mode, len(topology.stages), first.device)
    sizes = Sizes.of(kept, engine, topology.tensor, batches=batches)
    budgets = stage_budgets(topology.stages, sizes, inventory)
    min_tokens = longest_sequence_tokens(engine)
    layers = explicit_layers(spec, topology)
    if layers is None:
        layers = split_by_memory(budgets, sizes, min_tokens)
    else:
        check_explicit(layers, budgets, sizes, min_tokens)
    rates = _rates(topology, kept, engine, inventory)
    ranks = _assign(topology, layers, budgets, sizes, engine, rates)
    if remote is not None:
        role = topology.stages[0][0].placed.role.name
        theirs = feed_forward_rates(remote, engine, inventory.calibration.get(role))
        ranks += feed_forward_ranks(topology, remote, engine, theirs)
        rates += (theirs,) * remote.spec.ranks
    plan = Plan(
        mode=spec.parallelism.mode,
        tensor_parallel_size=topology.tensor,
        pipeline_parallel_size=len(topology.stages),
        ranks=ranks,
        engine=engine,
    )
    advice = advise(topology, plan, profile, inventory)
    if remote is not None:
        notes, not_needed = feed_forward_notes(
            topology, remote, profile, engine, (rates[0], rates[-1]), inventory
        )
        advice = Advice(notes=notes, hybrid_not_needed=not_needed)
    return Planned(
        plan=plan,
        request=request,
        inventory=inventory,
        budgets=budgets,
        notes=(*topology.notes, *warnings, *advice.notes),
        limiting_rank=_limiting_rank(topology, layers, budgets, sizes),
        hybrid_not_needed=advice.hybrid_not_needed,
        on_cpus="; ".join(topology.notes),
        sizes=sizes,
        rates=rates,
        remote=remote,
    )


def _check_tensor(tensor: int, profile: ModelProfile) -> None:
    heads, kv_heads = profile.num_attention_heads, profile.num_kv_heads
    vocab = -(-profile.vocab_size // _VOCAB_PADDING) * _VOCAB_PADDING

    def problem(ranks: int) -> str:
        for what, bad in (
            (f"{heads} attention heads", heads % ranks != 0),
            (f"{kv_heads} key/value heads", kv_heads % ranks != 0 and ranks % kv_heads != 0),
            (f"a vocabulary of {vocab} rows with padding", vocab % ranks != 0),
        ):
            if bad:
                return what
        return ""

    what = problem(tensor)
    if what:
        good = [str(ranks) for ranks in range(1, min(heads, MAX_WORLD_SIZE) + 1) if not problem(ranks)]
        raise PlanError(
            f"parallelism.tensor: got {tensor} ranks a stage, the model has {what}, which cannot be split "
            f"by it; set one of {', '.join(good)}",
            reason=PlanReason.UNSUPPORTED_PARALLELISM,
        )


def _assign(
    topology: Topology,
    layers: Sequence[int],
    budgets: Sequence[StageBudget],
    sizes: Sizes,
    engine: EngineSettings,
    rates: Sequence[Rates],
) -> tuple[RankAssignment, ...]:
    blocks = _kv_blocks(layers, budgets, sizes, engine)
    seats = [(stage, i, seat) for stage, seats in enumerate(topology.stages) for i, seat in enumerate(seats)]
    ends = tuple(accumulate(layers))
    ranks: list[RankAssignment] = []
    for rank, (stage, tensor_rank, seat) in enumerate(seats):
        first, end = ends[stage] - layers[stage], ends[stage]
        weights = sizes.layers(first, end, budgets[stage].kernels_of(seat.placed.role.name))
        read = count_reads(sizes, first, end, Load(), last=end == ends[-1], engine=engine)
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
                kv_cache_bytes=blocks * sizes.kv.block_bytes(first, end),
                weight_bytes=weights + sizes.tables(stage, len(layers), seat.placed.device),
                predicted_step_s=read.seconds(rates[rank]),
            )
        )
    return tuple(ranks)


def _rates(
    topology: Topology, profile: ModelProfile, engine: EngineSettings, inventory: Inventory
) -> tuple[Rates, ...]:
    """Returns how fast each rank works, by rank."""
    return tuple(
        _rate(seat, stage, profile, engine, inventory) for stage in topology.stages for seat in stage
    )


def _rate(
    seat: Seat, stage: Sequence[Seat], profile: ModelProfile, engine: EngineSettings, inventory: Inventory
) -> Rates:
    role = seat.placed.role
    calibration = inventory.calibration.get(role.name)
    if seat.placed.device is Device.GPU:
        return gpu_rates(inventory.gpu_product.get(role.name, ""), calibration, profile.scheme.name)
    return cpu_rates(
        role,
        profile,
        engine,
        leads=seat.pod == 0,
        together=sum(1 for other in stage if other.pod == seat.pod),
        calibration=calibration,
    )


def _kv_blocks(
    layers: Sequence[int], budgets: Sequence[StageBudget], sizes: Sizes, engine: EngineSettings
) -> int:
    """Returns the blocks of KV cache that every rank gets.

    vLLM takes the least number of blocks over all ranks, so more on one of them is of no
    use; and no more than max_num_seqs sequences of full length can ever be used.
    """
    unknown = not all(stage.is_known for stage in budgets)
    useful = (_UNKNOWN_MEMORY_SEQUENCES if unknown else engine.max_num_seqs) * sizes.kv.sequence_blocks + 1
    capacities = [blocks for blocks in block_capacities(layers, budgets, sizes) if blocks is not None]
    return max(min([*capacities, useful]), sizes.kv.least_blocks)


def block_capacities(layers: Sequence[int], budgets: Sequence[StageBudget], sizes: Sizes) -> list[int | None]:
    """Returns the blocks that each stage's memory holds; None for a stage of unknown memory."""
    found: list[int | None] = []
    for stage, count, end in zip(budgets, layers, accumulate(layers), strict=True):
        left = stage.left_bytes(sizes, end - count, end)
        found.append(None if left is None else left // max(sizes.kv.block_bytes(end - count, end), 1))
    return found


def _limiting_rank(
    topology: Topology, layers: Sequence[int], budgets: Sequence[StageBudget], sizes: Sizes
) -> int | None:
    capacities = [blocks for blocks in block_capacities(layers, budgets, sizes) if blocks is not None]
    if len(capacities) < len(budgets):
        return None
    stage = capacities.index(min(capacities))
    seats, end = topology.stages[stage], sum(layers[: stage + 1])
    role = budgets[stage].tightest(sizes, end - layers[stage], end).role
    tightest = next(i for i, seat in enumerate(seats) if seat.placed.role.name == role)
    return stage * topology.tensor + tightest
