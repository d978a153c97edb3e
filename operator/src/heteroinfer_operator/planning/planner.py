"""Makes the plan of a group from its spec, the model's profile and the inventory of devices. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from heteroinfer_contract.model_profile import ModelProfile
from heteroinfer_contract.plan import (
    MAX_WORLD_SIZE,
    EngineSettings,
    Mode,
    Plan,
    RankAssignment,
    batches_at_once,
)
from heteroinfer_operator.api import HeteroInferenceSpec
from heteroinfer_operator.errors import PlanError, PlanReason
from heteroinfer_operator.nodes.node_assignment import NodeAssignment
from heteroinfer_operator.planning.alternatives import name_alternatives
from heteroinfer_operator.planning.engine_settings import engine_settings
from heteroinfer_operator.planning.feed_forward import Remote
from heteroinfer_operator.planning.first_token import with_keep_alive
from heteroinfer_operator.planning.inventory import Inventory
from heteroinfer_operator.planning.layers import choose_layers
from heteroinfer_operator.planning.memory import Sizes, StageBudget, host_tables, stage_budgets
from heteroinfer_operator.planning.mode_choice import ModeChoice
from heteroinfer_operator.planning.planned_modes import check_mode, choose_mode
from heteroinfer_operator.planning.predicted_plan import predict_ranks
from heteroinfer_operator.planning.rates import Rates
from heteroinfer_operator.planning.topology import Topology, lay_out
from heteroinfer_operator.vllm_support.cpu_ranks import check_support
from heteroinfer_operator.vllm_support.engine_options import EngineOptions
from heteroinfer_operator.vllm_support.every_reason import every_reason
from heteroinfer_operator.vllm_support.quantization import check_quantization
from heteroinfer_operator.vllm_support.served_architectures import check_architecture, check_files

_UNKNOWN_MEMORY_SEQUENCES: Final = 4
"""Full-length requests that the KV cache is planned for if the memory of a rank is unknown."""
_VOCAB_PADDING: Final = 64
"""vLLM pads the vocabulary to this before it splits it (vocab_parallel_embedding.py@v0.32.0)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRequest:
    """The input of a plan; `model_path` is the path at which the ranks find the model."""

    spec: HeteroInferenceSpec
    profile: ModelProfile
    served_name: str
    model_path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochPlan:
    """The plan that an epoch starts with, and notes for the user.

    Attributes:
        notes: one line each; empty for a plan of an earlier epoch.
        hybrid_not_needed: the note why CPU ranks could be left out, or "".
        on_cpus: the notes why GPU roles compute on CPUs, or "".
        node_assignment: nodes that the pods fit on, if nodes are known.
        missing: capacity that the pods will wait for once they exist, or "".
        choice: how the plan chose the mode; None if the mode was given.
    """

    plan: Plan
    notes: tuple[str, ...] = ()
    hybrid_not_needed: str = ""
    on_cpus: str = ""
    node_assignment: NodeAssignment = NodeAssignment()  # noqa: RUF009 - frozen
    missing: str = ""
    choice: ModeChoice | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned(EpochPlan):
    """A new plan with the values behind it.

    Attributes:
        budgets: memory of each stage.
        sizes: sizes of one rank's share of the model.
        rates: assumed speed of each rank, by rank.
        remote: the feed-forward ranks' part of the model, or None without such ranks.
        limiting_rank: rank whose memory holds the fewest KV blocks; None if the memory of a stage is unknown.
    """

    request: GroupRequest
    inventory: Inventory
    budgets: tuple[StageBudget, ...]
    sizes: Sizes
    rates: tuple[Rates, ...]
    remote: Remote | None = None
    limiting_rank: int | None = None


