"""Plays nodes for thousands of pods: kwok replaces their kubelets, and reports the status of pods.

All other parts of the control plane are real: the scheduler places the pods; controllers and garbage
collection see their changes. A placed pod becomes Running and Ready immediately, and again after its node was
lost. A pod in deletion is removed immediately. An inspect pod ends with a model's profile.
"""

import dataclasses
import json
import os
import time
from collections.abc import Mapping
from typing import Any

from heteroinfer_contract import names
from tests.cluster import processes, tools
from tests.cluster.control_plane import GO_ENVIRONMENT
from tests.cluster.errors import ClusterError
from tests.cluster.processes import ProcessIdentity
from tests.cluster.running_cluster import Cluster

READY_TIMEOUT_S = 60.0
LABEL = "heteroinfer.test/kwok"
"""`true` on each of these nodes, so that a real node beside them is ignored."""
_LEASE_S = 40
_RUNNING = r"""
{{ $now := Now }}
conditions:
{{ range $type := list "Initialized" "Ready" "ContainersReady" }}
- {lastTransitionTime: {{ $now | Quote }}, status: "True", type: {{ $type }}}
{{ end }}
containerStatuses:
{{ range .spec.containers }}
- image: {{ .image | Quote }}
  name: {{ .name | Quote }}
  ready: true
  started: true
  restartCount: 0
  state: {running: {startedAt: {{ $now | Quote }}}}
{{ end }}
hostIP: {{ NodeIPWith .spec.nodeName | Quote }}
podIP: {{ PodIPWith .spec.nodeName false .metadata.uid .metadata.name .metadata.namespace | Quote }}
phase: Running
startTime: {{ $now | Quote }}
"""
_ENDED = r"""
{{ $now := Now }}
containerStatuses:
{{ range .spec.containers }}
- image: {{ .image | Quote }}
  name: {{ .name | Quote }}
  ready: false
  restartCount: 0
  state:
    terminated:
      exitCode: EXIT_CODE
      reason: REASON
      message: MESSAGE
      startedAt: {{ $now | Quote }}
      finishedAt: {{ $now | Quote }}
{{ end }}
phase: PHASE
startTime: {{ $now | Quote }}
"""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodeShape:
    """The properties of each node.

    Attributes:
        allocatable: quantities by resource name.
        labels: labels of the node.
    """

    allocatable: Mapping[str, str]
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict)


GPU_NODE = NodeShape(
    allocatable={"cpu": "128", "memory": "1Ti", "pods": "110", "nvidia.com/gpu": "8"},
    labels={"nvidia.com/gpu.product": "NVIDIA-H200", "nvidia.com/gpu.memory": "143771"},
)


def build_stages(profile: str | None, *, finalizers: bool = False) -> list[dict[str, Any]]:
    """Builds kwok's stages of pods. An inspect pod ends with `profile` as its termination message.

    Args:
        profile: a JSON text. None: the caller must end inspect pods and fetch pods.
        finalizers: a deleted pod ends first, and stays while it has finalizers, as with a kubelet.
            Otherwise it is removed immediately, which saves a write for each pod.
    """
    placed = {"key": ".spec.nodeName", "operator": "Exists"}
    alive = {"key": ".metadata.deletionTimestamp", "operator": "DoesNotExist"}
    deleted = {"key": ".metadata.deletionTimestamp", "operator": "Exists"}
    new = {"key": ".status.podIP", "operator": "DoesNotExist"}
    component = f'.metadata.labels["{names.LABEL_COMPONENT}"]'
    looks = [names.COMPONENT_INSPECT] if profile else [names.COMPONENT_INSPECT, names.COMPONENT_FETCH]
    inspects = {"key": component, "operator": "In", "values": looks}
    runs = {"key": component, "operator": "NotIn", "values": looks}
    ready = '.status.conditions.[] | select( .type == "Ready" ) | .status'
    marked = {"key": ready, "operator": "In", "values": ["False"]}
    if finalizers:
        killed = _ended("Failed", "Error", 137, "")
        goes = [
            _stage("pod-ends", [placed, deleted, _phase("Pending", "Running")], {"statusTemplate": killed}),
            _stage("pod-goes", [deleted, _phase("Succeeded", "Failed")], {"delete": True}),
        ]
    else:
        goes = [_stage("pod-goes", [deleted], {"finalizers": {"empty": True}, "delete": True})]
    inspected = []
    if profile:
        succeeded = {"statusTemplate": _ended("Succeeded", "Completed", 0, profile)}
        inspected = [_stage("inspect-pod-ends", [placed, alive, _phase("Pending"), inspects], succeeded)]
    return [
        *inspected,
        _stage("pod-turns-ready", [placed, alive, new, runs], {"statusTemplate": _RUNNING}),
        # The node controller marks the pods of a silent node as not ready, and expects the kubelet to mark
        # them as ready again. A long outage of the API server makes all nodes silent.
        _stage(
            "pod-is-ready-again", [placed, alive, _phase("Running"), marked], {"statusTemplate": _RUNNING}
        ),
        *goes,
    ]


