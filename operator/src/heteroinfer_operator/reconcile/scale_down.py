"""Stops the groups that are no longer wanted. Pure.

A group that is no longer wanted may be the only group that serves: an autoscaler may scale down while a
wanted group restarts. The operator keeps such a group until a wanted group serves, so that clients always
have a group.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Final

from heteroinfer_contract.group_report import GroupReport
from heteroinfer_operator.api import GroupPhase, GroupStatus, StartupPhase
from heteroinfer_operator.cluster import PodView
from heteroinfer_operator.errors import Shortage
from heteroinfer_operator.reconcile.one_group.decide import decide_group
from heteroinfer_operator.reconcile.one_group.decision import GroupDecision
from heteroinfer_operator.reconcile.one_group.stopping import stop_group
from heteroinfer_operator.reconcile.reconcile_context import Context

MAX_CAPACITY_WAIT: Final = timedelta(seconds=30)
"""How long a wanted group may wait for nodes beside a kept group, whose nodes it may need."""


def decide_unwanted(
    context: Context,
    last_statuses: Mapping[int, GroupStatus],
    by_group: Mapping[int, Sequence[PodView]],
    reports: Mapping[int, GroupReport],
    wanted: Sequence[GroupDecision],
) -> list[GroupDecision]:
    """Stops the groups that are no longer wanted. Keeps one serving group while no wanted group serves.

    Args:
        wanted: decisions about the wanted groups in this reconcile.
    """
    keeps_one = _needs_kept_group(context, wanted)
    decisions = []
    for index, pods in sorted(by_group.items()):
        if index < context.replicas:
            continue
        status = last_statuses.get(index, GroupStatus(index=index))
        kept = _keep_if_serving(context, status, pods, reports.get(index)) if keeps_one else None
        keeps_one = keeps_one and kept is None  # one kept group is enough
        decisions.append(kept or stop_group(context, status, pods, "stopping: scaled down"))
    return decisions


def _needs_kept_group(context: Context, wanted: Sequence[GroupDecision]) -> bool:
    """Reports whether a group that is no longer wanted must keep serving.

    This is so if no wanted group serves or sleeps, unless all wanted groups have waited long for nodes: then
    they may need the nodes of the kept group.
    """
    phases_that_suffice = {GroupPhase.READY, GroupPhase.SLEEPING}
    is_wanted_group_up = any(decision.status.phase in phases_that_suffice for decision in wanted)
    if context.life.suspend or is_wanted_group_up:
        return False
    return any(_capacity_wait(context, decision) < MAX_CAPACITY_WAIT for decision in wanted)


def _capacity_wait(context: Context, decision: GroupDecision) -> timedelta:
    """Returns how long a group has waited for nodes; 0 if the group does not wait for nodes.

    A group that was refused for another reason than a shortage waits for a new spec, not for nodes.
    """
    startup, refusal = decision.status.startup, decision.refusal
    is_other_refusal = refusal is not None and not isinstance(refusal, Shortage)
    if startup is None or startup.phase is not StartupPhase.SCHEDULING or is_other_refusal:
        return timedelta(0)
    return context.now - startup.since


def _keep_if_serving(
    context: Context,
    status: GroupStatus,
    pods: Sequence[PodView],
    report: GroupReport | None,
) -> GroupDecision | None:
    """Returns the decision that keeps a serving group; None if the group does not serve."""
    decision = decide_group(context, status, pods, may_replace=False, report=report)
    changes_pods = bool(decision.creates or decision.deletes)
    if decision.status.phase is not GroupPhase.READY or changes_pods:
        return None
    awaited = "group 0" if context.replicas == 1 else f"a group with an index below {context.replicas}"
    return replace(
        decision,
        status=decision.status.changed(message=f"scaled down: this group stops once {awaited} serves"),
        look_again_s=min(filter(None, (decision.look_again_s, MAX_CAPACITY_WAIT.total_seconds()))),
    )
