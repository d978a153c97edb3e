"""Pods that do not go by themselves: when those of lost nodes are given up, and who holds others. Pure.

A pod that is deleted stays until its kubelet says that it has ended. A node that is lost never
says so: its pods are deleted by force, so that the next epoch can start. All stamps that are compared
here are of one clock, the operator's.
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
    """Returns which container of others keeps which pod from ending, "" if none does."""
    pod = next((pod for pod in pods if pod.still_running), None)
    if pod is None:
        return ""
    who = ", ".join(pod.still_running)[:512]
    return (
        f"pod {pod.name}: its worker has ended, but container {who} still runs and keeps the pod (somebody "
        "added it when the pod was created, such as a service mesh). Keep such containers out of pods with "
        f"the label {names.LABEL_RESOURCE}"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLoss:
    """What is known of the nodes of pods.

    Attributes:
        nodes: by name; None where nodes may not be read: then no node is ever taken for lost.
        after: how long a node may be silent, `restart.nodeLostAfter`.
    """

    nodes: Mapping[str, NodeView] | None
    after: timedelta
    now: datetime

    @classmethod
    def of(cls, observation: ResourceObservation, restart: RestartSpec, now: datetime) -> "NodeLoss":
        """Returns the loss of nodes in an observation."""
        nodes = observation.nodes
        return cls(
            nodes=None if nodes is None else {node.name: node for node in nodes},
            after=timedelta(seconds=parse_duration_s(restart.node_lost_after)),
            now=now,
        )

    def is_silent(self, pod: PodView) -> bool:
        """Returns whether the pod's node has been silent for too long."""
        given_up = self._given_up(pod)
        return given_up is not None and given_up <= self.now

    def find_epoch_end(self, pods: Sequence[PodView]) -> EpochEnd | None:
        """Returns the end of an epoch that has a pod on a lost node, or on one that was deleted, or None."""
        pod = next((pod for pod in pods if self._is_orphan(pod)), None)
        if pod is None:
            return None
        return EpochEnd(reason=NODE_LOST, message=f"{self._describe(pod)}; it is given up", counted=False)

    def deletes(
        self, pods: Sequence[PodView], *, grace_s: int | None, after_status: bool = False
    ) -> tuple[DeleteObject, ...]:
        """Returns the deletion of these pods, by force where nobody is left to say that they ended.

        Those that are being deleted already are left to end. `grace_s` None takes each pod's own.
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
        """Returns when one of these pods may have to be given up, or is held, in seconds, or None."""
        moments = [self._given_up(pod) for pod in pods]
        moments += [pod.gone_by for pod in pods if self._is_nowhere(pod) or pod.finalizers]
        waits = [(moment - self.now).total_seconds() for moment in moments if moment is not None]
        return min((wait for wait in waits if wait > 0), default=None)

    def message(self, pods: Sequence[PodView]) -> str:
        """Returns which pod's node is silent, or what keeps which pod from going, "" if nothing does."""
        silent = (self._describe(pod) for pod in pods if self._given_up(pod) is not None)
        return next(silent, "") or self.find_held(pods) or find_still_running(pods)

    def find_held(self, pods: Sequence[PodView]) -> str:
        """Returns which pod is past its grace period and held by whom, "" if none is."""
        held = [pod for pod in pods if pod.deleting and pod.finalizers and self._is_past_grace(pod)]
        if not held:
            return ""
        who = ", ".join(held[0].finalizers)[:512]
        return f"pod {held[0].name} is held by finalizer {who}: whoever has set it must let the pod go"

    def _describe(self, pod: PodView) -> str:
        node = self.nodes.get(pod.node) if self.nodes else None
        if node is None:
            return f"node {pod.node} of pod {pod.name} does not exist any more"
        since = node.unreachable_since
        return f"node {pod.node} of pod {pod.name} has sent no heartbeat since {since:%H:%M:%S} UTC"

    def _given_up(self, pod: PodView) -> datetime | None:
        node = self.nodes.get(pod.node) if self.nodes else None
        return None if node is None or node.unreachable_since is None else node.unreachable_since + self.after

    def _is_nowhere(self, pod: PodView) -> bool:
        """Returns whether a pod that shall go is bound to a node that does not exist."""
        return self.nodes is not None and pod.deleting and pod.node != "" and pod.node not in self.nodes

    def _is_orphan(self, pod: PodView) -> bool:
        """Returns whether nobody will ever say that this pod has ended.

        Where its node does not exist, it is not believed before the pod's grace period has passed:
        the node may just not have been seen yet.
        """
        return self.is_silent(pod) or (self._is_nowhere(pod) and self._is_past_grace(pod))

    def _is_past_grace(self, pod: PodView) -> bool:
        return pod.gone_by is not None and pod.gone_by <= self.now
