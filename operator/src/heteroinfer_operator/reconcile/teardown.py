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
    parse_lifecycle,
)
from heteroinfer_operator.cluster import Decision, ResourceObservation
from heteroinfer_operator.reconcile import transitions
from heteroinfer_operator.reconcile.conditions import ENDING, HELD_BY_FINALIZER
from heteroinfer_operator.reconcile.life import build_condition
from heteroinfer_operator.reconcile.next_status import build_status_write
from heteroinfer_operator.reconcile.node_loss import NodeLoss, describe_still_running

_REASON = "Deleting"
_LEAVES_CHILDREN: Final = "orphan"
"""Finalizer of a deletion that keeps the children (`kubectl delete --cascade=orphan`)."""


def decide_teardown(
    observation: ResourceObservation, status: HeteroInferenceStatus, now: datetime
) -> Decision:
    """Deletes the pods of a resource that is being deleted. Running requests may finish first."""
    if not observation.pods or _LEAVES_CHILDREN in observation.resource.finalizers:
        return Decision()
    node_loss = NodeLoss.from_observation(
        observation, parse_lifecycle(observation.resource.spec).restart, now
    )
    return Decision(
        actions=(
            # The deletes come first: they must not depend on a successful write of the status.
            *node_loss.build_deletes(observation.pods, grace_s=None),
            *build_status_write(observation, _build_status(observation, status, node_loss)),
        ),
        look_again_s=node_loss.next_check_s(observation.pods),
    )


def _build_status(
    observation: ResourceObservation, status: HeteroInferenceStatus, node_loss: NodeLoss
) -> HeteroInferenceStatus:
    """Returns the status: the pods end, or a finalizer or container keeps a pod from ending."""
    generation, now = observation.resource.generation, node_loss.now
    blocked_pod = node_loss.describe_finalizer(observation.pods)
    message = blocked_pod or describe_still_running(observation.pods) or ENDING
    holds_by_condition = {
        ConditionType.AVAILABLE: False,
        ConditionType.READY: False,
        ConditionType.STALLED: False,
        ConditionType.PROGRESSING: not blocked_pod,
        ConditionType.DEGRADED: False,
    }
    new_conditions = [
        build_condition(kind, holds, _reason(kind, blocked_pod), message, now=now, generation=generation)
        for kind, holds in holds_by_condition.items()
    ]
    unchanged_types = {kind.value for kind in ConditionType} - {kind.value for kind in holds_by_condition}
    other_conditions = {
        condition.type: condition for condition in status.conditions if condition.type in unchanged_types
    }
    return status.changed(
        observed_generation=generation,
        ready_replicas=0,
        conditions=merge_conditions(
            status.conditions, [*other_conditions.values(), *new_conditions], now=now
        ),
        groups=tuple(transitions.deleted(group, message=message) for group in status.groups),
    )


def _reason(kind: ConditionType, blocked_pod: str) -> str:
    """Returns the reason of a condition; only Progressing names a finalizer that blocks a pod."""
    return HELD_BY_FINALIZER if blocked_pod and kind is ConditionType.PROGRESSING else _REASON
