"""Tests that the status is true within two seconds, even if a kind, request, event or webhook fails.

Each case has a resource in its own namespace. One kind of request about that namespace fails, hangs, or takes
ten seconds, and a rank of the serving group is killed. Other resources have no fault, but their specs change,
too. They show the usual time on this machine, and that resources do not wait for each other.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from heteroinfer_contract import metric_names, names
from heteroinfer_operator.kube.paths import CONFIG_MAP, HETERO_INFERENCE, POD
from heteroinfer_operator.kube.server import ApiServer
from heteroinfer_operator.reconcile.budget import STATUS_WRITES_WITHIN
from tests.cluster.running_cluster import Cluster
from tests.integration.operator import life
from tests.integration.operator.api_proxy import ApiProxy, Fault, api_proxy
from tests.integration.operator.running_operator import OperatorProcess, end_rank, operator, until

WITHIN_S = 2.0
SLOW_S = 10.0
WITHOUT_A_FAULT = 3
"""Number of sites without a fault. Their position among all sites differs."""
MODES: dict[str, dict[str, Any]] = {
    "503": {"status": 503},
    "hangs": {"hang": True},
    "slow": {"delay_s": SLOW_S},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A request of the operator, and how the test causes it.

    Attributes:
        method: HTTP method of the request.
        path: regular expression of its path after the namespace.
        spec: change of the resource that causes the request, or None if the death of the rank causes it.
        loses: whether the test deletes the revision's record first, so that the operator creates it
            again.
        hides: whether the rank's pod loses its label first, so that no watch shows its end.
        tells: how the request fails in the short run.
        heals: whether the status can be written only after the fault is removed.
    """

    method: str
    path: str
    spec: dict[str, Any] | None = None
    loses: bool = False
    hides: bool = False
    tells: str = "slow"
    heals: bool = False

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


SCALE: dict[str, Any] = {"replicas": 2}
REVISION: dict[str, Any] = {"engine": {"maxModelLen": 256}}
HUB: dict[str, Any] = {"model": {"uri": "hf://acme/tiny", "cache": {"size": "1Gi"}}}
CASES = (
    Case(method="GET", path=r"/pods/tiny", hides=True, tells="503"),
    Case(method="GET", path=r"/pods/tiny", hides=True, tells="hangs"),
    Case(method="POST", path=r"/pods\?fieldManager=[^&]*$", spec=SCALE),
    Case(method="POST", path=r"/pods\?.*dryRun", spec=REVISION),
    Case(method="POST", path=r"/configmaps\?fieldManager=[^&]*$", loses=True, tells="hangs"),
    Case(method="POST", path=r"/secrets", spec=SCALE),
    Case(method="POST", path=r"/persistentvolumeclaims", spec=HUB, tells="503"),
    Case(method="POST", path=r"/events", tells="hangs"),
    Case(method="GET", path=r"/services/", spec=SCALE, tells="hangs"),
    Case(method="PATCH", path=r"/services/", spec=SCALE),
    Case(method="PATCH", path=r"/networkpolicies/", spec=SCALE, tells="503"),
    Case(method="PATCH", path=r"/poddisruptionbudgets/", spec=SCALE, tells="hangs"),
    Case(method="PATCH", path=r"/heteroinferences/tiny\b(?!/)", tells="slow"),
    Case(method="DELETE", path=r"/pods/", tells="hangs"),
    Case(method="PUT", path=r"/heteroinferences/tiny/status", tells="503", heals=True),
    Case(method="PUT", path=r"/heteroinferences/tiny/status", tells="hangs", heals=True),
)


@dataclass(slots=True, kw_only=True)
class Site:
    """A serving resource in its own namespace."""

    namespace: str
    case: Case | None = None
    mode: str = ""
    pods: list[str] = field(default_factory=list)
    fault: Fault | None = None
    since_s: float = 0.0
    """Monotonic time at which the rank was killed, or at which the API server answered again."""

    def __str__(self) -> str:
        return f"{self.case} {self.mode}" if self.case is not None else "without a fault"


