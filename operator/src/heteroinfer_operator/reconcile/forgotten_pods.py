"""Pods that kube-scheduler has forgotten after a preemption. Pure.

If kube-scheduler preempts pods of lower priority for two pods on one node at the same time, it can leave one
of the two in its queue (kubernetes/kubernetes#139162, #141694). That pod has a nominated node and fits there,
but gets no node. With kube-scheduler 1.35.4 this happened in 2 of 55 trials, and the observed pod still had
no node after 8 minutes (2026-11-28). The scheduler places a new pod immediately.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Final

from heteroinfer_contract import names
from heteroinfer_operator.cluster import PodView, RecordEvent, ResourceObservation
from heteroinfer_operator.nodes.placement import build_free_nodes, can_place
from heteroinfer_operator.reconcile.group_planner import read_gang
from heteroinfer_operator.reconcile.startup import POD_REPLACED_REASON

FORGOTTEN_AFTER_S: Final = 30.0
"""How long a pod must fit on its nominated node before the operator replaces it. By default, the scheduler
makes its next attempt after at most 10 s (`podMaxBackoffSeconds`)."""
_CHECK_MARGIN_S: Final = 0.1
"""Margin that makes a check run after the time that it waits for, not at it."""


def find_overlooked(observation: ResourceObservation) -> list[PodView]:
    """Returns the pods without a node that fit on the node that the scheduler nominated for them.

    Pods of gangs are left out, because their scheduler may wait for other pods.
    """
    nominated = [
        pod
        for pod in observation.pods
        if pod.nominated_node and not pod.node and not pod.ended
        if read_gang([pod]) is None
    ]
    return [pod for pod in nominated if _fits(pod, observation)]


def _fits(pod: PodView, observation: ResourceObservation) -> bool:
    """Reports whether a pod fits on its nominated node beside all other pods that the operator knows."""
    name = f"{observation.resource.key.namespace}/{pod.name}"
    own = next((demand for demand in observation.promised if demand.name == name), None)
    others = [demand for demand in observation.promised if demand.name != name]
    free_nodes = build_free_nodes(observation.nodes or (), others)
    return own is not None and any(
        can_place(own, free_node) for free_node in free_nodes if free_node.node.name == pod.nominated_node
    )


def find_forgotten(overlooked: Sequence[PodView], lasted_s: Mapping[str, float]) -> list[PodView]:
    """Returns the pods that the scheduler has overlooked for so long that it has forgotten them.

    Args:
        lasted_s: seconds for which this process has seen each pod overlooked, by uid.
    """
    return [pod for pod in overlooked if lasted_s.get(pod.uid, 0.0) >= FORGOTTEN_AFTER_S]


def next_check_s(overlooked: Collection[PodView], lasted_s: Mapping[str, float]) -> float | None:
    """Returns the seconds until the next overlooked pod counts as forgotten, or None."""
    waits = [FORGOTTEN_AFTER_S - lasted_s.get(pod.uid, 0.0) for pod in overlooked]
    return min((wait + _CHECK_MARGIN_S for wait in waits if wait > 0), default=None)


def build_event(pod: PodView) -> RecordEvent:
    """Returns the event that reports the replacement of a forgotten pod."""
    group, epoch = (pod.labels.get(label, "") for label in (names.LABEL_GROUP, names.LABEL_EPOCH))
    message = (
        f"group {group} epoch {epoch}: pod {pod.name} has fitted on node {pod.nominated_node} for "
        f"{FORGOTTEN_AFTER_S:.0f} s, but the scheduler, which preempted pods for it, has not placed it; the "
        "operator replaces it"
    )
    return RecordEvent(reason=POD_REPLACED_REASON, message=message[:1000], warning=True)
