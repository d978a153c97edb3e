"""Measures one run: create, idle, restart. Each step has a deadline."""

import asyncio
import contextlib
import json
import math
import os
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from heteroinfer_contract import metric_names
from heteroinfer_operator.api.crd import build_crd
from heteroinfer_operator.kube.paths import POD
from heteroinfer_operator.kube.server import ApiServer, load_configuration
from tests.cluster import tools
from tests.cluster.crds import apply_crds
from tests.cluster.folders import LEAST_VALUES
from tests.cluster.kwok import start_kwok
from tests.cluster.progress import say
from tests.cluster.running_cluster import Cluster, ensure_tools, start_control_plane_only
from tests.integration.operator.conftest import CHART, Installation
from tests.integration.operator.running_operator import OperatorProcess, operator, until
from tests.scale import fleet
from tests.scale.report import Figures

GPUS_PER_NODE = 8
SPARE_NODES = 0.1
"""A tenth more nodes than the GPU pods fill. Otherwise CPU pods would fill nodes whose GPUs are still
free."""
CREATE_TIMEOUT_S = 1500.0
QUIET_S = 30.0
"""Seconds without writes after which the start-up phase is over."""
RESTART_TIMEOUT_S = 300.0
_SAY_EVERY_S = 15.0
_LOOK_EVERY_S = 5.0
"""The metrics of a thousand resources cost the operator a fraction of a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Usage:
    """The resources that a process has used.

    Attributes:
        cpu_s: user and system time.
        rss_bytes: resident memory now.
        peak_bytes: peak of the resident memory.
    """

    cpu_s: float
    rss_bytes: int
    peak_bytes: int

    @classmethod
    def of(cls, pid: int) -> "_Usage":
        status = Path(f"/proc/{pid}/status").read_text()
        fields = dict(line.split(":", 1) for line in status.splitlines())
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks = int(stat[11]) + int(stat[12])
        return cls(
            cpu_s=ticks / os.sysconf("SC_CLK_TCK"),
            rss_bytes=int(fields["VmRSS"].split()[0]) * 1024,
            peak_bytes=int(fields["VmHWM"].split()[0]) * 1024,
        )


async def measure(resources: int, idle_s: float, logs: Path) -> Figures:
    """Runs all steps, and returns the figures.

    Raises:
        AssertionError: a step missed its deadline, or the operator ended.
    """
    ensure_tools([*tools.CONTROL_PLANE, tools.KWOK])
    logs.mkdir(parents=True)
    with start_control_plane_only() as cluster:
        nodes = math.ceil(resources / GPUS_PER_NODE * (1 + SPARE_NODES)) + 1
        start_kwok(cluster, nodes=nodes, profile=fleet.profile())
        kubeconfig = _install(cluster, logs)
        async with _connected(cluster) as server:
            async with operator(kubeconfig, logs / "first.log") as process:
                await process.working()
                say(f"creating {resources} resources on {nodes} nodes …")
                made = await _create(server, process, resources)
                writes = await _settle(process)
                reconciles = await process.metric(f"{metric_names.OPERATOR_RECONCILE_SECONDS}_count")
                usage = _Usage.of(process.process.pid)
                before = await fleet.list_stored(server)
                _check_whole(before, resources)
                say(f"idle for {idle_s:g} s …")
                await asyncio.sleep(idle_s)  # the measurement itself
                idle_writes = sum((await process.writes()).values()) - sum(writes.values())
                after = await fleet.list_stored(server)
                idle = _Usage.of(process.process.pid)
                process.process.kill()
                await process.ended()
            restart_s, restart_writes, second = await _restart(kubeconfig, logs / "second.log")
            last = await fleet.list_stored(server, [POD])
    pods = {uid: stored for uid, stored in after.items() if stored.kind == POD.name}
    return Figures(
        resources=resources,
        pods=len(pods),
        nodes=nodes,
        created_s=made.created_s,
        ready_s=made.ready_s,
        writes=writes,
        reconciles=reconciles,
        create_cpu_s=usage.cpu_s,
        idle_s=idle_s,
        idle_writes=int(idle_writes),
        idle_touched=len(before.items() ^ after.items()),
        idle_cpu_s=idle.cpu_s - usage.cpu_s,
        rss_bytes=idle.rss_bytes,
        peak_bytes=max(idle.peak_bytes, second.peak_bytes),
        restart_s=restart_s,
        restart_writes=int(restart_writes),
        restart_touched=len(pods.items() ^ last.items()),
    )


def _install(cluster: Cluster, folder: Path) -> Path:
    """Installs the chart. Returns a kubeconfig with the chart's own permissions."""
    apply_crds(cluster, build_crd())
    manifests = [manifest for namespace in fleet.NAMESPACES for manifest in _namespace(namespace)]
    cluster.kubectl("create", "-f", "-", stdin="\n---\n".join(map(json.dumps, manifests)))
    bound = "--for=jsonpath={.status.phase}=Bound"
    cluster.kubectl("wait", "pv", "--all", bound, "--timeout=60s")
    values = ("-f", str(LEAST_VALUES), "--set", "replicas=0", "--set", "crds.install=false")
    cluster.helm("install", "scaled", str(CHART), "-n", "scaled", "--create-namespace", *values)
    return Installation(cluster, "scaled", folder / "operator.kubeconfig").kubeconfig