class Watcher:
    """Records when each namespace's resource was first seen as not Available."""

    def __init__(self, server: ApiServer) -> None:
        self.down: dict[str, float] = {}
        self._server = server
        self._version = ""

    async def begin(self) -> None:
        """Reads the version from which `run` watches, so that it misses no later change."""
        listed = await self._server.get(HETERO_INFERENCE.path())
        self._version = listed["metadata"]["resourceVersion"]

    async def run(self) -> None:
        query = {"resourceVersion": self._version}
        async for event in self._server.watch(HETERO_INFERENCE.path(), query):
            stored = event["object"]
            for condition in (stored.get("status") or {}).get("conditions", ()):
                if condition["type"] == "Available" and condition["status"] == "False":
                    self.down.setdefault(stored["metadata"]["namespace"], time.monotonic())


@contextlib.asynccontextmanager
async def watcher(server: ApiServer) -> AsyncIterator[Watcher]:
    found = Watcher(server)
    await found.begin()
    task = asyncio.ensure_future(found.run())
    try:
        yield found
    finally:
        task.cancel()
        await asyncio.wait({task})


async def make_namespaces(
    control_plane: Cluster, server: ApiServer, tmp_path: Path, namespaces: Sequence[str]
) -> None:
    """Creates namespaces, and waits until pods can be created in them."""
    items = [{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}} for name in namespaces]
    file = tmp_path / "namespaces.json"
    file.write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": items}))
    control_plane.kubectl("create", "-f", str(file))

    async def have_accounts() -> bool:
        found = await server.get("/api/v1/serviceaccounts")
        accounts = [account["metadata"] for account in found["items"]]
        return set(namespaces) <= {each["namespace"] for each in accounts if each["name"] == "default"}

    await until("the namespaces' service accounts", have_accounts, timeout_s=60)


async def bring_up(server: ApiServer, site: Site) -> None:
    site.pods = await life.bring_up(server, site.namespace)


async def inject(server: ApiServer, proxy: ApiProxy, site: Site) -> None:
    """Makes the requests of a case fail, and waits until one is pending."""
    case = site.case
    assert case is not None
    path = rf"/namespaces/{site.namespace}{case.path}"
    site.fault = fault = proxy.inject(path, method=case.method, **MODES[site.mode])
    if case.spec is not None:
        resource = HETERO_INFERENCE.path(site.namespace, "tiny")
        await server.merge(resource, {"spec": case.spec})
        await until(f"{site}: the request is sent", lambda: fault.hits, timeout_s=60)
    if case.loses:
        for stored in await life.stored(server, CONFIG_MAP, site.namespace):
            if "-revision-" in stored["metadata"]["name"]:
                await server.delete(CONFIG_MAP.path(site.namespace, stored["metadata"]["name"]), {})
        await until(f"{site}: the request is sent", lambda: fault.hits, timeout_s=60)
    if "heteroinferences/tiny\\b" in case.path:
        await server.merge(
            HETERO_INFERENCE.path(site.namespace, "tiny"), {"metadata": {"finalizers": [names.FINALIZER]}}
        )
        await until(f"{site}: the request is sent", lambda: fault.hits, timeout_s=60)


def has_reported(proxy: ApiProxy, sites: Sequence[Site]) -> bool:
    """Returns whether the operator has written no status for so long that its next write need not wait.

    If the fault is the write of the status, the operator repeats this write.
    """
    since_s = time.monotonic() - STATUS_WRITES_WITHIN.total_seconds()
    paths = {
        HETERO_INFERENCE.path(site.namespace, "tiny", "status")
        for site in sites
        if site.case is None or not site.case.heals
    }
    return not any(each.at > since_s and each.path in paths for each in proxy.requests)


async def kill(server: ApiServer, site: Site) -> None:
    if site.case is not None and site.case.hides:
        no_label = {"metadata": {"labels": {names.LABEL_RESOURCE: None}}}
        await server.merge(POD.path(site.namespace, site.pods[1]), no_label)
    await end_rank(server, site.namespace, site.pods[1], index=1)
    site.since_s = time.monotonic()


