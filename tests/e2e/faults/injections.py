"""Makes each fault happen for real, and reverts what would stay."""

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from tests.cluster import cluster_cgroup, processes
from tests.cluster.control_plane import api_server_down
from tests.cluster.node import build_ctr_command
from tests.e2e import firewall
from tests.e2e.faults import resources
from tests.e2e.faults.scene import Scene, is_exiting
from tests.e2e.serving import OPERATOR_LABELS, SYSTEM

API_SERVER_AWAY_S = 3.0


def kill_rank(rank: int) -> Callable[[Scene], AbstractContextManager[float]]:
    """Kills the process of a rank. Its pod has no other rank."""

    @contextlib.contextmanager
    def inject(scene: Scene) -> Iterator[float]:
        pod = scene.pod(rank)
        pid = scene.pair.rank_pid(pod, rank)
        yield float(scene.pair.execute(pod, f"import os, time; print(time.time()); os.kill({pid}, 9)"))

    return inject


EXHAUST = """
import os, time
# The rank is the one that the kernel takes, as if it had asked for this memory itself.
open('/proc/{pid}/oom_score_adj', 'w').write('1000')
# One after the other, and none worth more to the kernel than the rank.
if os.fork() == 0:
    os.setsid()
    os.closerange(0, 3)
    until = time.monotonic() + 60
    for _ in range(64):
        reader, writer = os.pipe()
        if os.fork() == 0:
            held = b'x' * (128 << 20)
            os.close(writer)
            while os.path.exists('/proc/{pid}') and time.monotonic() < until:
                time.sleep(0.05)
            os._exit(0)
        os.close(writer)
        os.read(reader, 1)
        os.close(reader)
        if not os.path.exists('/proc/{pid}'):
            break
    os._exit(0)
"""


def exhaust_memory(rank: int) -> Callable[[Scene], AbstractContextManager[float]]:
    """Allocates memory in a rank's container until the kernel kills the rank."""

    @contextlib.contextmanager
    def inject(scene: Scene) -> Iterator[float]:
        pod, process = scene.pod(rank), scene.rank_process(rank)
        alive_at = time.time()

        def dies() -> bool:
            nonlocal alive_at
            now = time.time()
            if is_exiting(process):
                return True
            alive_at = now
            return False

        scene.pair.execute(pod, EXHAUST.format(pid=scene.pair.rank_pid(pod, rank)))
        processes.wait_until("the death of the rank", dies, timeout_s=60)
        yield alive_at

    return inject


def delete_pod(index: int) -> Callable[[Scene], AbstractContextManager[float]]:
    """Deletes a pod, as a user would."""

    @contextlib.contextmanager
    def inject(scene: Scene) -> Iterator[float]:
        pod, at = scene.pod(index), time.time()
        scene.cluster.kubectl("delete", "pod", "-n", scene.pair.namespace, pod, "--wait=false")
        yield at

    return inject


def evict_pod(index: int) -> Callable[[Scene], AbstractContextManager[float]]:
    """Evicts a pod, as `kubectl drain` does."""

    @contextlib.contextmanager
    def inject(scene: Scene) -> Iterator[float]:
        pod, at = scene.pod(index), time.time()
        metadata = {"name": pod, "namespace": scene.pair.namespace}
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": metadata}
        path = f"/api/v1/namespaces/{scene.pair.namespace}/pods/{pod}/eviction"
        scene.cluster.kubectl("create", "--raw", path, "-f", "-", stdin=json.dumps(body))
        yield at

    return inject


@contextlib.contextmanager
def cut_pods_apart(scene: Scene) -> Iterator[float]:
    """Drops all packets between the two pods. Kubelets and clients still reach both pods."""
    leader, follower = (pod["status"]["podIP"] for pod in scene.pair.pods())
    both_ways = (f"ip saddr {leader} ip daddr {follower}", f"ip saddr {follower} ip daddr {leader}")
    at = time.time()
    with firewall.drops(scene.cluster, *both_ways):
        yield at


@contextlib.contextmanager
def lose_kubelet(scene: Scene) -> Iterator[float]:
    """Kills the kubelet of the follower's node, and starts it again at the end."""
    try:
        yield scene.second.kill_kubelet()
    finally:
        scene.second.start_kubelet()


