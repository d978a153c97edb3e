"""The predicted compute time of each rank, for a new plan and again for a running one. Pure.

A plan keeps the prediction of the time when it was made. A later calibration changes no plan and no pod.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from heteroinfer_contract.model_profile import ModelProfile
from heteroinfer_contract.plan import BY_RATE, Device, Plan, RankAssignment
from heteroinfer_operator.api import HeteroInferenceSpec, RoleSpec
from heteroinfer_operator.planning.feed_forward import (
    Remote,
    feed_forward_rates,
    feed_forward_seconds,
    remote_of,
)
from heteroinfer_operator.planning.inventory import Inventory
from heteroinfer_operator.planning.memory import Sizes
from heteroinfer_operator.planning.prediction import Load, Prediction, count_reads, predict
from heteroinfer_operator.planning.rates import Rates, cpu_rates, gpu_rates
from heteroinfer_operator.planning.remote_ranks import rank_sets


def predict_ranks(
    plan: Plan, spec: HeteroInferenceSpec, sizes: Sizes, remote: Remote | None, inventory: Inventory
) -> tuple[Plan, tuple[Rates, ...]]:
    """Returns a plan with the predicted compute time of each rank, and the assumed rates by rank.

    Args:
        plan: the plan, whose times are ignored.
        sizes: sizes of a rank in a stage.
        remote: the feed-forward ranks' part of the model, or None without such ranks.
    """
    roles = {role.name: role for role in spec.roles}
    in_stages = plan.ranks if remote is None else plan.stage_ranks
    rates = [_rates(rank, plan, roles[rank.role], sizes.profile, inventory) for rank in in_stages]
    seconds = [_seconds(rank, plan, sizes, rates[rank.rank]) for rank in in_stages]
    beside = plan.ranks[len(in_stages) :]
    if remote is not None and beside:
        theirs = feed_forward_rates(remote, plan.engine, inventory)
        rates += theirs
        seconds += feed_forward_seconds(remote, plan.engine, theirs, Load())
    timed = (replace(rank, predicted_step_s=each) for rank, each in zip(plan.ranks, seconds, strict=True))
    return replace(plan, ranks=tuple(timed)), tuple(rates)


def _rates(
    rank: RankAssignment, plan: Plan, role: RoleSpec, profile: ModelProfile, inventory: Inventory
) -> Rates:
    if rank.device is Device.GPU:
        product, calibration = inventory.gpu_product.get(role.name, ""), inventory.calibration.get(role.name)
        return gpu_rates(product, calibration, profile.scheme.name)
    together = sum(1 for other in plan.stage(rank.stage) if other.pod == rank.pod)
    return cpu_rates(role, profile, plan.engine, inventory, leads=rank.pod == 0, together=together)


def _seconds(rank: RankAssignment, plan: Plan, sizes: Sizes, rates: Rates) -> float:
    last = rank.stage == plan.pipeline_parallel_size - 1
    read = count_reads(sizes, rank.first_layer, rank.end_layer, Load(), last=last, engine=plan.engine)
    return read.seconds(rates)


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedPlan:
    """A plan with new predictions.

    Attributes:
        plan: the plan with the new times, and so with another hash.
        step: predicted decode step of one request.
        sources: source of the rates by role, for people.
    """

    plan: Plan
    step: Prediction
    sources: Mapping[str, str]

    def __str__(self) -> str:
        return "; ".join(f"role {role}: {source}" for role, source in sorted(self.sources.items()))


def predict_again(
    plan: Plan, spec: HeteroInferenceSpec, profile: ModelProfile, inventory: Inventory
) -> PredictedPlan | None:
    """Predicts the steps of an existing plan. Returns None if the plan belongs to another spec or model.

    Args:
        spec: the present spec.
        inventory: known devices of the machines that the group runs on.
    """
    found = find_sizes(plan, spec, profile)
    if found is None:
        return None
    sizes, remote = found
    predicted, rates = predict_ranks(plan, spec, sizes, remote, inventory)
    sources = {rank.role: each.source for rank, each in zip(plan.ranks, rates, strict=True)}
    return PredictedPlan(plan=predicted, step=predict(predicted, rates), sources=sources)


def find_sizes(
    plan: Plan, spec: HeteroInferenceSpec, profile: ModelProfile
) -> tuple[Sizes, Remote | None] | None:
    """Returns the sizes that a plan was made with, or None if it belongs to another spec or model.

    Returns:
        The sizes of a rank in a stage, and the feed-forward ranks' part of the model.
    """
    roles = {role.name: role for role in spec.roles}
    if any(rank.role not in roles for rank in plan.ranks):
        return None
    if max(rank.end_layer for rank in plan.ranks) > profile.num_layers:
        return None
    has_remote = any(rank.feed_forward is not None for rank in plan.ranks)
    remote = _feed_forward_share(plan, spec, profile) if has_remote else None
    if has_remote and remote is None:
        return None
    kept = profile if remote is None else remote.kept
    sizes = Sizes.of(kept, plan.engine, plan.tensor_parallel_size, batches=plan.batches_at_once)
    return sizes, remote


def _feed_forward_share(plan: Plan, spec: HeteroInferenceSpec, profile: ModelProfile) -> Remote | None:
    """Returns the part of feed-forward ranks; None if the spec's roles have another number of such ranks."""
    beside = [rank for rank in plan.ranks if rank.feed_forward is not None]
    asking = next(role for role in spec.roles if role.name == plan.ranks[0].role)
    named = {rank.role for rank in plan.ranks}
    sets = rank_sets(asking, [role for role in spec.roles if role.name in named], Inventory())
    if sum(each.count for each in sets) != len(beside):
        return None
    parts = [rank.feed_forward for rank in beside if rank.feed_forward is not None]
    shares = () if parts[0].share == BY_RATE else tuple(part.share for part in parts)
    return remote_of(sets, profile, parts[0].layers, by_experts=parts[0].by_experts, shares=shares)
