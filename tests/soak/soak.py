"""Runs the soak: many groups, random ends of pods, restarts of the API server, and a count of all objects."""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime

from heteroinfer_contract import names
from heteroinfer_operator.kube.paths import HETERO_INFERENCE, POD, SECRET
from heteroinfer_operator.kube.server import ApiError, ApiServer
from tests.cluster.running_cluster import Cluster
from tests.integration.operator.running_operator import OperatorProcess
from tests.soak.chaos import Chaos
from tests.soak.observing import (
    WORKERS,
    Sample,
    count_keys,
    count_objects,
    list_of,
    mixed_epochs,
    observe_process,
    observe_ready,
)
from tests.soak.resource_faults import ResourceFaults, insist
from tests.soak.site import REAL

NODES = "kwok"
"""The names of nodes with played pods begin with this prefix."""
SAMPLE_S = 5.0
START_S = 300.0
SETTLE_S = 300.0
"""Time for the last back-offs, and for the start of a real group."""
REMOVE_S = 180.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """The frequency of the faults.

    Attributes:
        seconds: length of the chaos.
        kill_every_s: mean time between two ends of pods.
        away_every_s: mean time between two ends of the API server.
        rank_every_s: mean time between two ends of a real rank.
        strike_every_s: mean time between two faults of whole resources.
    """

    seconds: float
    kill_every_s: float = 2.0
    away_every_s: float = 180.0
    rank_every_s: float = 120.0
    strike_every_s: float = 5.0


