"""Applies the random faults of the soak: pods end in all ways of a cluster, and the API server restarts."""

import asyncio
import os
import random
import signal
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from heteroinfer_operator.kube.paths import POD
from heteroinfer_operator.kube.server import ApiError, ApiServer
from tests.cluster import cluster_cgroup
from tests.cluster.control_plane import SCHEDULER, api_server_down
from tests.cluster.node import node_cgroup
from tests.cluster.programs import Program
from tests.cluster.running_cluster import Cluster
from tests.integration.operator.running_operator import end_rank
from tests.worker_processes import is_rank

MAX_AWAY_S = 20.0
REAL_RANK_KILLED = "real rank killed"
GONE = 404
REFUSED = 429


@dataclass(slots=True, kw_only=True)
class Chaos:
    """Applies the faults, and counts them.

    Attributes:
        server: API server of the pods.
        namespace: namespace of the resources.
        chance: seeded source of random choices.
        done: number of faults by their name in the report.
    """

    server: ApiServer
    namespace: str
    chance: random.Random
    done: Counter[str] = field(default_factory=Counter)

    async def kill_pod(self, pod: Mapping[str, Any]) -> None:
        """Ends one pod in a random way."""
        ways: dict[str, Callable[[Mapping[str, Any]], Awaitable[object]]] = {
            "pod deleted": self._delete,
            "pod deleted by force": self._delete_by_force,
            "pod evicted": self._evict,
            "rank exits": self._end_rank,
        }
        what = self.chance.choice(sorted(ways))
        try:
            await ways[what](pod)
        except ApiError as error:
            # The pod may have gone, the API server may have been killed, or a budget may refuse the eviction.
            what = {GONE: "pod was already gone", REFUSED: "eviction refused"}.get(
                error.status, "looks and kills while the API server was away"
            )
        self.done[what] += 1

    async def _delete(self, pod: Mapping[str, Any]) -> None:
        await self.server.delete(self._path(pod), {})

    async def _delete_by_force(self, pod: Mapping[str, Any]) -> None:
        await self.server.delete(self._path(pod), {"gracePeriodSeconds": 0})

    async def _evict(self, pod: Mapping[str, Any]) -> None:
        metadata = {"name": pod["metadata"]["name"], "namespace": self.namespace}
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": metadata}
        await self.server.create(self._path(pod, "eviction"), body)

    async def _end_rank(self, pod: Mapping[str, Any]) -> None:
        name = pod["metadata"]["name"]
        index = int(name.rpartition("-")[2])  # another fault may remove its label at this moment
        await end_rank(self.server, self.namespace, name, index=index)

    def _path(self, pod: Mapping[str, Any], subresource: str = "") -> str:
        return POD.path(self.namespace, pod["metadata"]["name"], subresource)

    def kill_rank(self, cluster: Cluster) -> None:
        """Kills a process of a real rank on the node, if one runs now."""
        ranks = real_ranks(cluster)
        if ranks:
            os.kill(self.chance.choice(ranks), signal.SIGKILL)
            self.done[REAL_RANK_KILLED] += 1

    def start_ended_scheduler(self, cluster: Cluster) -> None:
        """Starts kube-scheduler if it has ended, as its kubelet would.

        The scheduler ends itself if pods differ from its memory, which can happen after an outage of the API
        server.
        """
        scheduler = Program.of(cluster.state, SCHEDULER)
        if not scheduler.identity.alive():
            scheduler.start_again()
            self.done["scheduler ended by itself"] += 1

    async def restart_api_server(self, cluster: Cluster) -> None:
        """Kills the API server, and starts it again after up to MAX_AWAY_S."""
        away_s = self.chance.uniform(1.0, MAX_AWAY_S)
        down = api_server_down(cluster.state)
        await asyncio.to_thread(down.__enter__)
        try:
            await asyncio.sleep(away_s)
        finally:
            await asyncio.to_thread(down.__exit__, None, None, None)
        self.done["API server killed"] += 1


def real_ranks(cluster: Cluster) -> list[int]:
    """Returns the processes of ranks on the real node, or nothing without one."""
    return [pid for pid in cluster_cgroup.pids(node_cgroup(cluster.state)) if is_rank(pid)]
