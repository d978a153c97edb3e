"""Runs a serving group, an operator and Prometheus. All parts except the kubelet are real.

The only node has no kubelet, and no pod is scheduled onto it. The operator's pods run as processes of this
machine, each on its own loopback address with the ports of its manifest. The program plays the kubelet. So
Prometheus discovers and scrapes the pods as in a cluster.
"""

import contextlib
import dataclasses
import json
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from heteroinfer_contract import names
from heteroinfer_contract.failure import Failure, FailureReason
from heteroinfer_contract.plan import Plan
from heteroinfer_contract.pod_launch import PodAddress
from heteroinfer_operator.nodes.node_platform import IMAGE_PLATFORM
from tests.cluster import processes
from tests.cluster.folders import LEAST_VALUES, REPOSITORY
from tests.cluster.running_cluster import Cluster
from tests.integration.operator.running_operator import SPEC, OperatorProcess
from tests.integration.worker.groups import Group, start_group
from tests.ports import free_port
from tests.watching.monitoring import Prometheus, install_definitions, start_prometheus
from tests.watching.watched import Watched

CHART = REPOSITORY / "charts" / "heteroinfer"
SYSTEM = "heteroinfer-system"
NAMESPACE = "serving"
NAME = "tiny"
GROUP = f"{NAMESPACE}/{NAME}/0"
VALUES = (
    "replicas=0",  # the operator runs as a process
    "podMonitor.enabled=true",
    "podMonitor.interval=1s",
    "podMonitor.ranksPerPod=2",
    "prometheusRule.enabled=true",
    "dashboards.enabled=true",
)
NODE: dict[str, Any] = {
    "apiVersion": "v1",
    "kind": "Node",
    "metadata": {"name": "spacious", "labels": dict(IMAGE_PLATFORM)},
}
"""Labels of the node that plans use."""
MAX_SEQS = 4
"""Requests that the group runs at the same time. Further requests wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """The running parts.

    Attributes:
        plane: the API server with its controllers.
        prometheus: Prometheus, which watches all parts.
        group: the processes of the only group.
    """

    plane: Cluster
    prometheus: Prometheus
    group: Group

    @property
    def resource(self) -> dict[str, Any]:
        """Returns the HeteroInference as stored."""
        return get(self.plane, f"hinf/{NAME}")

    @contextlib.contextmanager
    def busy(self, requests: int, max_tokens: int = 64) -> Iterator[None]:
        """Keeps this number of requests running until the context ends."""
        ended = threading.Event()

        def ask(number: int) -> None:
            while not ended.is_set():
                self.group.complete([number, *range(3, 19)], max_tokens)

        with ThreadPoolExecutor(requests) as pool:
            asking = [pool.submit(ask, number) for number in range(100, 100 + requests)]
            try:
                yield
            finally:
                ended.set()
                for asked in asking:
                    asked.result()


def watch(stack: Stack, seconds: float) -> Watched:
    """Runs few requests first, and then more than fit. Returns what Prometheus recorded in this time."""
    began = time.time()
    for requests, end in ((2, began + seconds / 3), (MAX_SEQS + 3, began + seconds)):
        with stack.busy(requests):
            _wait_until(end)
    return Watched(
        prometheus=stack.prometheus, start=began, end=time.time(), namespace=NAMESPACE, group=GROUP
    )


def _wait_until(moment: float) -> None:
    left_s = moment - time.time()
    processes.wait_until("time of traffic", lambda: time.time() > moment, timeout_s=left_s + 30)


def get(plane: Cluster, *what: str) -> dict[str, Any]:
    """Returns objects of the group's namespace as JSON."""
    return dict(json.loads(plane.kubectl("get", "-n", NAMESPACE, *what, "-o", "json")))


