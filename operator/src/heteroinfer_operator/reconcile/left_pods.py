"""Pods that outlive their resource. Pure.

Garbage collection deletes the pods of a resource that is gone, and the kubelet of each says when it has
ended. A node that is lost never says so: what is being deleted there goes by force.
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
    """Returns the deletions by force of pods that are being deleted on lost nodes.

    A pod that nobody has deleted stays: only garbage collection knows for certain that its owner is gone.
    What the resource said of `nodeLostAfter` is gone with it: the default counts.

    Args:
        nodes: None where nodes may not be read: then no node is ever taken for lost.
    """
    loss = NodeLoss(
        nodes=None if nodes is None else {node.name: node for node in nodes},
        after=timedelta(seconds=parse_duration_s(RestartSpec().node_lost_after)),
        now=now,
    )
    return loss.deletes([pod for pod in pods if pod.deleting], grace_s=None)
