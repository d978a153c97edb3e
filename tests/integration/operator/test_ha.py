"""Tests several operators on one API server, and an API server that stops answering."""

import signal
import time
from pathlib import Path

import pytest

from heteroinfer_contract import metric_names
from heteroinfer_operator.kube.lease import (
    LeaderLease,
    LeaseLostError,
    LeaseNotHeldError,
    LeaseTerms,
    seconds_since_boot,
)
from heteroinfer_operator.kube.paths import HETERO_INFERENCE, LEASE, POD
from heteroinfer_operator.kube.server import ApiError, ApiServer
from tests.integration.operator.api_proxy import Request, api_proxy
from tests.integration.operator.conftest import Installation
from tests.integration.operator.life import (
    COLLECTED_S,
    Install,
    bring_up,
    condition,
    nothing_left,
    nth_epoch,
    pod_of,
    serve_epoch,
    status_of,
)
from tests.integration.operator.running_operator import (
    OperatorProcess,
    create_resource,
    end_pod,
    operator,
    pod,
    until,
)

LEASE_S = 3


def lease_settings(installed: Installation) -> dict[str, str]:
    return {
        "leader_election": "true",
        "lease_name": f"{installed.release}-heteroinfer",
        "lease_seconds": str(LEASE_S),
        "namespace": installed.release,
    }


async def lease_holder(server: ApiServer, installed: Installation) -> str:
    try:
        lease = await server.get(LEASE.path(installed.release, f"{installed.release}-heteroinfer"))
    except ApiError:
        return ""
    return str(lease["spec"].get("holderIdentity", ""))


async def held_by(server: ApiServer, installed: Installation, who: str) -> bool:
    return (await lease_holder(server, installed)).partition("_")[0] == who


@pytest.mark.parametrize("end", ["kill", "terminate", "freeze"])
async def test_another_replica_takes_over(
    server: ApiServer, namespace: str, install: Install, tmp_path: Path, end: str
) -> None:
    installed = install()
    settings = lease_settings(installed)
    async with operator(installed.kubeconfig, tmp_path / "one", identity="one", **settings) as one:
        await one.working()
        assert await held_by(server, installed, "one")
        async with operator(installed.kubeconfig, tmp_path / "two", identity="two", **settings) as two:
            await until("the other stands by", lambda: stands_by(two))
            if end == "kill":
                one.process.kill()
            elif end == "terminate":
                assert await one.stop() == 0
                assert await lease_holder(server, installed) in {""} or await held_by(
                    server, installed, "two"
                )
            else:
                one.process.send_signal(signal.SIGSTOP)
            await until("the other leads", lambda: held_by(server, installed, "two"), timeout_s=10)
            await two.working()
            if end == "freeze":
                one.process.send_signal(signal.SIGCONT)
                assert await one.ended() == 1
                assert "this process exits" in one.output
                assert await held_by(server, installed, "two")
            await create_resource(server, namespace)

            async def adopted() -> bool:
                resource = await server.get(HETERO_INFERENCE.path(namespace, "tiny"))
                return bool(resource["status"]["observedGeneration"] != -1)

            await until("the new leader works", adopted)
            await delete(server, namespace)


async def delete(server: ApiServer, namespace: str) -> None:
    """Deletes the resource, and waits until its children are gone."""
    await server.delete(HETERO_INFERENCE.path(namespace, "tiny"), {})
    await until("it is gone", lambda: nothing_left(server, namespace), timeout_s=COLLECTED_S)


async def stands_by(process: OperatorProcess) -> bool:
    status, text = await process.http("/readyz")
    return status == 200 and text.startswith("waiting for lease")


def writes(requests: list[Request]) -> list[Request]:
    return [each for each in requests if each.method != "GET"]


async def test_a_leader_paused_during_a_reconcile_writes_nothing(
    server: ApiServer, namespace: str, install: Install, tmp_path: Path
) -> None:
    """The process is stopped while it waits for the answer to a write, and resumes after the answer."""
    installed = install("scope=Namespaced", f"watchNamespaces={{{namespace}}}")
    settings = {**lease_settings(installed), "watch_namespaces": namespace, "resync_seconds": "1"}
    through = tmp_path / "through.kubeconfig"
    path = HETERO_INFERENCE.path(namespace, "tiny", "status")
    async with (
        api_proxy(installed.kubeconfig, through) as proxy,
        operator(through, tmp_path / "one", identity="one", **settings) as one,
    ):
        await one.working()
        await bring_up(server, namespace)
        async with operator(installed.kubeconfig, tmp_path / "two", identity="two", **settings) as two:
            await until("the other stands by", lambda: stands_by(two))
            hanging = proxy.inject(f"^{path}", method="PUT", hang=True)
            await end_pod(server, namespace, pod_of(namespace, 1, 1), exit_code=70, message="")
            await until("a reconcile that waits for its answer", lambda: hanging.hits)
            assert await held_by(server, installed, "one")
            one.process.send_signal(signal.SIGSTOP)
            proxy.heal()
            await until("the other leads", lambda: held_by(server, installed, "two"), 3 * LEASE_S)
            await serve_epoch(server, namespace, 2)
            before = len(proxy.requests)
            one.process.send_signal(signal.SIGCONT)
            assert await one.ended() == 1
            assert writes(proxy.requests[before:]) == [], one.output
            assert "this process exits" in one.output
            assert "Traceback" not in one.output, one.output
            assert await held_by(server, installed, "two")
            (group,) = (await status_of(server, namespace))["groups"]
            assert (group["epoch"], group["phase"], len(group["failures"])) == (
                nth_epoch(namespace, 2),
                "Ready",
                1,
            )
            await delete(server, namespace)