@contextlib.contextmanager
def lose_node(scene: Scene) -> Iterator[float]:
    """Disconnects the follower's node and deletes its Node object. At the end, it returns as a new node."""
    at = time.time()
    scene.second.cut_off()
    try:
        scene.cluster.kubectl("delete", "node", scene.second.name, "--wait=false")
        yield at
    finally:
        scene.second.kill_kubelet()
        scene.second.connect()
        scene.second.start_kubelet()


@contextlib.contextmanager
def restart_api_server(scene: Scene) -> Iterator[float]:
    """Kills and restarts the API server. Requests to the model continue in the meantime."""
    with api_server_down(scene.cluster.state) as at:
        while time.time() - at < API_SERVER_AWAY_S:
            scene.check_answer()
    yield at


def _operator_pod(scene: Scene) -> dict[str, Any]:
    text = scene.cluster.kubectl("get", "pods", "-n", SYSTEM, "-l", OPERATOR_LABELS, "-o", "json")
    (pod,) = json.loads(text)["items"]
    return dict(pod)


@contextlib.contextmanager
def kill_operator(scene: Scene) -> Iterator[float]:
    """Kills the operator's container, and waits until its successor is ready."""
    (container,) = _operator_pod(scene)["status"]["containerStatuses"]
    number = container["containerID"].partition("://")[2]
    at = time.time()
    scene.cluster.namespaces.run(*build_ctr_command(), "task", "kill", "--signal", "SIGKILL", number)

    def back() -> bool:
        scene.check_answer()
        (now,) = _operator_pod(scene)["status"]["containerStatuses"]
        return bool(now["ready"]) and now["restartCount"] > container["restartCount"]

    processes.wait_until("the operator's successor", back, timeout_s=60)
    yield at


def slow_rank(rank: int) -> Callable[[Scene], AbstractContextManager[float]]:
    """Makes only one rank slow: its container gets a tenth of a CPU, as from a small limit.

    Busy processes on its CPUs would slow the other rank, too, because both test nodes have the same CPUs.
    """

    @contextlib.contextmanager
    def inject(scene: Scene) -> Iterator[float]:
        at = time.time()
        with cluster_cgroup.cpu_limit(scene.rank_process(rank), quota_us=5_000, period_us=50_000):
            yield at

    return inject


def _apply(scene: Scene, manifest: dict[str, Any]) -> None:
    scene.cluster.kubectl("apply", "-n", scene.pair.namespace, "-f", "-", stdin=json.dumps(manifest))


@contextlib.contextmanager
def apply_unknown_image(scene: Scene) -> Iterator[float]:
    """Creates a resource with an image that does not exist."""
    at = time.time()
    engine = {"image": resources.UNKNOWN_IMAGE, "maxModelLen": 1024}
    _apply(scene, resources.build_resource(resources.NO_IMAGE, engine=engine))
    yield at


@contextlib.contextmanager
def apply_missing_model(scene: Scene) -> Iterator[float]:
    """Creates a resource whose claim exists, but the model's folder in it does not."""
    at = time.time()
    _apply(scene, resources.build_resource(resources.NO_MODEL, model={"uri": "pvc://models/none"}))
    yield at


@contextlib.contextmanager
def refuse_spec(scene: Scene) -> Iterator[float]:
    """Changes the model so that only the operator refuses the spec, not the API server.

    Reverts it at the end.
    """
    at = scene.change_spec(model={"uri": resources.REFUSED_MODEL})
    try:
        yield at
    finally:
        scene.change_spec(model={"uri": resources.MODEL})


@contextlib.contextmanager
def take_name(scene: Scene) -> Iterator[float]:
    """Adds a second group while the user has a Service with the name of that group's.

    Reverts both at the end.
    """
    name = f"{resources.PAIR}-1-ranks"
    metadata, spec = {"name": name}, {"ports": [{"port": 80}]}
    _apply(scene, {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec})
    try:
        yield scene.change_spec(replicas=2)
    finally:
        scene.change_spec(replicas=1)
        scene.cluster.kubectl("delete", "service", "-n", scene.pair.namespace, name)
