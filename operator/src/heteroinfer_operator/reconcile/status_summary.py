"""The plans in the status, and the summary that `kubectl get` prints. Pure."""

from collections.abc import Sequence

from heteroinfer_contract.plan import Device, Plan, eager_reason
from heteroinfer_operator.api import GroupStatus, PlanStatus, RankPlan, Summary
from heteroinfer_operator.api.base import MAX_TEXT
from heteroinfer_operator.api.status import MAX_COUNT
from heteroinfer_operator.planning.predicted_plan import PredictedPlan
from heteroinfer_operator.planning.prediction import predict
from heteroinfer_operator.quantity import mebibytes
from heteroinfer_operator.reconcile.one_group.decision import GroupDecision


def build_plan_status(plan: Plan, predicted: PredictedPlan | None = None) -> PlanStatus:
    """Builds the status of a plan, with its table of ranks.

    Args:
        predicted: the plan with step times from current measurements of its nodes; None if these are unknown.
    """
    ranks = plan.ranks if predicted is None else predicted.plan.ranks
    step = predict(plan) if predicted is None else predicted.step
    return PlanStatus(
        hash=plan.hash,
        mode=plan.mode,
        predicted_step_ms=round(step.step_s * 1e3, 2),
        predicted_step_microseconds=round(step.step_s * 1e6),
        max_model_len=plan.engine.max_model_len,
        calibration=None if predicted is None else str(predicted)[:MAX_TEXT],
        long_prompts=None if predicted is None else predicted.long_prompts[:MAX_TEXT] or None,
        world_size=plan.world_size,
        eager_reason=(eager_reason(plan) or "")[:MAX_TEXT] or None,
        ranks=tuple(
            RankPlan(
                rank=rank.rank,
                stage=rank.stage,
                role=rank.role,
                device=rank.device,
                layers=rank.num_layers,
                memory=mebibytes(rank.weight_bytes + rank.kv_cache_bytes + rank.ring_bytes),
                predicted_step_ms=round(rank.predicted_step_s * 1e3, 1) or None,
            )
            for rank in ranks
        ),
    )


def build_summary(
    decisions: Sequence[GroupDecision],
    groups: Sequence[GroupStatus],
    plans: Sequence[PlanStatus],
    *,
    serving: int,
    wanted: int,
) -> Summary:
    """Builds the values that `kubectl get` prints."""
    plan = next((decision.plan for decision in decisions if decision.plan is not None), None)
    entries = [entry for group in groups for entry in group.members if entry.compute_ms is not None]
    slowest = max(entries, key=lambda entry: entry.compute_ms or 0.0, default=None)
    step_ms = max((entry.step_ms or 0.0 for entry in entries), default=None)
    plan_hash = None if plan is None else plan.hash
    predicted_ms = next((status.predicted_step_ms for status in plans if status.hash == plan_hash), None)
    return Summary(
        groups=f"{serving}/{wanted}",
        mode=None if plan is None else plan.mode,
        gpu_ranks=None if plan is None else sum(rank.device is Device.GPU for rank in plan.ranks),
        cpu_ranks=None if plan is None else sum(rank.device is Device.CPU for rank in plan.ranks),
        step_microseconds=None if step_ms is None else round(step_ms * 1e3),
        predicted_step_microseconds=None if predicted_ms is None else round(predicted_ms * 1e3),
        step_ms=None if step_ms is None else f"{step_ms:.1f}",
        predicted_step_ms=None if predicted_ms is None else f"{predicted_ms:.1f}",
        slowest_rank=None if slowest is None else f"{slowest.rank} ({slowest.role})",
        restarts=min(sum(group.restarts for group in groups), MAX_COUNT),
        plan=None if plan is None else plan.hash,
    )