def _namespace(name: str) -> tuple[dict[str, Any], ...]:
    """Returns the manifests of a namespace and of its volume of models."""
    common = {"accessModes": ["ReadOnlyMany"], "storageClassName": ""}
    volume_name = f"models-of-{name}"
    volume = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": volume_name},
        "spec": {
            **common,
            "capacity": {"storage": "1Gi"},
            "hostPath": {"path": "/nobody-mounts-this"},
            "claimRef": {"namespace": name, "name": "models"},
        },
    }
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "models", "namespace": name},
        "spec": {
            **common,
            "resources": {"requests": {"storage": "1Gi"}},
            "volumeName": volume_name,
        },
    }
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}, volume, claim


@contextlib.asynccontextmanager
async def _connected(cluster: Cluster) -> AsyncIterator[ApiServer]:
    server = ApiServer(await load_configuration(str(cluster.kubeconfig)))
    try:
        yield server
    finally:
        await server.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Made:
    created_s: float
    ready_s: float


async def _create(server: ApiServer, process: OperatorProcess, resources: int) -> _Made:
    """Creates the resources.

    Returns the seconds until the last pod existed, and until the last group served.
    """
    began, started = datetime.now(UTC), time.monotonic()
    creating = asyncio.ensure_future(fleet.create_resources(server, resources))
    reported = started

    async def all_ready() -> bool:
        nonlocal reported
        assert process.process.poll() is None, process.output[-4000:]
        if creating.done():
            creating.result()
        ready = await fleet.ready_groups(process)
        if time.monotonic() - reported > _SAY_EVERY_S:
            reported = time.monotonic()
            usage = _Usage.of(process.process.pid)
            say(f"{reported - started:5.0f} s: {ready} groups serve, {usage.rss_bytes / 1e6:.0f} MB")
        await asyncio.sleep(_LOOK_EVERY_S)
        return ready == resources

    await until("every group serves", all_ready, CREATE_TIMEOUT_S, lambda: process.output[-4000:])
    ready_s = time.monotonic() - started
    pods = await fleet.list_stored(server, [POD])
    # Creation times are whole seconds, rounded down.
    created_s = max((pod.created - began).total_seconds() for pod in pods.values()) + 1
    return _Made(created_s=min(created_s, ready_s), ready_s=ready_s)


async def _settle(process: OperatorProcess) -> dict[str, float]:
    """Waits until there are no more writes, and returns the writes so far."""
    kept, since = await process.writes(), time.monotonic()

    async def quiet() -> bool:
        nonlocal kept, since
        now = await process.writes()
        if now != kept:
            kept, since = now, time.monotonic()
        await asyncio.sleep(1)
        return time.monotonic() - since > QUIET_S

    await until("an end of writes", quiet, 10 * QUIET_S, lambda: process.output[-4000:])
    return kept


async def _restart(kubeconfig: Path, log: Path) -> tuple[float, float, _Usage]:
    """Starts a new operator. Returns the seconds until its first resync, its writes, and its usage."""
    started = time.monotonic()
    async with operator(kubeconfig, log) as process:

        async def passed() -> bool:
            status, _text = await process.http("/metrics")
            return (
                status == 200 and await process.metric(metric_names.OPERATOR_LAST_PASS_TIMESTAMP_SECONDS) > 0
            )

        await until("a first resync", passed, RESTART_TIMEOUT_S, lambda: process.output[-4000:])
        restart_s = time.monotonic() - started
        writes = await _settle(process)
        return restart_s, sum(writes.values()), _Usage.of(process.process.pid)


def _check_whole(stored: dict[str, fleet.Stored], resources: int) -> None:
    """Checks on the API server that no object is missing or superfluous, and every pod is ready."""
    pods = [s for s in stored.values() if s.kind == POD.name]
    assert len(pods) == fleet.PODS_PER_RESOURCE * resources, f"{len(pods)} pods"
    unready = [pod.name for pod in pods if not pod.ready]
    assert not unready, f"not ready: {unready[:5]}"
    served = [s for s in stored.values() if s.kind == "HeteroInference" and s.ready]
    assert len(served) == resources, f"{len(served)} resources are Ready"
