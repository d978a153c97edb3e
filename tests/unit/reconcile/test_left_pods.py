"""Pods that outlive their resource: only pods on lost nodes are force-deleted."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from heteroinfer_operator.cluster import DeleteObject, PodView
from heteroinfer_operator.nodes.node_view import NodeView
from heteroinfer_operator.reconcile.left_pods import decide_left_pods

NOW = datetime(2026, 11, 26, 12, tzinfo=UTC)
LEFT = PodView(
    name="demo-0-1-1",
    uid="uid-1",
    labels={},
    created=NOW - timedelta(hours=1),
    node="far",
    deleting=True,
    gone_by=NOW - timedelta(seconds=1),
)
BY_FORCE = DeleteObject(kind="Pod", name=LEFT.name, uid=LEFT.uid, grace_s=0)


def node(*, silent_s: float | None = None) -> NodeView:
    since = None if silent_s is None else NOW - timedelta(seconds=silent_s)
    return NodeView(name="far", allocatable={}, unreachable_since=since)


@pytest.mark.parametrize("nodes", [(), (node(silent_s=61),)], ids=["no such node", "silent for a minute"])
def test_a_deleting_pod_on_a_lost_node_is_force_deleted(nodes: tuple[NodeView, ...]) -> None:
    assert decide_left_pods([LEFT], nodes, NOW) == (BY_FORCE,)


@pytest.mark.parametrize("nodes", [None, (node(),), (node(silent_s=30),)], ids=["unread", "well", "silent"])
def test_a_pod_on_a_possibly_live_node_is_not_force_deleted(nodes: tuple[NodeView, ...] | None) -> None:
    assert decide_left_pods([LEFT], nodes, NOW) == ()


def test_a_pod_without_a_deletion_stays() -> None:
    """The operator's cache may lack an existing resource."""
    assert decide_left_pods([replace(LEFT, deleting=False, gone_by=None)], (node(silent_s=600),), NOW) == ()


def test_a_pod_in_its_grace_period_stays_on_an_unknown_node() -> None:
    assert decide_left_pods([replace(LEFT, gone_by=NOW + timedelta(seconds=1))], (), NOW) == ()
