"""Leaders that the operator cannot reach any more while their pods are Ready. Pure.

Kubernetes takes up to 50 s to report that a node is gone, and until then its pods stay Ready. Nothing ends
because of a silent leader: the network between operator and node may be gone instead. The status is Unknown.
"""

from dataclasses import replace
from typing import Final

from heteroinfer_operator.api import GroupPhase
from heteroinfer_operator.reconcile.group_decision import GroupDecision

REASON: Final = "LeaderSilent"
SILENT_S: Final = 3.0
"""Every connection of so many seconds failed: more than a lost packet or a busy switch."""
_SURE_S: Final = 5.0
_LOOK_SOON_S: Final = 1.0
_LOOK_AGAIN_S: Final = 10.0


def with_silence(decision: GroupDecision, silent_s: float | None) -> GroupDecision:
    """Returns the decision of a group with what the silence of its leader means.

    Args:
        decision: of the group.
        silent_s: for how long no connection to the leader has succeeded, or None if it is reached.
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
