"""Pods that outlive their resource. Pure.

Garbage collection deletes the pods of a deleted resource, and the kubelet confirms the end of each pod. A
lost node never confirms it, so the operator force-deletes pods that are being deleted there.
"""

from collections.abc import Sequence
from datetime import datetime, timedelta

from heteroinfer_operator.api import RestartSpec
from heteroinfer_operator.cluster import DeleteObject, PodView
from heteroinfer_operator.nodes.node_view import NodeView
from heteroinfer_operator.quantity import parse_duration_s
from heteroinfer_operator.reconcile.node_loss import NodeLoss


def decide_left_pods(
    pods: Sequence[PodView], nodes: Sequence[NodeView] | None, now: datetime
) -> tuple[DeleteObject, ...]:
    """Returns deletes by force of pods that are being deleted on lost nodes.

    A pod without a deletion stays: only garbage collection knows for certain that its owner is gone. The
    resource's `nodeLostAfter` is gone too, so the default applies.

    Args:
        nodes: None if the operator may not read nodes; then it never treats a node as lost.
    """
    loss = NodeLoss(
        nodes=None if nodes is None else {node.name: node for node in nodes},
        after=timedelta(seconds=parse_duration_s(RestartSpec().node_lost_after)),
        now=now,
    )
    return loss.build_deletes([pod for pod in pods if pod.deleting], grace_s=None)