@dataclass(slots=True, kw_only=True)
class Result:
    """The results.

    Attributes:
        seconds: length of the chaos.
        resources: number of resources.
        done: number of faults by name.
        before: number of objects by kind when all resources were Ready for the first time.
        after: number of objects by kind at the end, when all resources were Ready again.
        settled_s: seconds from the end of the chaos until all was Ready and as before, or None.
        not_ready: messages of the resources that are not Ready at the end.
        mixed: groups that had pods of two epochs at the same time.
        samples: samples of the operator's process.
        epochs: epochs of which pods were seen, by group and number, from the pods' names.
        left: objects that still exist after their resources.
        errors: lines of the operator's log that show a defect.
    """

    seconds: float
    resources: int
    done: Counter[str] = field(default_factory=Counter)
    before: Counter[str] = field(default_factory=Counter)
    after: Counter[str] = field(default_factory=Counter)
    settled_s: float | None = None
    not_ready: list[str] = field(default_factory=list)
    mixed: list[str] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    epochs: set[str] = field(default_factory=set)
    left: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class Soak:
    """One run, on a cluster whose resources exist already.

    Attributes:
        cluster: its cluster.
        server: its API server.
        namespace: namespace of the resources.
        operator: the operator's process.
        chaos: applies the faults.
        result: the results so far.
    """

    cluster: Cluster
    server: ApiServer
    namespace: str
    operator: OperatorProcess
    chaos: Chaos
    result: Result
    _began: float = 0.0

    async def run(self, pace: Pace) -> Result:
        """Runs the soak, and returns the results. Groups that fail do not make it raise."""
        if others := await self._all_ready(START_S):
            raise AssertionError(f"before the first fault, not Ready within {START_S:g} s: {others}")
        self.result.before = await count_objects(self.server, self.namespace)
        self._began = time.monotonic()
        async with self._sampling():
            await self._rage(pace)
            ended = time.monotonic()
            if await self._settled(SETTLE_S):
                self.result.settled_s = time.monotonic() - ended
        _, self.result.not_ready = await observe_ready(self.server, self.namespace)
        self.result.after = await count_objects(self.server, self.namespace)
        self.result.left = await self._remove()
        self.result.done = self.chaos.done
        self.result.errors = [line for line in self.operator.output.splitlines() if "defect" in line]
        return self.result

    async def _rage(self, pace: Pace) -> None:
        """Applies faults until the time is up. Then it waits for the API server."""
        until = time.monotonic() + pace.seconds
        strikes = ResourceFaults(chaos=self.chaos, played=await self._played())
        await asyncio.gather(
            self._every(pace.strike_every_s, until, strikes.strike_one),
            self._every(pace.kill_every_s, until, self._kill_one),
            self._every(pace.away_every_s, until, lambda: self.chaos.restart_api_server(self.cluster)),
            self._every(pace.rank_every_s, until, self._kill_real_rank),
        )
        await strikes.wait_reverted()
        await self._renew_lost_plans()

    async def _renew_lost_plans(self) -> None:
        """Restarts groups whose plan was lost.

        They serve until then, and their next epoch has a plan again.
        """
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        for each in await list_of(self.server, HETERO_INFERENCE.path(self.namespace), {}):
            conditions = each.get("status", {}).get("conditions", ())
            if any(condition["reason"] == "PlanLost" for condition in conditions):
                path = HETERO_INFERENCE.path(self.namespace, each["metadata"]["name"])
                await insist(self.server, path, {"spec": {"restartedAt": now}})
                self.chaos.done["group restarted after its plan was lost"] += 1

    async def _played(self) -> list[str]:
        """Returns the names of resources whose pods are played."""
        resources = await list_of(self.server, HETERO_INFERENCE.path(self.namespace), {})
        return [name for each in resources if (name := each["metadata"]["name"]) != REAL]

    async def _every(self, mean_s: float, until: float, act: Callable[[], Awaitable[None]]) -> None:
        """Calls `act` at random moments, with a mean interval of `mean_s`."""
        while (at := time.monotonic() + self.chaos.chance.expovariate(1 / mean_s)) < until:
            await asyncio.sleep(at - time.monotonic())
            await act()

    async def _kill_one(self) -> None:
        try:
            pods = await list_of(self.server, POD.path(self.namespace), WORKERS)
        except ApiError:
            self.chaos.done["looks and kills while the API server was away"] += 1
            return
        if played := [pod for pod in pods if pod["spec"].get("nodeName", "").startswith(NODES)]:
            await self.chaos.kill_pod(self.chaos.chance.choice(played))

    async def _kill_real_rank(self) -> None:
        self.chaos.kill_rank(self.cluster)

    @asynccontextmanager
    async def _sampling(self) -> AsyncIterator[None]:
        sampling = asyncio.ensure_future(self._sample_for_ever())
        try:
            yield
        finally:
            sampling.cancel()
            await asyncio.wait({sampling})
            if not sampling.cancelled():
                sampling.result()  # what it raised

    async def _sample_for_ever(self) -> None:
        while True:
            at_s = time.monotonic() - self._began
            self.result.samples.append(observe_process(self.operator.process.pid, at_s=at_s))
            self.chaos.start_ended_scheduler(self.cluster)
            with contextlib.suppress(ApiError):  # the API server is away
                pods = await list_of(self.server, POD.path(self.namespace), WORKERS)
                self.result.mixed += mixed_epochs(pods)
                self.result.epochs |= {pod["metadata"]["name"].rsplit("-", 1)[0] for pod in pods}
            await asyncio.sleep(SAMPLE_S)

    async def _all_ready(self, timeout_s: float) -> list[str]:
        """Waits until all resources are Ready. Returns the messages of those that are not."""
        deadline = time.monotonic() + timeout_s
        while True:
            ready, others = await observe_ready(self.server, self.namespace)
            if ready == self.result.resources or time.monotonic() > deadline:
                return others
            await asyncio.sleep(0.5)

    async def _settled(self, timeout_s: float) -> bool:
        """Waits until all resources are Ready again with as many objects as before.

        Returns whether this happened. Ready alone is not enough, because the operator may not have noticed
        the end of the last pod yet.
        """
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            ready, _ = await observe_ready(self.server, self.namespace)
            if ready == self.result.resources:
                objects = await count_objects(self.server, self.namespace)
                if objects == self.result.before:
                    return True
            await asyncio.sleep(0.5)
        return False

    async def _remove(self) -> Counter[str]:
        """Deletes all resources. Returns their remaining objects at the end, or at the time limit."""
        for each in await list_of(self.server, HETERO_INFERENCE.path(self.namespace), {}):
            await self.server.delete(HETERO_INFERENCE.path(self.namespace, each["metadata"]["name"]), {})
        deadline = time.monotonic() + REMOVE_S
        while True:
            left = await count_objects(self.server, self.namespace)
            left[SECRET.name] = await count_keys(self.server, self.namespace)
            left[names.KIND] = len(await list_of(self.server, HETERO_INFERENCE.path(self.namespace), {}))
            if not left.total() or time.monotonic() > deadline:
                return +left
            await asyncio.sleep(1.0)