def make_plan(request: GroupRequest, inventory: Inventory) -> Planned:
    """Returns the plan of a group whose spec has a mode. Equal arguments give an equal plan.

    Raises:
        PlanError: the group has no plan; the message has the missing bytes or the wrong field.
    """
    spec, profile = request.spec, request.profile
    asked = spec.parallelism.mode
    assert asked is not None  # auto_mode.py has chosen a mode
    has_encoder = bool(profile.encoder) and not EngineOptions.of(spec.engine.args).is_text_only
    in_stages = spec.changed(roles=spec.stage_roles)
    topology = lay_out(in_stages, inventory, has_encoder=has_encoder)
    _check_tensor(topology.tensor, profile)
    engine = engine_settings(
        spec,
        profile,
        has_cpu=topology.has_cpu or asked is Mode.FEED_FORWARD,
        has_mixed_stage=topology.has_mixed_stage,
        tensor=topology.tensor,
        served_name=request.served_name,
        model_path=request.model_path,
    )
    stages, first = len(topology.stages), topology.stages[0][0].placed.device
    warnings = _check_model(request, asked, topology, engine, inventory)
    mode = choose_mode(asked, spec.roles, topology, profile, engine, inventory)
    batches = batches_at_once(asked, stages, first)
    sizes = Sizes.of(mode.in_stages, engine, topology.tensor, batches=batches)
    budgets = stage_budgets(topology.stages, sizes, inventory)
    layers = choose_layers(in_stages, topology, budgets, sizes)
    without_times = Plan(
        mode=asked,
        tensor_parallel_size=topology.tensor,
        pipeline_parallel_size=stages,
        ranks=(*_assign(topology, layers, budgets, sizes, engine), *mode.ranks_beside()),
        engine=engine,
    )
    predicted, rates = predict_ranks(without_times, spec, sizes, mode.remote, inventory)
    plan = with_keep_alive(predicted, sizes, rates, mode.remote)
    advice = mode.advise(plan, rates)
    return Planned(
        plan=plan,
        request=request,
        inventory=inventory,
        budgets=budgets,
        notes=(*topology.notes, *warnings, *host_tables(profile, topology), *advice.notes),
        limiting_rank=_limiting_rank(topology, layers, budgets, sizes),
        hybrid_not_needed=advice.hybrid_not_needed,
        on_cpus="; ".join(topology.notes),
        sizes=sizes,
        rates=rates,
        remote=mode.remote,
    )


def _check_model(
    request: GroupRequest, mode: Mode, topology: Topology, engine: EngineSettings, inventory: Inventory
) -> tuple[str, ...]:
    """Refuses a model that no memory can serve. Returns notes for the user, one line each.

    Raises:
        PlanError: the message has every reason, and the ways that would run.
    """
    profile = request.profile
    stages, first = len(topology.stages), topology.stages[0][0].placed.device
    cpus = {role: inventory.cpu_features.get(role) for role in topology.cpu_roles}

    def check(profile: ModelProfile) -> tuple[str, ...]:
        return every_reason(
            lambda: check_support(profile, engine, cpus, stages=stages, tensor=topology.tensor, first=first),
            lambda: check_mode(mode, topology, profile, engine),
        )

    served = (
        lambda: check_architecture(profile),
        lambda: check_files(profile),
        lambda: check_quantization(profile, engine),
    )
    try:
        notes = every_reason(*served)
    except PlanError:
        return every_reason(*served, lambda: check(profile))
    try:
        return (*notes, *check(profile))
    except PlanError as error:
        roles = [seat.placed.role.name for seats in topology.stages for seat in seats]
        hosts = cpus or {role: inventory.cpu_features.get(role) for role in roles}
        others = name_alternatives(mode, profile, engine, hosts, check)
        raise PlanError(f"{error.message}\n{others}", reason=error.reason) from error


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
            f"parallelism.tensor: must divide the model, which has {what} (got {tensor} ranks per stage). "
            f"Set one of {', '.join(good)}",
            reason=PlanReason.UNSUPPORTED_PARALLELISM,
        )


def _assign(
    topology: Topology,
    layers: Sequence[int],
    budgets: Sequence[StageBudget],
    sizes: Sizes,
    engine: EngineSettings,
) -> tuple[RankAssignment, ...]:
    blocks = _kv_blocks(layers, budgets, sizes, engine)
    seats = [(stage, i, seat) for stage, seats in enumerate(topology.stages) for i, seat in enumerate(seats)]
    ends = tuple(accumulate(layers))
    ranks: list[RankAssignment] = []
    for rank, (stage, tensor_rank, seat) in enumerate(seats):
        first, end = ends[stage] - layers[stage], ends[stage]
        weights = sizes.layers(first, end, seat.placed.device)
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
            )
        )
    return tuple(ranks)


def _kv_blocks(
    layers: Sequence[int], budgets: Sequence[StageBudget], sizes: Sizes, engine: EngineSettings
) -> int:
    """Returns the number of KV cache blocks of every rank.

    vLLM uses the lowest number of all ranks, so more blocks on one rank are useless. More than
    max_num_seqs full-length requests never run at once.
    """
    unknown = not all(stage.is_known for stage in budgets)
    useful = (_UNKNOWN_MEMORY_SEQUENCES if unknown else engine.max_num_seqs) * sizes.kv.sequence_blocks + 1
    capacities = [blocks for blocks in block_capacities(layers, budgets, sizes) if blocks is not None]
    return max(min([*capacities, useful]), sizes.kv.least_blocks)


def block_capacities(layers: Sequence[int], budgets: Sequence[StageBudget], sizes: Sizes) -> list[int | None]:
    """Returns the KV cache blocks that each stage's memory holds; None for a stage of unknown memory."""
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
