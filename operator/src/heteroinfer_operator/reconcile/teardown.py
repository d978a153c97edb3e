"""Stops a resource whose deletion another controller's finalizer blocks. Pure.

The operator sets no finalizer: garbage collection deletes the children of a resource by their owner
references, even if no operator runs. The operator sees a resource in deletion only if the user waits for its
children (`kubectl delete --cascade=foreground`) or another controller's finalizer blocks the deletion.
"""

from datetime import datetime
from typing import Final

from heteroinfer_operator.api import (
    ConditionType,
    HeteroInferenceStatus,
    merge_conditions,
    parse_life,
)
from heteroinfer_operator.cluster import Decision, ResourceObservation
from heteroinfer_operator.reconcile import transitions
from heteroinfer_operator.reconcile.conditions import ENDING, HELD
from heteroinfer_operator.reconcile.life import condition
from heteroinfer_operator.reconcile.next_status import status_write
from heteroinfer_operator.reconcile.node_loss import NodeLoss, find_still_running

_REASON = "Deleting"
_LEAVES_CHILDREN: Final = "orphan"
"""Finalizer of a deletion that keeps the children (`kubectl delete --cascade=orphan`)."""


def decide_teardown(
    observation: ResourceObservation, status: HeteroInferenceStatus, now: datetime
) -> Decision:
    """Stops a resource that is being deleted; running requests may finish first."""
    if not observation.pods or _LEAVES_CHILDREN in observation.resource.finalizers:
        return Decision()
    node_loss = NodeLoss.of(observation, parse_life(observation.resource.spec).restart, now)
    return Decision(
        actions=(
            # The deletes come first: they must not depend on a successful write of the status.
            *node_loss.deletes(observation.pods, grace_s=None),
            *status_write(observation, _ending(observation, status, node_loss)),
        ),
        look_again_s=node_loss.look_again_s(observation.pods),
    )


def _ending(
    observation: ResourceObservation, status: HeteroInferenceStatus, node_loss: NodeLoss
) -> HeteroInferenceStatus:
    generation, now = observation.resource.generation, node_loss.now
    held = node_loss.find_finalizer_block(observation.pods)
    words = held or find_still_running(observation.pods) or ENDING
    reported = {
        ConditionType.AVAILABLE: False,
        ConditionType.READY: False,
        ConditionType.STALLED: False,
        ConditionType.PROGRESSING: not held,
        ConditionType.DEGRADED: False,
    }
    fresh = [
        condition(kind, holds, _reason(kind, held), words, now=now, generation=generation)
        for kind, holds in reported.items()
    ]
    known = {kind.value for kind in ConditionType} - {kind.value for kind in reported}
    kept = {each.type: each for each in status.conditions if each.type in known}
    return status.changed(
        observed_generation=generation,
        ready_replicas=0,
        conditions=merge_conditions(status.conditions, [*kept.values(), *fresh], now=now),
        groups=tuple(transitions.deleted(group, message=words) for group in status.groups),
    )


def _reason(kind: ConditionType, held: str) -> str:
    return HELD if held and kind is ConditionType.PROGRESSING else _REASON
