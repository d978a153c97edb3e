"""Rolls out a new revision over the groups, and reports progress and obstacles. Pure.

The operator replaces each group as a whole: the group's next epoch uses the new revision. It stops serving
groups only within `rollout.maxUnavailable`, and only for a revision that has a plan.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Final

from heteroinfer_contract.group_report import GroupReport
from heteroinfer_operator.api import GroupPhase, GroupStatus
from heteroinfer_operator.cluster import Manifest, PodView
from heteroinfer_operator.manifests import identity
from heteroinfer_operator.manifests.disruption_budget import KIND as BUDGET_KIND
from heteroinfer_operator.reconcile.group_planner import WAITING_FOR_MODEL
from heteroinfer_operator.reconcile.lost_labels import is_cut_off
from heteroinfer_operator.reconcile.one_group.decide import decide_group
from heteroinfer_operator.reconcile.one_group.decision import GroupDecision
from heteroinfer_operator.reconcile.one_group.made import EpochOrigin, revision_of
from heteroinfer_operator.reconcile.reading import epoch_of
from heteroinfer_operator.reconcile.reconcile_context import Context, EvictionBlock

_MAX_WAIT_FOR_PODS: Final = timedelta(seconds=10)
"""Time after which a group that still lacks pods no longer delays the start of other groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """A rollout that has not reached every group.

    Attributes:
        outdated: number of groups with an older revision.
        wanted: number of groups of the resource.
        stuck: why the rollout cannot continue until the user acts, or "".
    """

    outdated: int
    wanted: int
    stuck: str

    @property
    def message(self) -> str:
        """Progress of the rollout for users."""
        if self.stuck:
            return (
                f"rollout stopped: {self.stuck}. {self.outdated} of {self.wanted} groups keep an older "
                "revision. Fix the spec, or apply the previous spec to roll back"
            )
        return f"{self.wanted - self.outdated} of {self.wanted} groups have the new revision"


def decide_eviction_block(
    context: Context, last_statuses: Mapping[int, GroupStatus], by_group: Mapping[int, Sequence[PodView]]
) -> EvictionBlock:
    """Decides whether the disruption budget must block evictions while a rollout stops a serving group.

    Without the block, an eviction could stop a second group at the same time. Then fewer groups would serve
    than `rollout.maxUnavailable` allows. A single group needs no block, because no other group could
    serve meanwhile. If the API server refuses the budget, the rollout continues without it.
    """
    if context.replicas == 1 or context.life.suspend:
        return EvictionBlock()
    is_rollout_halted = context.problem is not None or not _may_continue(context)
    if is_rollout_halted:
        return EvictionBlock()
    serving = _find_serving(context, last_statuses, by_group)
    outdated = _find_outdated_groups(context, last_statuses, by_group)
    num_unavailable = context.replicas - len(serving)
    may_stop_one = num_unavailable < context.life.rollout.max_unavailable
    stops_serving_group = may_stop_one and bool(serving & outdated)
    if not stops_serving_group:
        return EvictionBlock()
    budget_name = identity.shared_budget(context.owner)
    num_serving_pods = sum(len(by_group.get(index, ())) for index in serving)
    budgets = [
        stored
        for stored in context.planner.observation.objects
        if stored["kind"] == BUDGET_KIND and stored["metadata"]["name"] == budget_name
    ]
    # The budget blocks all evictions if it protects at least the number of serving pods.
    blocks_already = any(_min_available(budget) >= num_serving_pods for budget in budgets)
    is_refused = any(refusal.kind == BUDGET_KIND for refusal in context.refusals)
    return EvictionBlock(wanted=True, done=blocks_already or is_refused)


def _may_continue(context: Context) -> bool:
    """Reports whether the revision of the current spec may replace groups now.

    It may not after a group with this revision has failed, or while the API server validates the revision.
    """
    return not context.target_failed and not context.waits_for_admission


def _min_available(budget: Manifest) -> int:
    """Returns the number of pods that a disruption budget protects, or 0."""
    min_available = (budget.get("spec") or {}).get("minAvailable")
    return min_available if isinstance(min_available, int) else 0


def _find_serving(
    context: Context, last_statuses: Mapping[int, GroupStatus], by_group: Mapping[int, Sequence[PodView]]
) -> set[int]:
    """Returns the indices of the wanted groups that serve now."""
    return {
        index
        for index in range(context.replicas)
        if index in last_statuses and _is_serving(last_statuses[index], by_group.get(index, ()))
    }


def _find_outdated_groups(
    context: Context, last_statuses: Mapping[int, GroupStatus], by_group: Mapping[int, Sequence[PodView]]
) -> set[int]:
    """Returns the indices of the wanted groups whose pods have an older revision."""
    outdated = set()
    for index in range(context.replicas):
        status, pods = last_statuses.get(index, GroupStatus(index=index)), by_group.get(index)
        if pods and revision_of(context, status, pods) != context.target.name:
            outdated.add(index)
    return outdated


