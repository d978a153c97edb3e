"""Leaders that no longer answer the operator while Kubernetes reports their pods as Ready. Pure.

Kubernetes takes up to 50 s to report a lost node, and until then the node's pods stay Ready. A silent leader
does not end its epoch: the network between operator and node may have failed instead. The conditions become
Unknown. While the API server does not show pods, only the leader's report shows whether the group serves.
"""

from dataclasses import replace
from typing import Final

from heteroinfer_contract.group_report import GroupReport
from heteroinfer_operator.api import GroupPhase
from heteroinfer_operator.reconcile.one_group.decision import GroupDecision

REASON: Final = "LeaderSilent"
MIN_SILENT_S: Final = 0.8
"""Shortest silence to report. Three connections fail in this time, so more than one packet is lost."""
_RARE_CHECKS_AFTER_S: Final = 5.0
"""Silence after which checks are rare."""
_FREQUENT_CHECK_S: Final = 1.0
"""Seconds until the next check of a leader that has been silent for a short time."""
_RARE_CHECK_S: Final = 10.0
"""Seconds until the next check of a leader that has been silent for a long time."""


def with_silence(decision: GroupDecision, silent_s: float | None) -> GroupDecision:
    """Marks the leader of a Ready group as silent in the group's decision, and sets an early next check.

    For a silence below MIN_SILENT_S, only sets an early next check.

    Args:
        silent_s: seconds for which the leader has been silent; None while the leader answers the operator.
    """
    if silent_s is None or decision.status.phase is not GroupPhase.READY:
        return decision
    check_s = _FREQUENT_CHECK_S if silent_s < _RARE_CHECKS_AFTER_S else _RARE_CHECK_S
    soonest_s = min(wait for wait in (decision.look_again_s, check_s) if wait is not None)
    message = (
        f"group {decision.status.index}: the operator cannot reach the leader, although the leader answered "
        "before and Kubernetes reports the leader's pod as Ready. Check the leader's node, and the network "
        "between operator and leader"
    )
    return replace(
        decision, look_again_s=soonest_s, silent_leader=message if silent_s >= MIN_SILENT_S else ""
    )


def with_silence_by_report(decision: GroupDecision, report: GroupReport | None) -> GroupDecision:
    """Marks the leader of a Ready group as silent if the leader does not report the group as ready.

    Call this function while the API server does not show the pods. Then only the leader's report shows the
    state of the group. A leader that does not accept the operator's authentication reports epoch 0, which
    counts as the current epoch.
    """
    status = decision.status
    # Without measurements, the operator may never have reached this leader. Then the silence proves nothing.
    if status.phase is not GroupPhase.READY or status.measured_time is None:
        return decision
    is_current = report is not None and report.epoch in {0, status.epoch}
    reports_ready = report is not None and is_current and report.ready
    message = (
        f"group {status.index}: Kubernetes' API server does not show the pods, and the leader does not "
        "report the group as ready. Check Kubernetes' API server, and the log of the leader"
    )
    soonest_s = min(wait for wait in (decision.look_again_s, _FREQUENT_CHECK_S) if wait is not None)
    return replace(
        decision, look_again_s=soonest_s, silent_leader=decision.silent_leader if reports_ready else message
    )
