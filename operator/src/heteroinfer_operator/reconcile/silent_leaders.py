"""What leaders say, or no longer say, while their pods count as Ready. Pure.

Kubernetes takes up to 50 s to report that a node is gone, and until then its pods stay Ready. Nothing ends
because of a silent leader: the network between operator and node may be gone instead. The status is Unknown.
While the API server does not show pods, the leader's report is all that the operator can learn of a group.
"""

from dataclasses import replace
from typing import Final

from heteroinfer_contract.group_report import GroupReport
from heteroinfer_operator.api import GroupPhase
from heteroinfer_operator.reconcile.one_group.decision import GroupDecision

REASON: Final = "LeaderSilent"
SILENT_S: Final = 0.8
"""Every connection of so many seconds failed, three at least: more than a lost packet."""
_SURE_S: Final = 5.0
_LOOK_SOON_S: Final = 1.0
_LOOK_AGAIN_S: Final = 10.0


def with_silence(decision: GroupDecision, silent_s: float | None) -> GroupDecision:
    """Returns the decision of a group with what the silence of its leader means.

    `silent_s` is None while the leader is reached.
    """
    if silent_s is None or decision.status.phase is not GroupPhase.READY:
        return decision
    look_s = _LOOK_SOON_S if silent_s < _SURE_S else _LOOK_AGAIN_S
    soonest_s = min(wait for wait in (decision.look_again_s, look_s) if wait is not None)
    words = (
        f"group {decision.status.index}: the operator cannot reach the leader, which answered before, and "
        "Kubernetes reports its pod as Ready. Check the node of the leader, and the network to it."
    )
    return replace(decision, look_again_s=soonest_s, silent=words if silent_s >= SILENT_S else "")


def with_report_alone(decision: GroupDecision, report: GroupReport | None) -> GroupDecision:
    """Returns the decision of a group of which nobody watches the pods."""
    status = decision.status
    # A leader that never answered cannot be reached from here: its silence says nothing.
    if status.phase is not GroupPhase.READY or status.measured_time is None:
        return decision
    current = report is not None and report.epoch in {0, status.epoch}
    ready = report is not None and current and report.ready
    words = (
        f"group {status.index}: the API server does not show the pods, and the leader does not report the "
        "group as ready. Check the API server, and the log of the leader."
    )
    soonest_s = min(wait for wait in (decision.look_again_s, _LOOK_SOON_S) if wait is not None)
    return replace(decision, look_again_s=soonest_s, silent=decision.silent if ready else words)