async def gather_few(work: Sequence[Callable[[], Awaitable[None]]], at_once: int = 6) -> None:
    slots = asyncio.Semaphore(at_once)

    async def one(each: Callable[[], Awaitable[None]]) -> None:
        async with slots:
            await each()

    await asyncio.gather(*(one(each) for each in work))


@contextlib.asynccontextmanager
async def serving(
    control_plane: Cluster, server: ApiServer, tmp_path: Path, sites: Sequence[Site], **settings: str
) -> AsyncIterator[tuple[ApiProxy, OperatorProcess]]:
    """Runs an operator behind a proxy, with a serving resource in each site."""
    try:
        async with api_proxy(control_plane.kubeconfig, tmp_path / "kubeconfig") as proxy:
            async with operator(proxy.kubeconfig, tmp_path / "operator.log", **settings) as process:
                await process.working()
                await make_namespaces(control_plane, server, tmp_path, [site.namespace for site in sites])
                await gather_few([lambda site=site: bring_up(server, site) for site in sites])  # type: ignore[misc]
                yield proxy, process
            proxy.heal()
    finally:  # in later tests, the remaining pods would count as waiting for a node
        for site in sites:
            control_plane.kubectl("delete", "namespace", site.namespace, "--wait=false", "--ignore-not-found")


async def latencies(found: Watcher, sites: Sequence[Site]) -> dict[str, float]:
    """Returns for each site the seconds until its resource was not Available. Waits a limited time.

    Of the sites without a fault, only the slowest is returned.
    """
    namespaces = {site.namespace for site in sites}
    with contextlib.suppress(AssertionError):
        await until("no resource is Available", lambda: namespaces <= found.down.keys(), timeout_s=SLOW_S + 5)
    took: dict[str, float] = {}
    for site in sites:
        seconds = found.down.get(site.namespace, float("inf")) - site.since_s
        took[str(site)] = max(seconds, took.get(str(site), seconds))
    return took


def too_late(took: dict[str, float]) -> dict[str, float]:
    """Returns the sites that were later than the limit, and later than the sites without a fault."""
    bound = WITHIN_S + max(took["without a fault"], 0.0)
    return {name: round(seconds, 2) for name, seconds in took.items() if seconds > bound}


async def check(
    control_plane: Cluster, server: ApiServer, tmp_path: Path, cases: Sequence[tuple[Case, str]]
) -> None:
    """Kills a rank in every site while its case's requests fail, and checks the times of the statuses."""
    prefix = f"first-{time.monotonic_ns() % 10**8}"
    sites = [Site(namespace=f"{prefix}-{i}", case=case, mode=mode) for i, (case, mode) in enumerate(cases)]
    without = [Site(namespace=f"{prefix}-other-{i}") for i in range(WITHOUT_A_FAULT)]
    control_plane.kubectl("create", "secret", "generic", "-n", "default", f"{prefix}-key")
    settings = {"namespace": "default", "key_secret": f"{prefix}-key"}
    async with serving(control_plane, server, tmp_path, [*sites, *without], **settings) as (proxy, process):
        await gather_few([lambda site=site: inject(server, proxy, site) for site in sites])  # type: ignore[misc]
        for site in without:
            await server.merge(HETERO_INFERENCE.path(site.namespace, "tiny"), {"spec": SCALE})
        await until(
            "the operator has reported the new specs", lambda: has_reported(proxy, [*sites, *without])
        )
        async with watcher(server) as found:
            await asyncio.gather(*(kill(server, site) for site in (*sites, *without)))
            for site in sites:
                if site.case is not None and site.case.heals:
                    await heal_later(proxy, process, site)
            took = await latencies(found, [*sites, *without])
        unmet = [str(site) for site in sites if site.fault is None or not site.fault.hits]
        assert process.process.poll() is None, process.output
        assert took["without a fault"] < SLOW_S, "these sites wait for the others"
        assert too_late(took) == {}, took
        assert unmet == [], "no such request was sent: the case proves nothing"
        assert "defect of the operator" not in process.output


