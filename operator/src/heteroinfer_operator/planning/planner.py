"""Makes the plan of a group from its spec, the model's profile and the known devices. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import ceil
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
from heteroinfer_operator.planning.alternatives import describe_alternatives
from heteroinfer_operator.planning.engine_settings import choose_engine_settings
from heteroinfer_operator.planning.feed_forward import FeedForwardPart
from heteroinfer_operator.planning.first_token import with_keep_alive
from heteroinfer_operator.planning.inventory import Inventory
from heteroinfer_operator.planning.layers import choose_layers
from heteroinfer_operator.planning.memory import Sizes, StageBudget, describe_host_tables, stage_budgets
from heteroinfer_operator.planning.mode_choice import ModeChoice
from heteroinfer_operator.planning.planned_modes import build_planned_mode, check_cpu_support
from heteroinfer_operator.planning.predicted_plan import predict_ranks
from heteroinfer_operator.planning.rates import Rates
from heteroinfer_operator.planning.topology import Topology, build_topology
from heteroinfer_operator.vllm_support.combined_checks import run_all_checks
from heteroinfer_operator.vllm_support.cpu_ranks import check_support
from heteroinfer_operator.vllm_support.engine_options import EngineOptions
from heteroinfer_operator.vllm_support.quantization import check_quantization
from heteroinfer_operator.vllm_support.served_architectures import check_architecture, check_files

_UNKNOWN_MEMORY_SEQUENCES: Final = 4
"""Number of full-length requests that the KV cache holds if the memory of a rank is unknown."""
_VOCAB_PADDING: Final = 64
"""vLLM pads the vocabulary to a multiple of this number before it divides the vocabulary among ranks
(vocab_parallel_embedding.py@v0.32.0)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRequest:
    """The input of a plan.

    Attributes:
        served_name: name of the model in the OpenAI API.
        model_path: path at which the ranks find the model.
    """

    spec: HeteroInferenceSpec
    profile: ModelProfile
    served_name: str
    model_path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochPlan:
    """The plan with which an epoch starts, and notes for the user.

    Attributes:
        notes: one line each; empty for a plan of an earlier epoch.
        hybrid_not_needed: the note that the GPUs need no CPU ranks, or "".
        on_cpus: the notes why GPU roles compute on CPUs, or "".
        node_assignment: a node for each pod, if nodes are known.
        missing: capacity that the pods will wait for once they exist, or "".
        choice: how the plan chose the mode; None if the user chose it.
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
    """A new plan, with the request, memory, sizes and rates from which it was made.

    Attributes:
        budgets: memory of each stage.
        sizes: sizes of one rank's share of the model.
        rates: assumed speed of each rank, by rank.
        remote: part of the model that feed-forward ranks compute, or None without such ranks.
        limiting_rank: rank whose memory holds the fewest KV blocks; None if the memory of a stage is unknown.
    """

    request: GroupRequest
    inventory: Inventory
    budgets: tuple[StageBudget, ...]
    sizes: Sizes
    rates: tuple[Rates, ...]
    remote: FeedForwardPart | None = None
    limiting_rank: int | None = None


def make_plan(request: GroupRequest, inventory: Inventory) -> Planned:
    """Makes the plan of a group whose spec has a mode. Equal arguments give an equal plan.

    Raises:
        PlanError: the group has no plan; the message has the missing bytes or the wrong field.
    """
    spec, profile = request.spec, request.profile
    wanted_mode = spec.parallelism.mode
    assert wanted_mode is not None  # auto_mode.py has chosen a mode
    has_encoder = bool(profile.encoder) and not EngineOptions.of(spec.engine.args).is_text_only
    stage_spec = spec.changed(roles=spec.stage_roles)  # without roles that have only feed-forward ranks
    topology = build_topology(stage_spec, inventory, has_encoder=has_encoder)
    _check_tensor_size(topology.tensor, profile)
    engine = _choose_engine(request, topology, wanted_mode)
    num_stages, first_device = len(topology.stages), topology.stages[0][0].placed.device
    warnings = _check_model(request, wanted_mode, topology, engine, inventory)
    mode = build_planned_mode(wanted_mode, spec, topology, profile, engine, inventory)
    engine = mode.engine  # with a ring, mode FeedForward may change the tokens of a step
    ring = None if mode.remote is None else mode.remote.ring
    batches = batches_at_once(wanted_mode, num_stages, first_device, tensor=topology.tensor)
    sizes = Sizes.for_settings(mode.stage_profile, engine, topology.tensor, batches=batches, ring=ring)
    budgets = stage_budgets(topology.stages, sizes, inventory)
    layers = choose_layers(stage_spec, topology, budgets, sizes)
    untimed_plan = Plan(
        mode=wanted_mode,
        tensor_parallel_size=topology.tensor,
        pipeline_parallel_size=num_stages,
        ranks=(*_assign_layers(topology, layers, budgets, sizes, engine), *mode.feed_forward_ranks()),
        engine=engine,
    )
    predicted, rates = predict_ranks(untimed_plan, spec, sizes, mode.remote, inventory)
    plan = with_keep_alive(predicted, sizes, rates, mode.remote)
    advice = mode.advise(plan, rates)
    return Planned(
        plan=plan,
        request=request,
        inventory=inventory,
        budgets=budgets,
        notes=(*topology.notes, *warnings, *describe_host_tables(profile, topology), *advice.notes),
        limiting_rank=_limiting_rank(topology, layers, budgets, sizes),
        hybrid_not_needed=advice.hybrid_not_needed,
        on_cpus="; ".join(topology.notes),
        sizes=sizes,
        rates=rates,
        remote=mode.remote,
    )


def _choose_engine(request: GroupRequest, topology: Topology, mode: Mode) -> EngineSettings:
    """Returns the engine settings for a topology; raises the errors of `choose_engine_settings`."""
    return choose_engine_settings(
        request.spec,
        request.profile,
        # The topology lacks the feed-forward ranks of mode FeedForward, which are always on CPUs.
        has_cpu=topology.has_cpu or mode is Mode.FEED_FORWARD,
        has_mixed_stage=topology.has_mixed_stage,
        tensor=topology.tensor,
        served_name=request.served_name,
        model_path=request.model_path,
    )


def _check_model(
    request: GroupRequest, wanted_mode: Mode, topology: Topology, engine: EngineSettings, inventory: Inventory
) -> tuple[str, ...]:
    """Checks that vLLM and the CPU ranks can serve the model. Returns notes for the user, one line each.

    Raises:
        PlanError: the model cannot run, however much memory there is. The message has every reason, and
            alternatives that can run.
    """
    profile = request.profile
    stages, first_device = len(topology.stages), topology.stages[0][0].placed.device
    cpus = {role: inventory.cpu_features.get(role) for role in topology.cpu_roles}

    def check(profile: ModelProfile) -> tuple[str, ...]:
        """Runs the checks that depend on the devices of the ranks."""
        return run_all_checks(
            lambda: check_support(
                profile, engine, cpus, stages=stages, tensor=topology.tensor, first=first_device
            ),
            lambda: check_cpu_support(wanted_mode, topology, profile, engine),
        )

    checks_on_any_device = (
        lambda: check_architecture(profile),
        lambda: check_files(profile),
        lambda: check_quantization(profile, engine),
    )
    try:
        notes = run_all_checks(*checks_on_any_device)
    except PlanError:
        # Raises the error again, now with the reasons of the checks on these devices, too. The error names no
        # alternatives, because no device can run the model.
        return run_all_checks(*checks_on_any_device, lambda: check(profile))
    try:
        return (*notes, *check(profile))
    except PlanError as error:
        roles = [seat.placed.role.name for seats in topology.stages for seat in seats]
        features_by_role = cpus or {role: inventory.cpu_features.get(role) for role in roles}
        alternatives = describe_alternatives(wanted_mode, profile, engine, features_by_role, check)
        raise PlanError(f"{error.message}\n{alternatives}", reason=error.reason) from error


def _check_tensor_size(tensor: int, profile: ModelProfile) -> None:
    """Raises PlanError if the ranks of a stage cannot divide the heads or the vocabulary equally."""
    heads, kv_heads = profile.num_attention_heads, profile.num_kv_heads
    padded_vocab = ceil(profile.vocab_size / _VOCAB_PADDING) * _VOCAB_PADDING

    def undivided_part(ranks: int) -> str:
        """Returns the part of the model that this number of ranks cannot divide equally, or ""."""
        if heads % ranks:
            return f"the model's {heads} attention heads"
        if kv_heads % ranks and ranks % kv_heads:  # several ranks may hold the same key/value head
            return f"the model's {kv_heads} key/value heads"
        if padded_vocab % ranks:
            return f"the model's vocabulary of {padded_vocab} rows with padding"
        return ""

    part = undivided_part(tensor)
    if part:
        numbers = range(1, min(heads, MAX_WORLD_SIZE) + 1)
        allowed = [str(ranks) for ranks in numbers if not undivided_part(ranks)]
        raise PlanError(
            f"parallelism.tensor: the ranks of a stage must divide {part} equally (got {tensor} ranks per "
            f"stage). Set one of {', '.join(allowed)}",
            reason=PlanReason.UNSUPPORTED_PARALLELISM,
        )


def _assign_layers(
    topology: Topology,
    layers: Sequence[int],
    budgets: Sequence[StageBudget],
    sizes: Sizes,
    engine: EngineSettings,
) -> tuple[RankAssignment, ...]:
    """Returns the assignment of each rank in a stage: its pod, its layers, and its bytes.

    Predicted times follow later (`predict_ranks`).
    """
    num_blocks = _choose_num_kv_blocks(layers, budgets, sizes, engine)
    numbered_seats = [
        (stage, tensor_rank, seat)
        for stage, seats in enumerate(topology.stages)
        for tensor_rank, seat in enumerate(seats)
    ]
    stage_ends = tuple(accumulate(layers))
    ranks: list[RankAssignment] = []
    for rank, (stage, tensor_rank, seat) in enumerate(numbered_seats):
        first, end = stage_ends[stage] - layers[stage], stage_ends[stage]
        weights = sizes.layer_weight_bytes(first, end, seat.placed.device)
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
                kv_cache_bytes=num_blocks * sizes.kv.block_bytes(first, end),
                weight_bytes=weights + sizes.table_bytes(stage, len(layers), seat.placed.device),
                ring_bytes=0 if sizes.ring is None else sizes.ring.num_bytes,
            )
        )
    return tuple(ranks)


def _choose_num_kv_blocks(
    layers: Sequence[int], budgets: Sequence[StageBudget], sizes: Sizes, engine: EngineSettings
) -> int:
    """Returns the number of KV cache blocks, which is the same on every rank.

    vLLM uses the lowest number of all ranks, so more blocks on one rank are useless. Blocks for more than
    max_num_seqs full-length requests are useless, too, because more requests never run at the same time.
    """
    is_known = all(stage.is_known for stage in budgets)
    max_sequences = engine.max_num_seqs if is_known else _UNKNOWN_MEMORY_SEQUENCES
    max_useful = max_sequences * sizes.kv.sequence_blocks + 1  # vLLM keeps one block for itself
    capacities = [blocks for blocks in kv_blocks_by_stage(layers, budgets, sizes) if blocks is not None]
    # One full-length request always fits: otherwise `choose_layers` would have raised an error.
    return max(min([*capacities, max_useful]), sizes.kv.min_blocks)


def kv_blocks_by_stage(
    layers: Sequence[int], budgets: Sequence[StageBudget], sizes: Sizes
) -> list[int | None]:
    """Returns the number of KV cache blocks that each stage's memory holds; None if unknown."""
    blocks: list[int | None] = []
    for stage, count, end in zip(budgets, layers, accumulate(layers), strict=True):
        left_bytes = stage.left_bytes(sizes, end - count, end)
        blocks.append(
            None if left_bytes is None else left_bytes // max(sizes.kv.block_bytes(end - count, end), 1)
        )
    return blocks


def _limiting_rank(
    topology: Topology, layers: Sequence[int], budgets: Sequence[StageBudget], sizes: Sizes
) -> int | None:
    """Returns the rank whose memory holds the fewest KV blocks; None if the memory of a stage is unknown."""
    known_blocks = [blocks for blocks in kv_blocks_by_stage(layers, budgets, sizes) if blocks is not None]
    if len(known_blocks) < len(budgets):
        return None
    stage = known_blocks.index(min(known_blocks))
    seats, end = topology.stages[stage], sum(layers[: stage + 1])
    role = budgets[stage].tightest(sizes, end - layers[stage], end).role
    # The first rank of this role stands for the stage's other ranks of the role.
    rank_in_stage = next(index for index, seat in enumerate(seats) if seat.placed.role.name == role)
    return stage * topology.tensor + rank_in_stage