@contextlib.contextmanager
def start_stack(plane: Cluster, model: Path, folder: Path) -> Iterator[Stack]:
    """Starts all parts. At the end, it ends the parts that do not end with the control plane."""
    install_definitions(plane)
    sets = ["-f", str(LEAST_VALUES), *(option for value in VALUES for option in ("--set", value))]
    plane.helm("install", "heteroinfer", str(CHART), "-n", SYSTEM, "--create-namespace", *sets)
    plane.kubectl("create", "namespace", NAMESPACE)
    for namespace in (SYSTEM, NAMESPACE):
        plane.kubectl("wait", "-n", namespace, "--for=create", "serviceaccount/default", "--timeout=20s")
    _stop_scheduler(plane)
    jobs = {f"podMonitor/{SYSTEM}/{name}" for name in ("heteroinfer", "heteroinfer-ranks")}
    prometheus = start_prometheus(plane, jobs)
    port = free_port()
    operator = OperatorProcess(
        plane.kubeconfig, folder / "operator.log", http_port=str(port), resync_seconds="2"
    )
    try:
        show_operator(plane, port)
        plane.kubectl("create", "-f", "-", stdin=yaml.safe_dump(NODE))
        _say_ready(plane)
        plane.kubectl("apply", "-n", NAMESPACE, "-f", "-", stdin=yaml.safe_dump(build_resource()))
        _tell_model(plane, model)
        first = _fail_once(plane)
        _say_ready(plane)  # The group is planned again, and the node controller accepts silence of 50 s.
        pods = _wait_for_pods(plane, after=first)
        plan, addresses = _plan(plane, model), _addresses(len(pods))
        env = {
            "OMP_NUM_THREADS": "1",  # the pods share this machine
            names.ENV_GROUP: GROUP,
            names.ENV_EPOCH: "2",
        }
        with start_group(plan, folder / "group", addresses=addresses, env=env) as group:
            group.wait_ready()
            for pod, address in zip(pods, addresses, strict=True):
                patch(plane, f"pod/{pod['metadata']['name']}", _running(address.host), NAMESPACE)
            plane.kubectl("wait", "-n", NAMESPACE, "--for=condition=Ready", f"hinf/{NAME}", "--timeout=30s")
            yield Stack(plane=plane, prometheus=prometheus, group=group)
    except BaseException:
        print(operator.output[-4000:])
        print(plane.kubectl("get", "hinf", "-A", "-o", "jsonpath={.items[*].status}"))
        print(plane.kubectl("get", "pods", "-A"))
        raise
    finally:
        operator.kill()


def patch(plane: Cluster, what: str, status: dict[str, Any], namespace: str = SYSTEM) -> None:
    """Merges fields into a status, in place of the kubelet."""
    body = json.dumps({"status": status})
    plane.kubectl("patch", "-n", namespace, what, "--subresource=status", "--type=merge", "-p", body)


def build_resource() -> dict[str, Any]:
    version = f"{names.API_GROUP}/{names.API_VERSION}"
    return {"apiVersion": version, "kind": names.KIND, "metadata": {"name": NAME}, "spec": SPEC}


def _stop_scheduler(plane: Cluster) -> None:
    """Ends the scheduler, because without a kubelet, pods on a node could not be deleted."""
    for pid in processes.marked_pids(plane.state.folder):
        if Path(f"/proc/{pid}/exe").resolve().name == "kube-scheduler":
            processes.kill([pid])


def _say_ready(plane: Cluster) -> None:
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    ready = {"type": "Ready", "status": "True", "reason": "Test", "message": "", "lastHeartbeatTime": now}
    allocatable = {"cpu": "32", "memory": "64Gi", "pods": "110"}
    patch(plane, "node/spacious", {"allocatable": allocatable, "conditions": [ready]})


def _running(address: str, *, ready: bool = True) -> dict[str, Any]:
    """Returns the status of a running worker pod with this address."""
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "phase": "Running",
        "podIP": address,
        "podIPs": [{"ip": address}],
        "conditions": [{"type": "Ready", "status": str(ready), "lastTransitionTime": now}],
        "containerStatuses": [
            {
                "name": names.CONTAINER_WORKER,
                "image": "worker:none",
                "imageID": "",
                "restartCount": 0,
                "ready": ready,
                "state": {"running": {"startedAt": now}},
            }
        ],
    }


