"""Tests the test cluster's second node: it joins, can be disconnected, and leaves nothing behind."""

import json

from tests.cluster import processes
from tests.cluster.errors import ClusterError
from tests.cluster.image_store import PAUSE
from tests.cluster.joined_node import TAINT, joined_node
from tests.cluster.node import NodeCluster
from tests.cluster.tests.test_node import build_pod
from tests.cluster.traces import observe_traces

WAIT = "--for=jsonpath={.status.phase}=Running"


def test_a_second_node_joins_is_disconnected_and_leaves(node_cluster: NodeCluster) -> None:
    before = observe_traces()

    def kubelet_answers(name: str) -> bool:
        try:
            return node_cluster.kubectl("get", "--raw", f"/api/v1/nodes/{name}/proxy/healthz") == "ok"
        except ClusterError:
            return False

    with joined_node(node_cluster) as node:
        pod = json.loads(build_pod("there", {"image": PAUSE}))
        pod["spec"]["nodeSelector"] = {"kubernetes.io/hostname": node.name}
        pod["spec"]["tolerations"] = [{"key": TAINT, "operator": "Exists"}]
        node_cluster.kubectl("apply", "-f", "-", stdin=json.dumps(pod))
        node_cluster.kubectl("wait", WAIT, "pod/there", "--timeout=30s")
        assert kubelet_answers(node.name)
        node.cut_off()
        assert not kubelet_answers(node.name)
        node.connect()
        processes.wait_until("the link", lambda: kubelet_answers(node.name), timeout_s=30)
        node_cluster.kubectl("delete", "pod", "there", "--timeout=30s")
    assert node.name not in node_cluster.kubectl("get", "nodes", "-o", "name")
    processes.wait_until("the end of all traces", lambda: observe_traces() <= before, timeout_s=10)