def _ended(phase: str, reason: str, exit_code: int, message: str) -> str:
    # A JSON text in JSON is also YAML. A template would begin only at two opening braces.
    text = _ENDED.replace("PHASE", phase).replace("REASON", reason).replace("EXIT_CODE", str(exit_code))
    return text.replace("MESSAGE", json.dumps(message))


def _phase(*values: str) -> dict[str, Any]:
    return {"key": ".status.phase", "operator": "In", "values": list(values)}


def _stage(name: str, conditions: list[dict[str, Any]], then: dict[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": "kwok.x-k8s.io/v1alpha1",
        "kind": "Stage",
        "metadata": {"name": name},
        "spec": {
            "resourceRef": {"apiGroup": "v1", "kind": "Pod"},
            "selector": {"matchExpressions": conditions},
            "next": then,
        },
    }


def pod_range(cluster: Cluster) -> str:
    """Returns the range of this cluster's pod addresses. No network uses it: 240.0.0.0/4 is reserved."""
    kinds = 128 if cluster.state.name.startswith("node-") else 0
    return f"240.{kinds + cluster.state.number}.0.0/16"


def start_kwok(
    cluster: Cluster,
    *,
    nodes: int,
    profile: str | None,
    shape: NodeShape = GPU_NODE,
    finalizers: bool = False,
) -> ProcessIdentity:
    """Starts kwok beside a control plane, and waits until all its nodes are Ready. It ends with the cluster.

    No process listens at the addresses of pods: the machine gets a blackhole route for them, so that a
    request to a pod fails immediately. See `build_stages` for `profile` and `finalizers`.

    Raises:
        ClusterError: the user is not root, or the nodes did not become Ready.
    """
    if os.geteuid() != 0:
        raise ClusterError("kwok's pods need a route, which only root may set. Run it as root")
    tools.ensure_built(tools.KWOK)
    state = cluster.state
    state.will_change("blackhole", pod_range(cluster))
    processes.run(["ip", "route", "add", "blackhole", pod_range(cluster), "metric", "4096"])
    config = state.folder / "kwok.yaml"
    stages = build_stages(profile, finalizers=finalizers)
    config.write_text("\n---\n".join([*_node_stages(), *map(json.dumps, stages)]))
    command = [
        str(tools.program(tools.KWOK, "kwok")),
        f"--kubeconfig={cluster.kubeconfig}",
        f"--config={config}",
        f"--manage-nodes-with-label-selector={LABEL}=true",
        "--v=WARN",
        f"--cidr={pod_range(cluster)}",
        f"--node-lease-duration-seconds={_LEASE_S}",
    ]
    kwok = processes.spawn(command, mark=state.folder, log=state.log("kwok"), environment=GO_ENVIRONMENT)
    manifests = [_build_node(f"kwok-{number:04d}", shape) for number in range(nodes)]
    cluster.kubectl(
        "create", "-f", "-", stdin="\n---\n".join(map(json.dumps, manifests)), timeout_s=READY_TIMEOUT_S
    )
    processes.wait_until(
        f"{nodes} Ready nodes",
        lambda: _ready_nodes(cluster) == nodes,
        timeout_s=READY_TIMEOUT_S,
        process=kwok,
        log=state.log("kwok"),
    )
    return kwok


def _node_stages() -> list[str]:
    """Returns kwok's own stages of nodes with leases: they report a status now and then, like a kubelet.

    By default, kwok uses the stages of nodes without leases, each of which writes its status every 20 s
    (`kwok/pkg/kwok/cmd/root.go@0.7.0`, line 171: the condition is inverted).
    """
    folder = tools.source_folder("kwok", "sigs.k8s.io/kwok") / "kustomize/stage/node"
    files = ("fast/node-initialize.yaml", "heartbeat-with-lease/node-heartbeat-with-lease.yaml")
    return [(folder / file).read_text() for file in files]


def _build_node(name: str, shape: NodeShape) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": {**_KUBELETS, "kubernetes.io/hostname": name, **shape.labels}},
        "status": {"allocatable": dict(shape.allocatable), "capacity": dict(shape.allocatable)},
    }


_KUBELETS = {"kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64", LABEL: "true"}
"""Labels that every kubelet sets but kwok does not, and our own label."""


def _ready_nodes(cluster: Cluster) -> int:
    ready = 'jsonpath={.items[*].status.conditions[?(@.type=="Ready")].status}'
    time.sleep(processes.POLL_S)  # each check is a separate process
    return cluster.kubectl("get", "nodes", "-l", f"{LABEL}=true", "-o", ready).split().count("True")