def show_operator(plane: Cluster, port: int, *, address: str = "127.0.0.1", node: str = "") -> None:
    """Creates the pod of the operator's process from the Deployment's own template.

    Services select only pods that have a node and an address that is not loopback.
    """
    text = plane.kubectl("get", "deployment", "heteroinfer", "-n", SYSTEM, "-o", "json")
    template = json.loads(text)["spec"]["template"]
    (container,) = template["spec"]["containers"]
    (listening,) = container["ports"]
    listening["containerPort"] = port
    template["metadata"]["name"] = "heteroinfer-operator"
    template["spec"] |= {"nodeName": node} if node else {}
    pod = {"apiVersion": "v1", "kind": "Pod", **template}
    plane.kubectl("apply", "-n", SYSTEM, "-f", "-", stdin=yaml.safe_dump(pod))
    patch(
        plane,
        "pod/heteroinfer-operator",
        {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}]},
    )


def _tell_model(plane: Cluster, model: Path) -> None:
    """Ends the inspect pod with the output of `inspect` for the model."""
    command = [sys.executable, "-m", "vllm_heteroinfer.launch.cli", "inspect", "--model", str(model)]
    command += ["--termination-message-path", str(plane.state.folder / "profile")]
    profile = subprocess.run(command, check=True, timeout=60, stdout=subprocess.PIPE, text=True).stdout
    (pod,) = _wait_for(plane, f"{names.LABEL_COMPONENT}={names.COMPONENT_INSPECT}", 1)
    _end(plane, pod, 0, profile.strip())


def _fail_once(plane: Cluster) -> str:
    """Ends the first epoch by a lost pod, so that there are restarts and failures. Returns the epoch."""
    pods = _wait_for_pods(plane)
    for pod in pods:
        patch(plane, f"pod/{pod['metadata']['name']}", _running("127.0.0.1", ready=False), NAMESPACE)
    lost = Failure(reason=FailureReason.POD_LOST, message="pod 1 went silent", pod=1, rank=1)
    _end(plane, pods[0], names.EXIT_PEER_FAILED, lost.to_json())
    return str(pods[0]["metadata"]["labels"][names.LABEL_EPOCH])


def _end(plane: Cluster, pod: dict[str, Any], exit_code: int, message: str) -> None:
    ended = {"exitCode": exit_code, "reason": "Error" if exit_code else "Completed", "message": message}
    status = _running("127.0.0.1", ready=False)
    status["containerStatuses"][0]["state"] = {"terminated": ended}
    status["phase"] = "Failed" if exit_code else "Succeeded"
    patch(plane, f"pod/{pod['metadata']['name']}", status, NAMESPACE)


def _wait_for_pods(plane: Cluster, after: str = "") -> list[dict[str, Any]]:
    """Waits for the pods of an epoch other than `after`, and returns them in the order of their index."""
    selector = f"{names.LABEL_COMPONENT}={names.COMPONENT_WORKER},{names.LABEL_EPOCH}!={after or 0}"
    found = _wait_for(plane, selector, len(SPEC["roles"]))
    return sorted(found, key=lambda pod: int(pod["metadata"]["labels"][names.LABEL_POD_INDEX]))


def _wait_for(plane: Cluster, selector: str, count: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []

    def there() -> bool:
        found[:] = get(plane, "pods", "-l", selector)["items"]
        return len(found) == count

    processes.wait_until(f"{count} pods with {selector}", there, timeout_s=60)
    return found


def _plan(plane: Cluster, model: Path) -> Plan:
    """Returns the stored plan of the group, with this machine's model and few concurrent requests."""
    (stored,) = [o for o in get(plane, "configmaps")["items"] if names.PLAN_KEY in o.get("data", {})]
    plan = Plan.from_json(stored["data"][names.PLAN_KEY])
    return dataclasses.replace(
        plan, engine=dataclasses.replace(plan.engine, model=str(model), max_num_seqs=MAX_SEQS)
    )


def _addresses(count: int) -> tuple[PodAddress, ...]:
    """Returns unused loopback addresses with the ports of pods in a cluster."""
    net = random.SystemRandom().randrange(1 << 16)
    first = f"127.{64 + net % 64}.{net // 256}"
    return tuple(PodAddress(host=f"{first}.{pod + 1}") for pod in range(count))


def metrics_of(text: str) -> set[str]:
    """Returns the names of the metrics in an exposition."""
    return {found[0] for found in re.finditer(r"^[a-zA-Z_:][\w:]*", text, re.MULTILINE)}
