"""Starts groups while others are tested: a start takes half a minute, and its checks a few seconds."""

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from tests.gpu.topologies import Topology, environment, plan_of, pod_environments
from tests.integration.worker.groups import Group, start_group

STARTS_AT_ONCE = 3
"""Largest number of groups that start or run at the same time. It also limits the use of the GPU's memory."""
READY_TIMEOUT_S = 240.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A ready group.

    Attributes:
        topology: its topology.
        group: sends requests to it.
        ready_s: seconds from its start until it would answer a request.
    """

    topology: Topology
    group: Group
    ready_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """The parameters of all groups.

    Attributes:
        models: folder of the model of each dtype.
        logs: each group gets a folder in it.
        caches: folder for compilers.
        gpus: values for CUDA_VISIBLE_DEVICES; empty if GPU ranks run on the CPU.
        devices_as_cpu: whether GPU ranks are replaced by CPU ranks.
    """

    models: Mapping[str, Path]
    logs: Path
    caches: Path
    gpus: Sequence[str]
    devices_as_cpu: bool


@dataclass(slots=True, kw_only=True)
class _Running:
    served: Future[Served]
    group: Group | None = None
    reported: bool = False
    release: threading.Event = field(default_factory=threading.Event)
    stopped: Future[None] | None = None


class Groups:
    """Starts the groups in the order in which tests will need them, a few before the tests.

    A group occupies a thread from its start to its end, so there are at most as many groups as threads.
    `release` ends a group, so that the next one can start.
    """

    def __init__(self, site: Site, wanted: Sequence[Topology], *, at_once: int = STARTS_AT_ONCE) -> None:
        self._site = site
        self._threads = ThreadPoolExecutor(at_once, "group")
        self._running: dict[str, _Running] = {}
        for topology in wanted:
            running = _Running(served=Future())
            running.stopped = self._threads.submit(self._live, topology, running)
            self._running[topology.name] = running

    def take(self, topology: Topology) -> Served:
        """Waits until the group of a topology is ready, and returns it. Raises the error of its start."""
        running = self._running[topology.name]
        assert not running.reported, f"{topology.name} did not start. Its first test shows the reason"
        running.reported = True
        served = running.served.result(2 * READY_TIMEOUT_S)
        running.reported = False
        return served

    def release(self, topology: Topology) -> None:
        """Ends the group of a topology. Raises AssertionError if it does not stop in time."""
        running = self._running.pop(topology.name)
        running.release.set()
        assert running.stopped is not None
        running.stopped.result(READY_TIMEOUT_S)

    def close(self) -> None:
        """Ends the remaining groups. Groups that have not begun to start never start."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for running in self._running.values():
            running.release.set()
            if running.group is not None:
                running.group.terminate()  # it may still be starting
        self._threads.shutdown(wait=True)

    def _live(self, topology: Topology, running: _Running) -> None:
        """Runs a group from its start to its release, in a thread of its own."""
        site = self._site
        plan = plan_of(topology, site.models[topology.dtype], devices_as_cpu=site.devices_as_cpu)
        try:
            with start_group(
                plan,
                site.logs / topology.name,
                env=environment(topology, site.caches),
                pod_env=pod_environments(topology, site.gpus),
                startup_timeout_s=READY_TIMEOUT_S,
            ) as group:
                running.group = group
                ready_s = group.wait_ready(READY_TIMEOUT_S)
                running.served.set_result(Served(topology=topology, group=group, ready_s=ready_s))
                running.release.wait()
        except BaseException as error:  # the thread that takes or releases the group gets the error
            if running.served.done():
                raise
            running.served.set_exception(error)
