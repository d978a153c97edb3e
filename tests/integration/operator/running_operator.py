"""Shared helpers of the operator's tests on a real API server."""

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp

from heteroinfer_contract import metric_names, names
from heteroinfer_contract.failure import Failure, FailureReason
from heteroinfer_operator.cluster import ResourceKey
from heteroinfer_operator.kube.adapter import KubeCluster
from heteroinfer_operator.kube.cluster_state import ClusterState
from heteroinfer_operator.kube.events import EventRecorder
from heteroinfer_operator.kube.gangs import detect_gangs
from heteroinfer_operator.kube.leader_client import LeaderClient
from heteroinfer_operator.kube.paths import HETERO_INFERENCE, NODE, POD
from heteroinfer_operator.kube.server import ApiServer
from heteroinfer_operator.manifests.identity import Owner
from heteroinfer_operator.nodes.node_assignment import Gang
from heteroinfer_operator.nodes.node_platform import IMAGE_PLATFORM

CrdName = f"{names.PLURAL}.{names.API_GROUP}"
DEADLINE_S = 20.0

SPEC: dict[str, Any] = {
    # There are no nodes here, so the operator must create pods without free capacity.
    "scheduling": {"gang": "Never"},
    "model": {"uri": "pvc://models/tiny", "servedName": "tiny"},
    "engine": {"dtype": "float32", "maxModelLen": 512},
    "parallelism": {"mode": "Pipeline"},
    "roles": [
        {"name": "front", "device": "CPU", "pods": 1, "ranksPerPod": 1},
        {"name": "back", "device": "CPU", "pods": 1, "ranksPerPod": 1},
    ],
}


