"""The steps of a plan that there is already, by what is known of its machines now. Pure.

A plan keeps what was predicted when it was made; a calibration that comes later changes no plan, and no pod.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from heteroinfer_contract.calibration import Calibration
from heteroinfer_contract.model_profile import ModelProfile
from heteroinfer_contract.plan import Device, Plan, RankAssignment
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedPlan:
    """A plan with what its steps take.

    Attributes:
        plan: with the compute time of each rank; its hash is another one.
        step: of one request.
        sources: what the rates of each role were taken from, for people.
    """

    plan: Plan
    step: Prediction
    sources: Mapping[str, str]

    def __str__(self) -> str:
        """Returns where the rates are from."""
        return "; ".join(f"role {role}: {source}" for role, source in sorted(self.sources.items()))


def predict_again(
    plan: Plan, spec: HeteroInferenceSpec, profile: ModelProfile, inventory: Inventory
) -> PredictedPlan | None:
    """Returns the steps of a plan, or None if it is none of this spec and model.

    Args:
        plan: of a group.
        spec: what the user asks for now.
        profile: of the model.
        inventory: what is known of the machines that the group is on.
    """
    roles = {role.name: role for role in spec.roles}
    if any(rank.role not in roles for rank in plan.ranks):
        return None
    if max(rank.end_layer for rank in plan.ranks) > profile.num_layers:
        return None
    remote = _remote(plan, roles, profile)
    kept = profile if remote is None else remote.kept
    stages = plan.pipeline_parallel_size
    sizes = Sizes.of(kept, plan.engine, plan.tensor_parallel_size, batches=plan.batches_at_once)
    sources: dict[str, str] = {}
    ranks, found = [], []
    for rank in plan.ranks:
        role = roles[rank.role]
        calibration = inventory.calibration.get(role.name)
        if remote is not None and rank.feed_forward is not None:
            rates = feed_forward_rates(remote, plan.engine, calibration)
            seconds = feed_forward_seconds(remote, plan.engine, rates, Load())
        else:
            rates = _rates(rank, plan, role, kept, inventory)
            last = rank.stage == stages - 1
            read = count_reads(sizes, rank.first_layer, rank.end_layer, Load(), last=last, engine=plan.engine)
            seconds = read.seconds(rates)
        sources[role.name] = rates.source
        found.append(rates)
        ranks.append(replace(rank, predicted_step_s=seconds))
    predicted = replace(plan, ranks=tuple(ranks))
    return PredictedPlan(plan=predicted, step=predict(predicted, found), sources=sources)


def _remote(plan: Plan, roles: Mapping[str, RoleSpec], profile: ModelProfile) -> Remote | None:
    """Returns what the plan's feed-forward ranks have, or None without them."""
    for rank in plan.ranks:
        own = roles[rank.role].feed_forward
        if rank.feed_forward is not None and own is not None:
            share = rank.feed_forward
            return remote_of(own, profile, share.layers, by_experts=share.by_experts)
    return None


def _rates(
    rank: RankAssignment, plan: Plan, role: RoleSpec, profile: ModelProfile, inventory: Inventory
) -> Rates:
    calibration: Calibration | None = inventory.calibration.get(role.name)
    if rank.device is Device.GPU:
        return gpu_rates(inventory.gpu_product.get(role.name, ""), calibration, profile.scheme.name)
    return cpu_rates(
        role,
        profile,
        plan.engine,
        leads=rank.pod == 0,
        together=_together(rank, plan.stage(rank.stage)),
        calibration=calibration,
    )


def _together(rank: RankAssignment, stage: Sequence[RankAssignment]) -> int:
    return sum(1 for other in stage if other.pod == rank.pod)
