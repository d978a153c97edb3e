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


def find_still_running(pods: Sequence[PodView]) -> str:
    """Describes the first pod that an injected container keeps from ending, or ""."""
    pod = next((pod for pod in pods if pod.still_running), None)
    if pod is None:
        return ""
    who = ", ".join(pod.still_running)[:512]
    return (
        f"pod {pod.name}: its worker has ended, but container {who} still runs and keeps the pod from ending "
        "(an admission webhook added it, for example a service mesh). Exclude pods with the label "
        f"{names.LABEL_RESOURCE} from that webhook"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLoss:
    """Detects lost nodes.

    Attributes:
        nodes: nodes by name; None if the operator may not read nodes. Then it never treats a node as lost.
        after: how long a node may send no heartbeat, `restart.nodeLostAfter`.
    """

    nodes: Mapping[str, NodeView] | None
    after: timedelta
    now: datetime

    @classmethod
    def of(cls, observation: ResourceObservation, restart: RestartSpec, now: datetime) -> "NodeLoss":
        """Builds the detector from the observed nodes."""
        nodes = observation.nodes
        return cls(
            nodes=None if nodes is None else {node.name: node for node in nodes},
            after=timedelta(seconds=parse_duration_s(restart.node_lost_after)),
            now=now,
        )

    def is_silent(self, pod: PodView) -> bool:
        """Checks whether the pod's node has sent no heartbeat for too long."""
        given_up = self._lost_from(pod)
        return given_up is not None and given_up <= self.now

    def find_epoch_end(self, pods: Sequence[PodView]) -> EpochEnd | None:
        """Ends an epoch that has a pod on a lost or deleted node."""
        pod = next((pod for pod in pods if self._is_orphan(pod)), None)
        if pod is None:
            return None
        message = f"{self._describe_silence(pod)}; the operator treats the pod as lost"
        return EpochEnd(reason=NODE_LOST, message=message, counted=False)

    def deletes(
        self, pods: Sequence[PodView], *, grace_s: int | None, after_status: bool = False
    ) -> tuple[DeleteObject, ...]:
        """Deletes these pods, by force if their kubelet can no longer confirm the end.

        Pods that are already being deleted get no second deletion, except by force. With `grace_s` None, each
        pod's own grace period applies.
        """
        graces = {pod.name: 0 if self._is_orphan(pod) else grace_s for pod in pods}
        return tuple(
            DeleteObject(
                kind="Pod", name=pod.name, uid=pod.uid, grace_s=graces[pod.name], after_status=after_status
            )
            for pod in pods
            if not pod.deleting or self._is_orphan(pod)
        )

    def look_again_s(self, pods: Sequence[PodView]) -> float | None:
        """Seconds until a pod may count as lost or as blocked, or None."""
        moments = [self._lost_from(pod) for pod in pods]
        moments += [pod.gone_by for pod in pods if self._has_deleted_node(pod) or pod.finalizers]
        waits = [(moment - self.now).total_seconds() for moment in moments if moment is not None]
        return min((wait for wait in waits if wait > 0), default=None)

    def blocked_message(self, pods: Sequence[PodView]) -> str:
        """Returns a message about the first pod that is on a silent node or does not end, or ""."""
        silent = (self._describe_silence(pod) for pod in pods if self._lost_from(pod) is not None)
        return next(silent, "") or self.find_finalizer_block(pods) or find_still_running(pods)

    def find_finalizer_block(self, pods: Sequence[PodView]) -> str:
        """Returns a message about the first pod that a finalizer blocks after its grace period, or ""."""
        held = [pod for pod in pods if pod.deleting and pod.finalizers and self._is_past_grace(pod)]
        if not held:
            return ""
        who = ", ".join(held[0].finalizers)[:512]
        return (
            f"pod {held[0].name} is being deleted, but finalizer {who} blocks it. The controller that owns "
            "the finalizer must remove it"
        )

    def _describe_silence(self, pod: PodView) -> str:
        node = self.nodes.get(pod.node) if self.nodes else None
        if node is None:
            return f"node {pod.node} of pod {pod.name} no longer exists"
        since = node.unreachable_since
        return f"node {pod.node} of pod {pod.name} has sent no heartbeat since {since:%H:%M:%S} UTC"

    def _lost_from(self, pod: PodView) -> datetime | None:
        node = self.nodes.get(pod.node) if self.nodes else None
        return None if node is None or node.unreachable_since is None else node.unreachable_since + self.after

    def _has_deleted_node(self, pod: PodView) -> bool:
        """Checks whether a pod that is being deleted is bound to a node that does not exist."""
        return self.nodes is not None and pod.deleting and pod.node != "" and pod.node not in self.nodes

    def _is_orphan(self, pod: PodView) -> bool:
        """Checks whether no kubelet will ever confirm the end of this pod.

        If the pod's node does not exist, the check waits for the end of the pod's grace period: the operator
        may only not have seen the node yet.
        """
        return self.is_silent(pod) or (self._has_deleted_node(pod) and self._is_past_grace(pod))

    def _is_past_grace(self, pod: PodView) -> bool:
        return pod.gone_by is not None and pod.gone_by <= self.now