async def heal_later(proxy: ApiProxy, process: OperatorProcess, site: Site) -> None:
    """Heals the API server after the operator's metrics show that it cannot write a status."""
    fault = site.fault
    assert fault is not None
    await until(f"{site}: a status write is due", lambda: fault.hits)

    async def shown() -> bool:
        return await process.metric(metric_names.OPERATOR_UNWRITTEN_STATUSES) > 0

    await until("the metrics show a failed status write", shown, timeout_s=WITHIN_S)
    proxy.heal(fault)
    site.since_s = time.monotonic()


async def test_available_matches_the_pods_if_one_request_misbehaves(
    control_plane: Cluster, server: ApiServer, tmp_path: Path
) -> None:
    await check(control_plane, server, tmp_path, [(case, case.tells) for case in CASES])


@pytest.mark.every_request
@pytest.mark.parametrize("mode", MODES)
async def test_available_matches_the_pods_if_every_request_fails(
    control_plane: Cluster, server: ApiServer, tmp_path: Path, mode: str
) -> None:
    cases = [case for index, case in enumerate(CASES) if str(case) not in map(str, CASES[:index])]
    await check(control_plane, server, tmp_path, [(case, mode) for case in cases])


OTHER_KINDS = "services|configmaps|networkpolicies|poddisruptionbudgets|persistentvolumeclaims|nodes"


@pytest.mark.parametrize("mode", ["503", "hangs"])
async def test_available_matches_the_pods_while_no_other_kind_is_watched(
    control_plane: Cluster, server: ApiServer, tmp_path: Path, mode: str
) -> None:
    sites = [Site(namespace=f"lists-{mode}-{time.monotonic_ns() % 10**8}")]
    async with serving(control_plane, server, tmp_path, sites) as (proxy, process):
        kinds = rf"^/apis?/[^?]*/({OTHER_KINDS})\?|fieldSelector=status.phase"
        fault = proxy.inject(kinds, method="GET", **MODES[mode])
        proxy.cut_watches(kinds)
        await until("lists and watches fail", lambda: fault.hits, timeout_s=60)
        async with watcher(server) as found:
            await kill(server, sites[0])
            (took,) = (await latencies(found, sites)).values()
        assert took < WITHIN_S + 1
        assert process.process.poll() is None, process.output


async def test_an_outage_of_the_lease_delays_no_status_and_ends_no_process(
    control_plane: Cluster, server: ApiServer, tmp_path: Path
) -> None:
    """Earlier, a hanging renewal lasted until the Lease was lost, although the API server answered again."""
    prefix = f"lease-{time.monotonic_ns() % 10**8}"
    sites = [Site(namespace=f"{prefix}-{i}") for i in range(2)]
    settings = {
        "leader_election": "true",
        "lease_name": prefix,
        "namespace": "default",
        "identity": "one",
        "lease_seconds": "15",
    }
    async with serving(control_plane, server, tmp_path, sites, **settings) as (proxy, process):
        fault = proxy.inject(rf"/leases/{prefix}", method="PUT", hang=True)
        await until("a renewal hangs", lambda: fault.hits, timeout_s=30)
        async with watcher(server) as found:
            await kill(server, sites[0])
            await until("the status", lambda: sites[0].namespace in found.down)
            assert found.down[sites[0].namespace] - sites[0].since_s < WITHIN_S + 1
            await until("another renewal", lambda: fault.hits >= 2, timeout_s=10)
            proxy.heal()
            renewed = proxy.count(rf"/leases/{prefix}", "PUT")
            await until(
                "renewals", lambda: proxy.count(rf"/leases/{prefix}", "PUT") > renewed + 1, timeout_s=30
            )
            await kill(server, sites[1])
            await until("the status", lambda: sites[1].namespace in found.down)
            assert found.down[sites[1].namespace] - sites[1].since_s < WITHIN_S + 1
        assert process.process.poll() is None, process.output