async def test_a_write_without_the_lease_is_not_sent(server: ApiServer, namespace: str) -> None:
    terms = LeaseTerms(
        namespace=namespace, name="lease", identity="me", duration_s=3, renew_s=0.2, deadline_s=0.5
    )
    lease = LeaderLease(server, terms)
    fenced = ApiServer(server.configuration, before_write=lease.require_held)
    owner = await create_resource(server, namespace)
    try:
        with pytest.raises(LeaseNotHeldError, match="Nothing was written"):
            await fenced.create(POD.path(namespace), pod(owner, "too-early"))
        await lease.acquire()
        await fenced.create(POD.path(namespace), pod(owner, "in-time"))

        def late() -> bool:
            try:
                lease.require_held()
            except LeaseNotHeldError:
                return True
            return False

        await until("the renewal is overdue", late)
        with pytest.raises(LeaseNotHeldError):
            await fenced.delete(POD.path(namespace, "in-time"), {})
        with pytest.raises(LeaseLostError, match=r"not renewed in 0\.5 s"):
            await lease.keep_renewing()
    finally:
        await fenced.close()
    stored = await server.get(LEASE.path(namespace, "lease"))
    assert stored["spec"]["leaseTransitions"] == 1
    found = [item["metadata"]["name"] for item in (await server.get(POD.path(namespace)))["items"]]
    assert found == ["in-time"]


async def test_a_silent_watch_is_detected(
    server: ApiServer, namespace: str, install: Install, tmp_path: Path
) -> None:
    """No connection breaks and no request fails; only events stop."""
    installed = install("scope=Namespaced", f"watchNamespaces={{{namespace}}}")
    settings = {"watch_namespaces": namespace, "resync_seconds": "1", "watch_silence_seconds": "2"}
    through = tmp_path / "through.kubeconfig"
    async with (
        api_proxy(installed.kubeconfig, through) as proxy,
        operator(through, tmp_path / "log", **settings) as process,
    ):
        await process.working()
        await bring_up(server, namespace)

        # The silence covers all watches, including kopf's. New lists and resyncs find the missed changes.
        silent = proxy.inject("watch=true", hang=True)
        await until("silent watches", lambda: silent.hits)
        await end_pod(server, namespace, pod_of(namespace, 1, 1), exit_code=70, message="")
        await serve_epoch(server, namespace, 2)
        await server.merge(HETERO_INFERENCE.path(namespace, "tiny"), {"spec": {"suspend": True}})

        async def suspended() -> bool:
            return await condition(server, namespace, "Ready") == ("True", "Suspended")

        await until("the operator sees the change of the spec", suspended)
        assert await process.http("/healthz") == (200, "ok")

        # Lists of pods are silent too. Reconciles continue with old data, and only its age shows that it is
        # old.
        proxy.inject(r"/pods(\?|$)", hang=True)

        async def unhealthy() -> bool:
            status, text = await process.http("/healthz")
            no_data = f"no data received about pods of {namespace}"
            return status == 500 and text.startswith("no resync for ") and no_data in text

        await until("liveness fails", unhealthy, timeout_s=30, details=lambda: process.output)
        last = await process.metric(metric_names.OPERATOR_LAST_PASS_TIMESTAMP_SECONDS)

        proxy.heal()

        async def well() -> bool:
            newer = await process.metric(metric_names.OPERATOR_LAST_PASS_TIMESTAMP_SECONDS) > last
            return newer and await process.http("/healthz") == (200, "ok")

        await until("liveness recovers", well, timeout_s=30, details=lambda: process.output)
        assert process.process.poll() is None
        assert "Traceback" not in process.output, process.output
        await delete(server, namespace)


async def test_a_machine_loses_its_lease_while_it_sleeps(server: ApiServer, namespace: str) -> None:
    now_s = seconds_since_boot()
    terms = LeaseTerms(
        namespace=namespace, name="slept", identity="one", duration_s=15, renew_s=3.0, deadline_s=10.0
    )
    lease = LeaderLease(server, terms, clock=lambda: now_s)
    await lease.acquire()
    lease.require_held()
    now_s += 3600.0
    with pytest.raises(LeaseNotHeldError, match="not renewed"):
        lease.require_held()


def test_the_lease_clock_advances_while_the_machine_sleeps() -> None:
    before = time.clock_gettime(time.CLOCK_BOOTTIME)
    assert before <= seconds_since_boot() <= time.clock_gettime(time.CLOCK_BOOTTIME)
