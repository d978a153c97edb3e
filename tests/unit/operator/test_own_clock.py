"""The operator's own clock measures a node's loss and a pod's grace period, not other clocks."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heteroinfer_contract import names
from heteroinfer_operator.cluster import PodView, ResourceKey
from heteroinfer_operator.kube.cluster_state import ClusterState
from heteroinfer_operator.kube.own_clock import AwakeClock, OwnClock, utc_now
from heteroinfer_operator.manifests.identity import Owner
from heteroinfer_operator.nodes.node_view import NodeView
from heteroinfer_operator.reconcile.node_loss import NodeLoss

START = datetime(2026, 11, 22, tzinfo=UTC)
AFTER = timedelta(seconds=60)
GRACE_S = 90


class Clocks:
    """The operator's clock and another clock of the cluster."""

    def __init__(self, skew_s: float) -> None:
        self.now = START
        self._skew = timedelta(seconds=skew_s)

    def passed_s(self) -> float:
        """Returns the monotonic seconds since the start."""
        return (self.now - START).total_seconds()

    def theirs(self) -> str:
        """Returns the timestamp that another program of the cluster would write now."""
        return (self.now + self._skew).strftime("%Y-%m-%dT%H:%M:%SZ")


def node(version: int, ready: str, since: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": "n", "uid": "node", "resourceVersion": str(version)},
        "status": {
            "allocatable": {
                "cpu": str(version)
            },  # makes each state different, like a node's images and sizes
            "conditions": [{"type": "Ready", "status": ready, "lastTransitionTime": since}],
        },
    }


def going_pod(version: int, deletion: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": "p",
            "namespace": "ns",
            "uid": "pod",
            "resourceVersion": str(version),
            "creationTimestamp": "2026-11-22T00:00:00Z",
            "deletionTimestamp": deletion,
            "deletionGracePeriodSeconds": GRACE_S,
            "labels": {names.LABEL_RESOURCE: "llama"},
            "ownerReferences": [Owner(key=ResourceKey(namespace="ns", name="llama"), uid="owner").reference],
        },
        "spec": {"nodeName": "n", "containers": []},
        "status": {"phase": "Running", "message": f"state {version}"},
    }


@given(
    skew_s=st.integers(-86400, 86400),
    states=st.lists(st.tuples(st.booleans(), st.integers(1, 50)), min_size=1, max_size=12),
)
def test_a_node_counts_as_lost_by_one_clock(skew_s: int, states: Sequence[tuple[bool, int]]) -> None:
    """The kubelet is silent for some seconds, then not. The node controller's clock is up to a day off."""
    clocks = Clocks(skew_s)
    silences = OwnClock(lambda: clocks.now, clocks.passed_s)
    known_since: datetime | None = None
    stamp: str | None = None
    for silent, seconds in states:
        if not silent:
            known_since = stamp = None
        elif known_since is None:
            known_since, stamp = clocks.now, clocks.theirs()
        silences.record("n", stamp)
        clocks.now += timedelta(seconds=seconds)
        silences.record("n", stamp)  # seen again, like after a list
        view = NodeView(name="n", allocatable={}, unreachable_since=silences.time_of("n"))
        loss = NodeLoss(nodes={"n": view}, after=AFTER, now=clocks.now)
        pod = PodView(name="p", uid="p", labels={}, created=START, node="n")
        assert loss.is_silent(pod) is (known_since is not None and clocks.now - known_since >= AFTER)


@pytest.mark.parametrize("skew_s", [-86400.0 * 365, 0.0, 86400.0 * 365])
def test_a_nodes_silence_and_a_pods_grace_count_by_the_operators_clock(skew_s: float) -> None:
    """Timestamps may be years off. Only the time at which the operator first saw them counts."""
    state = ClusterState(
        None,  # type: ignore[arg-type]  # no request is sent: the test adds the objects
        namespaces=(),
        touched=lambda key: None,
        nodes_changed=lambda: None,
    )
    clocks = Clocks(skew_s)
    stamp = clocks.theirs()
    caches = {cache.collection.label: cache for cache in state.awaited_caches()}
    key = ResourceKey(namespace="ns", name="llama")

    def moments(version: int, ready: str) -> tuple[datetime | None, datetime | None]:
        """Changes both objects; returns the start of the node's silence and the end of the pod's grace."""
        caches["nodes"].store_written(node(version, ready, stamp))
        caches["pods of all namespaces"].store_written(going_pod(version, stamp))
        (view,), (pod,) = state.nodes() or (), state.pods(key, "owner")
        return view.unreachable_since, pod.view.gone_by

    began = utc_now()
    silent_since, gone_by = moments(2, "Unknown")
    assert silent_since is not None
    assert gone_by is not None
    assert began <= silent_since <= utc_now()
    assert began <= gone_by - timedelta(seconds=GRACE_S) <= utc_now()
    assert moments(3, "Unknown") == (silent_since, gone_by), "other changes restart no count"
    assert moments(4, "True") == (None, gone_by)


def test_a_pause_of_the_operator_does_not_count_as_silence_of_a_node() -> None:
    """During the pause of the process, the node may come back. The watch shows that only later."""
    now, passed_s = START, 0.0

    def pass_time(seconds: float) -> None:
        nonlocal now, passed_s
        now, passed_s = now + timedelta(seconds=seconds), passed_s + seconds

    awake = AwakeClock(lambda: passed_s)
    silences = OwnClock(lambda: now, awake.awake_s)
    silences.record("n", "since")
    for _ in range(20):
        pass_time(AwakeClock.TICK_S)
        awake.awake_s()
    pass_time(3600)
    moment = silences.time_of("n")
    assert moment is not None
    assert timedelta(seconds=20) <= now - moment <= timedelta(seconds=26)


@pytest.mark.parametrize("set_by", [timedelta(hours=1), timedelta(days=-1)])
def test_setting_the_clock_changes_no_wait(set_by: timedelta) -> None:
    """Once, setting the operator's clock made a node count as lost without any silence."""
    now, passed_s = START, 0.0
    silences = OwnClock(lambda: now, lambda: passed_s)
    silences.record("n", "since")
    for _ in range(3):
        now, passed_s = now + timedelta(milliseconds=10_003), passed_s + 10
        assert silences.time_of("n") == START, "small differences of the clock do not change the time"
    now += set_by
    moment = silences.time_of("n")
    assert moment is not None
    assert abs((now - moment).total_seconds() - 30) < 0.1
    assert silences.time_of("n") == moment