async def until(
    what: str, check: Callable[[], Any], timeout_s: float = DEADLINE_S, details: Callable[[], str] = str
) -> Any:
    """Waits until `check` returns a true value, and returns it.

    If `check` returns a coroutine, it is awaited. The error has the text of `details`.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        found = check()
        if asyncio.iscoroutine(found):
            found = await found
        if found:
            return found
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}\n{details()}"
        await asyncio.sleep(0.05)


async def create_resource(server: ApiServer, namespace: str, name: str = "tiny", **spec: Any) -> Owner:
    """Stores a HeteroInference, which owns the children of the tests.

    Args:
        server: API server that stores it.
        spec: fields that replace those of `SPEC`.
    """
    body = {
        "apiVersion": HETERO_INFERENCE.api_version,
        "kind": names.KIND,
        "metadata": {"name": name, "namespace": namespace},
        "spec": {**SPEC, **spec},
    }
    stored = await server.create(HETERO_INFERENCE.path(namespace), body)
    return Owner(key=ResourceKey(namespace=namespace, name=name), uid=stored["metadata"]["uid"])


def child(owner: Owner, kind: str, name: str, **fields: Any) -> dict[str, Any]:
    """Builds the manifest of a child."""
    version = {"NetworkPolicy": "networking.k8s.io/v1"}.get(kind, "v1")
    return {
        "apiVersion": version,
        "kind": kind,
        "metadata": {
            "name": name,
            "namespace": owner.key.namespace,
            "labels": {names.LABEL_RESOURCE: owner.key.name},
            "ownerReferences": [owner.reference],
        },
        **fields,
    }


def pod(owner: Owner, name: str, **labels: str) -> dict[str, Any]:
    """Builds the manifest of a pod that no node here runs."""
    container = {
        "name": names.CONTAINER_WORKER,
        "image": "worker:none",
        "ports": [{"name": names.PORT_HEALTH, "containerPort": names.DEFAULT_HEALTH_PORT}],
    }
    manifest = child(owner, "Pod", name, spec={"restartPolicy": "Never", "containers": [container]})
    manifest["metadata"]["labels"] |= {f"{names.API_GROUP}/{key}": value for key, value in labels.items()}
    return manifest


class Watched:
    """Running caches, and the port that uses them."""

    def __init__(self, server: ApiServer, namespaces: Sequence[str]) -> None:
        self.touched: list[ResourceKey] = []
        self.node_changes = 0
        self.cluster_state = ClusterState(
            server, namespaces=namespaces, touched=self.touched.append, nodes_changed=self._node_changed
        )
        self.groups = LeaderClient()
        self.recorder = EventRecorder(server, reporter="test")
        self.cluster = KubeCluster(
            server, self.cluster_state, recorder=self.recorder, groups=self.groups, patience_s=DEADLINE_S
        )

    def _node_changed(self) -> None:
        self.node_changes += 1


@contextlib.asynccontextmanager
async def watching(server: ApiServer, *namespaces: str) -> AsyncIterator[Watched]:
    """Runs caches for the duration of the context; they are synced at its begin."""
    watched = Watched(server, namespaces)
    running = asyncio.ensure_future(watched.cluster_state.run())
    try:
        async with asyncio.timeout(DEADLINE_S):
            await watched.cluster_state.wait_synced()
        yield watched
    finally:
        running.cancel()
        await asyncio.wait({running})
        await watched.recorder.close()
        await watched.groups.close()


PROFILE: dict[str, Any] = {
    "architecture": "LlamaForCausalLM",
    "dtype": "float32",
    "num_layers": 4,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
    "max_position_embeddings": 1024,
    "layer_bytes": [200_000] * 4,
    "embedding_bytes": 131_072,
    "head_bytes": 131_072,
    "tied_head": False,
}
"""Result of an inspect pod for a small model."""


class OperatorProcess:
    """`heteroinfer operator` as a separate process, as in its container."""

    def __init__(self, kubeconfig: Path, log: Path, **settings: str) -> None:
        variables = {f"HETEROINFER_{name.upper()}": value for name, value in settings.items()}
        environment = {
            "PATH": os.environ["PATH"],
            # the code of this worktree, which may be a second one
            "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
            "KUBECONFIG": str(kubeconfig),
            "NO_PROXY": "*",
            "HETEROINFER_HTTP_PORT": "0",
            "HETEROINFER_WORKER_IMAGE_CPU": "worker-cpu:none",
            "HETEROINFER_WORKER_IMAGE_GPU": "worker:none",
            **variables,
        }
        self.log = log
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "heteroinfer_operator.cli", "operator"], env=environment, stderr=output
            )

    @property
    def output(self) -> str:
        return self.log.read_text()

    async def http(self, path: str) -> tuple[int, str]:
        """Returns status and text of a path of the HTTP port, and status 0 without an answer."""
        found = re.search(r"on port (\d+)", self.output)
        if found is None:
            return 0, ""
        try:
            async with (
                aiohttp.ClientSession() as session,
                session.get(f"http://127.0.0.1:{found[1]}{path}") as response,
            ):
                return response.status, await response.text()
        except aiohttp.ClientError:
            return 0, ""

    async def working(self) -> None:
        """Waits until the operator reconciles."""
        await until("the operator works", self._works, timeout_s=60, details=lambda: self.output)

    async def _works(self) -> bool:
        assert self.process.poll() is None, self.output
        return await self.http("/readyz") == (200, "ok")

    async def metric(self, name: str) -> float:
        """Returns the sum of a metric over its labels."""
        status, text = await self.http("/metrics")
        assert status == 200
        lines = [line for line in text.splitlines() if re.match(rf"{name}(\{{| )", line)]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    async def writes(self) -> dict[str, float]:
        """Returns the number of writes that the API server accepted, by labels."""
        status, text = await self.http("/metrics")
        assert status == 200
        lines = [line for line in text.splitlines() if line.startswith(metric_names.OPERATOR_WRITES_TOTAL)]
        return {labels: float(count) for labels, _, count in (line.rpartition(" ") for line in lines)}

    async def ended(self, timeout_s: float = 15) -> int:
        """Waits until the process has ended, and returns its exit code."""
        await until("the operator's end", lambda: self.process.poll() is not None, timeout_s)
        return int(self.process.returncode)

    async def stop(self) -> int:
        self.process.terminate()
        return await self.ended()

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(timeout=10)


@contextlib.asynccontextmanager
async def operator(kubeconfig: Path, log: Path, **settings: str) -> AsyncIterator[OperatorProcess]:
    """Runs an operator until the context ends, or until the test ends it."""
    process = OperatorProcess(kubeconfig, log, **settings)
    try:
        yield process
    finally:
        process.kill()


async def served_gangs(server: ApiServer) -> set[Gang]:
    """Returns the gang schedulers whose API is served now."""
    return {gang for gang, answer in (await detect_gangs(server)).items() if answer is True}


async def add_node(server: ApiServer, name: str, *taints: dict[str, str]) -> None:
    """Stores a node that plans use; it counts as Ready."""
    metadata = {"name": name, "labels": dict(IMAGE_PLATFORM)}
    body = {"apiVersion": "v1", "kind": "Node", "metadata": metadata, "spec": {"taints": list(taints)}}
    await server.create(NODE.path(), body)
    status = {
        "allocatable": {"cpu": "32", "memory": "64Gi", "pods": "110"},
        "conditions": [{"type": "Ready", "status": "True", "reason": "Test", "message": ""}],
    }
    await server.merge(NODE.path(None, name, "status"), {"status": status})


async def run_pod(server: ApiServer, namespace: str, name: str, *, ready: bool = True) -> None:
    """Marks a pod as running, in place of the kubelet."""
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    condition = {"type": "Ready", "status": str(ready), "lastTransitionTime": now}
    state = {
        "name": names.CONTAINER_WORKER,
        "image": "worker:none",
        "imageID": "",
        "restartCount": 0,
        "ready": ready,
        "state": {"running": {"startedAt": now}},
    }
    status = {
        "phase": "Running",
        "podIP": "127.0.0.1",
        "conditions": [condition],
        "containerStatuses": [state],
    }
    await server.merge(POD.path(namespace, name, "status"), {"status": status})


async def end_rank(server: ApiServer, namespace: str, name: str, *, index: int) -> None:
    """Marks a pod as ended because its rank was killed, in place of kubelet and supervisor.

    Args:
        index: index of the pod in its group, and of its rank.
    """
    failure = Failure(
        reason=FailureReason.RANK_EXITED,
        message=f"rank {index} was killed by SIGKILL",
        pod=index,
        rank=index,
        exit_code=-signal.SIGKILL,
    )
    await end_pod(server, namespace, name, exit_code=names.EXIT_RANK_FAILED, message=failure.to_json())


async def end_pod(server: ApiServer, namespace: str, name: str, *, exit_code: int, message: str) -> None:
    """Marks a pod's worker container as ended, in place of the kubelet."""
    ended = {"exitCode": exit_code, "reason": "Completed" if exit_code == 0 else "Error", "message": message}
    state = {
        "name": names.CONTAINER_WORKER,
        "image": "worker:none",
        "imageID": "",
        "restartCount": 0,
        "ready": False,
        "state": {"terminated": ended},
    }
    phase = "Succeeded" if exit_code == 0 else "Failed"
    status = {"phase": phase, "containerStatuses": [state]}
    await server.merge(POD.path(namespace, name, "status"), {"status": status})
