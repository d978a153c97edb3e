"""Pods that do not end by themselves: on lost nodes, or blocked by a finalizer or a container. Pure.

A deleted pod stays until its kubelet confirms its end. A lost node never confirms it, so the operator
force-deletes the node's pods and the next epoch can start. All times compared here come from the operator's
clock.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from heteroinfer_contract import names
from heteroinfer_operator.api import RestartSpec
from heteroinfer_operator.cluster import DeleteObject, PodView, ResourceObservation
from heteroinfer_operator.nodes.node_view import NodeView
from heteroinfer_operator.quantity import parse_duration_s
from heteroinfer_operator.reconcile.epoch_end import NODE_LOST, EpochEnd


def describe_still_running(pods: Sequence[PodView]) -> str:
    """Describes the first pod that a container of a webhook keeps from ending, or "".

    A kubelet reports the end of a worker in a deleted pod only when all containers of the pod have ended, so
    the container is also described while the pod is being deleted.
    """
    pod = next((pod for pod in pods if pod.still_running), None)
    if pod is None:
        return ""
    containers = ", ".join(pod.still_running)[:512]
    state = "is being deleted" if pod.termination is None else "its worker has ended"
    effect = "may keep" if pod.termination is None else "keeps"
    return (
        f"pod {pod.name}: {state}, but container {containers} still runs and {effect} the pod from "
        "ending (a webhook added the container, for example of a service mesh). Exclude pods with the label "
        f"{names.LABEL_RESOURCE} from that webhook"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLoss:
    """Detects lost nodes.

    Attributes:
        nodes: nodes by name; None if the operator may not read nodes. Then no node counts as lost.
        after: how long a node may send no heartbeat, `restart.nodeLostAfter`.
    """

    nodes: Mapping[str, NodeView] | None
    after: timedelta
    now: datetime

    @classmethod
    def from_observation(
        cls, observation: ResourceObservation, restart: RestartSpec, now: datetime
    ) -> "NodeLoss":
        """Builds the detector from the observed nodes."""
        nodes = observation.nodes
        return cls(
            nodes=None if nodes is None else {node.name: node for node in nodes},
            after=timedelta(seconds=parse_duration_s(restart.node_lost_after)),
            now=now,
        )

    def is_silent(self, pod: PodView) -> bool:
        """Reports whether the pod's node has sent no heartbeat for too long."""
        lost_from = self._lost_from(pod)
        return lost_from is not None and lost_from <= self.now

    def find_epoch_end(self, pods: Sequence[PodView]) -> EpochEnd | None:
        """Returns the end of an epoch with a pod on a lost or deleted node, or None."""
        pod = next((pod for pod in pods if self._cannot_confirm_end(pod)), None)
        if pod is None:
            return None
        message = f"{self._describe_lost_node(pod)}; the operator treats the pod as lost"
        return EpochEnd(reason=NODE_LOST, message=message, counted=False)

    def build_deletes(
        self, pods: Sequence[PodView], *, grace_s: int | None, after_status: bool = False
    ) -> tuple[DeleteObject, ...]:
        """Returns the deletes of the given pods, by force if their kubelet can no longer confirm the end.

        A pod that is already being deleted gets no second delete, except by force.

        Args:
            grace_s: grace period for deletes without force; None for the grace period in each pod's spec.
            after_status: whether the deletes wait until the status is written.
        """
        forced = {pod.name for pod in pods if self._cannot_confirm_end(pod)}
        return tuple(
            DeleteObject(
                kind="Pod",
                name=pod.name,
                uid=pod.uid,
                grace_s=0 if pod.name in forced else grace_s,
                after_status=after_status,
            )
            for pod in pods
            if not pod.deleting or pod.name in forced
        )

    def next_check_s(self, pods: Sequence[PodView]) -> float | None:
        """Returns the seconds until the next time limit of these pods, or None without a limit.

        The limit of a silent node is the time from which it counts as lost. The limit of a pod with a
        finalizer, or with a node that does not exist, is the end of the pod's grace period.
        """
        limits = [self._lost_from(pod) for pod in pods]
        limits += [pod.gone_by for pod in pods if self._has_no_node(pod) or pod.finalizers]
        waits = [(limit - self.now).total_seconds() for limit in limits if limit is not None]
        return min((wait for wait in waits if wait > 0), default=None)

    def describe_blocked(self, pods: Sequence[PodView]) -> str:
        """Describes the first pod on a silent node, or else the first pod that does not end.

        Returns "" if there is no such pod.
        """
        on_silent_node = (self._describe_lost_node(pod) for pod in pods if self._lost_from(pod) is not None)
        return next(on_silent_node, "") or self.describe_finalizer(pods) or describe_still_running(pods)

    def describe_finalizer(self, pods: Sequence[PodView]) -> str:
        """Describes the first pod that a finalizer blocks after its grace period, or ""."""
        blocked_pods = [pod for pod in pods if pod.deleting and pod.finalizers and self._is_past_grace(pod)]
        if not blocked_pods:
            return ""
        finalizers = ", ".join(blocked_pods[0].finalizers)[:512]
        return (
            f"pod {blocked_pods[0].name} is being deleted, but finalizer {finalizers} blocks it. The "
            "controller that owns the finalizer must remove it"
        )

    def _describe_lost_node(self, pod: PodView) -> str:
        """Describes why the node of this pod counts as lost: no heartbeat, or no node."""
        node = self.nodes.get(pod.node) if self.nodes else None
        if node is None:
            return f"node {pod.node} of pod {pod.name} no longer exists"
        return (
            f"node {pod.node} of pod {pod.name} is unreachable: its kubelet has sent no heartbeat since "
            f"{node.unreachable_since:%Y-%m-%d %H:%M:%S} UTC or earlier"
        )

    def _lost_from(self, pod: PodView) -> datetime | None:
        """Returns the time from which the node of this pod counts as lost, or None."""
        node = self.nodes.get(pod.node) if self.nodes else None
        if node is None or node.unreachable_since is None:
            return None
        return node.unreachable_since + self.after

    def _has_no_node(self, pod: PodView) -> bool:
        """Reports whether a pod that is being deleted is bound to a node that does not exist."""
        return self.nodes is not None and pod.deleting and pod.node != "" and pod.node not in self.nodes

    def _cannot_confirm_end(self, pod: PodView) -> bool:
        """Reports whether the kubelet of the pod's node can no longer confirm the end of the pod.

        If the node does not exist, the answer is False until the pod's grace period ends, because the node
        may be newer than the operator's list of nodes.
        """
        return self.is_silent(pod) or (self._has_no_node(pod) and self._is_past_grace(pod))

    def _is_past_grace(self, pod: PodView) -> bool:
        return pod.gone_by is not None and pod.gone_by <= self.now
