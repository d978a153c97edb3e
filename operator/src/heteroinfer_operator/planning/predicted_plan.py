"""Predicts the compute time of each rank, for a new plan and again for a running plan. Pure.

A plan keeps the prediction with which it was made. A later calibration changes neither the plan nor a pod.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from heteroinfer_contract.model_profile import ModelProfile
from heteroinfer_contract.plan import BY_RATE, Device, Plan, RankAssignment
from heteroinfer_operator.api import HeteroInferenceSpec, RoleSpec
from heteroinfer_operator.planning.feed_forward import (
    FeedForwardPart,
    build_feed_forward_part,
    build_ring,
    feed_forward_rates,
    feed_forward_seconds,
)
from heteroinfer_operator.planning.inventory import Inventory
from heteroinfer_operator.planning.memory import Sizes
from heteroinfer_operator.planning.prediction import Prediction, StepLoad, count_reads, predict
from heteroinfer_operator.planning.rates import Rates, cpu_rates, gpu_rates
from heteroinfer_operator.planning.remote_ranks import rank_sets
from heteroinfer_operator.planning.ring_choice import describe_long_prompts


def predict_ranks(
    plan: Plan, spec: HeteroInferenceSpec, sizes: Sizes, remote: FeedForwardPart | None, inventory: Inventory
) -> tuple[Plan, tuple[Rates, ...]]:
    """Returns a plan with the predicted compute time of each rank, and the assumed rates by rank.

    Args:
        plan: the plan; its predicted times are ignored.
        sizes: sizes of a rank in a stage.
        remote: part of the model that feed-forward ranks compute, or None without such ranks.
    """
    roles = {role.name: role for role in spec.roles}
    stage_ranks = plan.ranks if remote is None else plan.stage_ranks
    rates = [_choose_rates(rank, plan, roles[rank.role], sizes.profile, inventory) for rank in stage_ranks]
    seconds = [_predict_seconds(rank, plan, sizes, rates[rank.rank]) for rank in stage_ranks]
    feed_forward_ranks = plan.ranks[len(stage_ranks) :]
    if remote is not None and feed_forward_ranks:
        rates_of_feed_forward = feed_forward_rates(remote, plan.engine, inventory)
        rates += rates_of_feed_forward
        seconds += feed_forward_seconds(remote, plan.engine, rates_of_feed_forward, StepLoad())
    timed_ranks = (
        replace(rank, predicted_step_s=each) for rank, each in zip(plan.ranks, seconds, strict=True)
    )
    return replace(plan, ranks=tuple(timed_ranks)), tuple(rates)


def _choose_rates(
    rank: RankAssignment, plan: Plan, role: RoleSpec, profile: ModelProfile, inventory: Inventory
) -> Rates:
    """Returns the rates of a rank in a stage: measured rates of its machine, otherwise defaults."""
    if rank.device is Device.GPU:
        product, calibration = inventory.gpu_product.get(role.name, ""), inventory.calibration.get(role.name)
        return gpu_rates(product, calibration, profile.scheme.name)
    sharing_ranks = sum(1 for other in plan.stage(rank.stage) if other.pod == rank.pod)
    return cpu_rates(
        role, profile, plan.engine, inventory, has_leader=rank.pod == 0, sharing_ranks=sharing_ranks
    )


def _predict_seconds(rank: RankAssignment, plan: Plan, sizes: Sizes, rates: Rates) -> float:
    """Returns the compute time of a rank in a decode step of one request."""
    is_last = rank.stage == plan.pipeline_parallel_size - 1
    reads = count_reads(
        sizes, rank.first_layer, rank.end_layer, StepLoad(), has_head=is_last, engine=plan.engine
    )
    return reads.seconds(rates)


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedPlan:
    """A plan with new predictions.

    Attributes:
        plan: the plan with the new times, and so with another hash than the running plan.
        step: predicted decode step of one request.
        sources: descriptions of the rates, by role.
        long_prompts: description of the GPU's part of the experts in long prompts, or "".
        networks: descriptions of the network to feed-forward ranks in pods of their own, by their role.
    """

    plan: Plan
    step: Prediction
    sources: Mapping[str, str]
    long_prompts: str = ""
    networks: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    def __str__(self) -> str:
        roles = [f"role {role}: {source}" for role, source in sorted(self.sources.items())]
        networks = [f"network to role {role}: {source}" for role, source in sorted(self.networks.items())]
        return "; ".join((*roles, *networks))


def predict_again(
    plan: Plan, spec: HeteroInferenceSpec, profile: ModelProfile, inventory: Inventory
) -> PredictedPlan | None:
    """Predicts the steps of an existing plan. Returns None if the plan is not of this spec and model.

    Args:
        spec: the present spec.
        inventory: known devices of the machines that the group runs on.
    """
    sizes_of_plan = find_sizes(plan, spec, profile)
    if sizes_of_plan is None:
        return None
    sizes, remote = sizes_of_plan
    predicted, rates = predict_ranks(plan, spec, sizes, remote, inventory)
    sources = {rank.role: each.source for rank, each in zip(plan.ranks, rates, strict=True)}
    return PredictedPlan(
        plan=predicted,
        step=predict(predicted, rates),
        sources=sources,
        long_prompts=describe_long_prompts(plan, sizes, rates, remote),
        networks=describe_networks(plan, rates),
    )


def describe_networks(plan: Plan, rates: Sequence[Rates]) -> dict[str, str]:
    """Describes the networks to pods that have only feed-forward ranks, by the role of the pods.

    Args:
        rates: rates by rank.
    """
    ranks_and_networks = ((rank, each.network) for rank, each in zip(plan.ranks, rates, strict=True))
    return {rank.role: network.source for rank, network in ranks_and_networks if network is not None}


def find_sizes(
    plan: Plan, spec: HeteroInferenceSpec, profile: ModelProfile
) -> tuple[Sizes, FeedForwardPart | None] | None:
    """Computes again the memory sizes with which the planner made a stored plan.

    Returns:
        The sizes of the layers and the KV cache on one rank of a stage, and the part of the model that
        feed-forward ranks compute (None without such ranks). Returns None if the plan does not match: it has
        a role that the spec lacks, a layer that the model lacks, or other feed-forward layers.
    """
    roles = {role.name: role for role in spec.roles}
    if any(rank.role not in roles for rank in plan.ranks):
        return None
    if max(rank.end_layer for rank in plan.ranks) > profile.num_layers:
        return None
    feed_forward_part = None
    if any(rank.feed_forward is not None for rank in plan.ranks):
        feed_forward_part = _find_feed_forward_part(plan, spec, profile)
        if feed_forward_part is None:
            return None
    stage_profile = profile if feed_forward_part is None else feed_forward_part.remaining
    sizes = Sizes.for_settings(
        stage_profile,
        plan.engine,
        plan.tensor_parallel_size,
        batches=plan.batches_at_once,
        ring=None if feed_forward_part is None else feed_forward_part.ring,
    )
    return sizes, feed_forward_part


def _find_feed_forward_part(
    plan: Plan, spec: HeteroInferenceSpec, profile: ModelProfile
) -> FeedForwardPart | None:
    """Returns the part of the model that the plan's feed-forward ranks compute.

    Returns None if the roles of the spec have other numbers of such ranks.
    """
    feed_forward_ranks = [rank for rank in plan.ranks if rank.feed_forward is not None]
    asking_role = next(role for role in spec.roles if role.name == plan.ranks[0].role)
    plan_roles = {rank.role for rank in plan.ranks}
    # An empty inventory suffices: only the numbers of ranks matter here, not their memory.
    sets = rank_sets(asking_role, [role for role in spec.roles if role.name in plan_roles], Inventory())
    roles_now = [rank_set.role.name for rank_set in sets for _ in range(rank_set.count)]
    if roles_now != [rank.role for rank in feed_forward_ranks]:
        return None
    # All parts have the same layers, and differ only in their shares.
    parts = [rank.feed_forward for rank in feed_forward_ranks if rank.feed_forward is not None]
    shares = () if parts[0].share == BY_RATE else tuple(part.share for part in parts)
    remote = build_feed_forward_part(
        sets,
        profile,
        parts[0].layers,
        by_experts=parts[0].by_experts,
        shares=shares,
        tensor=plan.tensor_parallel_size,
    )
    ring_bytes = plan.ranks[0].ring_bytes
    return replace(remote, ring=build_ring(remote, plan.engine, ring_bytes)) if ring_bytes else remote