def decide_wanted(
    context: Context,
    last_statuses: Mapping[int, GroupStatus],
    by_group: Mapping[int, Sequence[PodView]],
    reports: Mapping[int, GroupReport],
) -> list[GroupDecision]:
    """Returns the decision about each wanted group, in the order of the index.

    A rollout stops serving groups only within `rollout.maxUnavailable`. While the API server refuses a pod,
    groups start one at a time: a group waits until all incomplete groups (groups that lack pods) have their
    pods.
    """
    num_groups = context.replicas
    serving = _find_serving(context, last_statuses, by_group)
    outdated = _find_outdated_groups(context, last_statuses, by_group)
    problem = context.problem if outdated and not context.life.suspend else None
    may_continue = problem is None and _may_continue(context)
    num_may_stop = 0  # serving groups that the rollout may stop now
    if context.eviction_block.done:
        num_may_stop = context.life.rollout.max_unavailable - (num_groups - len(serving))
    one_at_a_time = context.refused_worker is not None
    incomplete = _find_incomplete(context, last_statuses, by_group)
    decisions = []
    for index in range(num_groups):
        pods, is_serving = by_group.get(index, ()), index in serving
        decision = decide_group(
            context,
            last_statuses.get(index, GroupStatus(index=index)),
            pods,
            may_replace=may_continue and (not is_serving or num_may_stop > 0),
            report=reports.get(index),
            starts_after=min(incomplete - {index}, default=None),
        )
        if decision.status.epoch_start_time is None:
            incomplete.discard(index)  # the operator requests no pods for this group now
        elif decision.creates and one_at_a_time and _delays_others(context, decision.status):
            incomplete.add(index)
        if is_serving and decision.deletes:
            num_may_stop -= 1
        if index in outdated and decision.runs and decision.refusal is None:
            # Report why the group keeps its older revision: the new revision may have a problem.
            decision = replace(decision, refusal=problem)
        decisions.append(decision)
    return decisions


def _find_incomplete(
    context: Context, last_statuses: Mapping[int, GroupStatus], by_group: Mapping[int, Sequence[PodView]]
) -> set[int]:
    """Returns the indices of groups whose epoch has just begun and lacks pods. Other groups wait for these.

    The set is empty unless the API server refused a pod, because only then groups start one at a time.
    """
    if context.refused_worker is None:
        return set()
    incomplete = set()
    for index in range(context.replicas):
        status, pods = last_statuses.get(index, GroupStatus(index=index)), by_group.get(index, ())
        current = [pod for pod in pods if epoch_of(pod) == status.epoch and not pod.ended]
        origin = EpochOrigin.from_pods(context, status, current)
        if _delays_others(context, status) and origin.missing_indices(current):
            incomplete.add(index)
    return incomplete


def _delays_others(context: Context, status: GroupStatus) -> bool:
    """Reports whether the group's epoch began less than `_MAX_WAIT_FOR_PODS` ago, so that others wait."""
    began = status.epoch_start_time
    return began is not None and context.now - began < _MAX_WAIT_FOR_PODS


def find_unfinished_rollout(
    decisions: Sequence[GroupDecision], revision: str | None, *, model_problem: str
) -> Rollout | None:
    """Returns the rollout that is in progress, or None if no group runs an older revision.

    Args:
        revision: name of the current spec's revision.
        model_problem: why the model cannot be read, or "".
    """
    outdated = [each for each in decisions if each.runs and each.status.revision != revision]
    if not outdated:
        return None
    obstacles = [obstacle for obstacle in map(_find_obstacle, decisions) if obstacle]
    first_obstacle = obstacles[0] if obstacles else ""
    return Rollout(outdated=len(outdated), wanted=len(decisions), stuck=model_problem or first_obstacle)


def _find_obstacle(decision: GroupDecision) -> str:
    """Returns why this group keeps its old revision until the user acts, or ""."""
    if decision.refusal is not None and decision.refusal.reason != WAITING_FOR_MODEL:
        return decision.refusal.message
    if decision.status.phase is GroupPhase.FAILED:
        return f"group {decision.status.index}: {decision.status.message}"
    return ""


def _is_serving(status: GroupStatus, pods: Sequence[PodView]) -> bool:
    """Reports whether a group serves: all its pods exist and are ready, and clients reach its leader.

    Clients do not reach a leader that lost the labels by which the Service for clients selects it.
    """
    newest = max((epoch_of(pod) for pod in pods), default=0)
    current = [pod for pod in pods if epoch_of(pod) == newest]
    current_names = {pod.name for pod in current}
    all_exist = all(entry.pod in current_names for entry in status.members)
    return all_exist and not is_cut_off(current) and all(pod.ready and not pod.ended for pod in current)
