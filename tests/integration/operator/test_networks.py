"""Tests the objects for restricted networks on a real API server with both address families."""

from pathlib import Path
from typing import Any

from heteroinfer_contract import names
from heteroinfer_operator.cluster import ResourceKey
from heteroinfer_operator.kube.paths import HETERO_INFERENCE, NETWORK_POLICY, POD, SERVICE
from heteroinfer_operator.kube.server import ApiServer
from heteroinfer_operator.manifests.egress_policy import Isolation, build_fetch_policies
from heteroinfer_operator.manifests.fetch_egress import FetchEgress
from heteroinfer_operator.manifests.identity import Owner
from tests.integration.operator.life import Install, bind, bring_up, status_of, stored
from tests.integration.operator.running_operator import operator, until
from tests.unit.manifests.test_golden import RESOURCE


def default_deny(namespace: str) -> dict[str, Any]:
    return {
        "apiVersion": NETWORK_POLICY.api_version,
        "kind": NETWORK_POLICY.name,
        "metadata": {"name": "default-deny", "namespace": namespace},
        "spec": {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]},
    }


async def egress(server: ApiServer, namespace: str) -> list[dict[str, Any]]:
    """Returns the egress policies that the operator created."""
    found = await stored(server, NETWORK_POLICY, namespace)
    return [policy for policy in found if policy["spec"]["policyTypes"] == ["Egress"]]


async def untouched_pods(server: ApiServer, namespace: str) -> list[dict[str, Any]]:
    """Returns the fields of each pod that the scheduler does not write."""
    changing = ("resourceVersion", "managedFields")
    return [
        {"spec": pod["spec"], **{key: each for key, each in pod["metadata"].items() if key not in changing}}
        for pod in await stored(server, POD, namespace)
    ]


async def end_worker_before_another_container(
    server: ApiServer, namespace: str, pod: str, container: str
) -> None:
    """Marks a worker as ended while another container of its pod still runs, in place of the kubelet."""
    base = {"image": "none", "imageID": "", "restartCount": 0, "ready": False}
    ended = {**base, "name": names.CONTAINER_WORKER, "state": {"terminated": {"exitCode": 0}}}
    running = {**base, "name": container, "state": {"running": {}}}
    await server.merge(
        POD.path(namespace, pod, "status"), {"status": {"containerStatuses": [ended, running]}}
    )


async def test_groups_run_with_policies_families_and_sidecars(
    server: ApiServer, namespace: str, install: Install, tmp_path: Path, node: str
) -> None:
    kubeconfig = install().kubeconfig
    async with operator(kubeconfig, tmp_path / "log") as process:
        await process.working()
        pods = await bring_up(server, namespace)
        service = await server.get(SERVICE.path(namespace, "tiny"))
        assert service["spec"]["ipFamilies"] == ["IPv4", "IPv6"]
        headless = await server.get(SERVICE.path(namespace, "tiny-0-ranks"))
        assert headless["spec"]["ipFamilyPolicy"] == "SingleStack"
        assert await egress(server, namespace) == []
        before = await untouched_pods(server, namespace)

        await server.create(NETWORK_POLICY.path(namespace), default_deny(namespace))
        [policy] = await until("the egress policy", lambda: egress(server, namespace))
        assert policy["spec"]["podSelector"]["matchLabels"][names.LABEL_GROUP] == "0"
        # The operator keeps an administrator's choice while it repairs other fields.
        single = {"spec": {"ipFamilyPolicy": "SingleStack"}}
        await server.merge(SERVICE.path(namespace, "tiny"), single)
        assert await process.stop() == 0
    async with operator(kubeconfig, tmp_path / "log again") as process:
        await process.working()
        [kept] = await egress(server, namespace)
        assert kept["metadata"]["uid"] == policy["metadata"]["uid"]
        await server.delete(NETWORK_POLICY.path(namespace, "default-deny"), {})

        async def gone() -> bool:
            return not await egress(server, namespace)

        await until("the end of the policy", gone)
        service = await server.get(SERVICE.path(namespace, "tiny"))
        assert service["spec"]["ipFamilyPolicy"] == "SingleStack"
        assert await untouched_pods(server, namespace) == before

        for pod in pods:
            # from now on, the deletion of the pod waits for a kubelet
            await bind(server, namespace, pod, node)
        await server.merge(HETERO_INFERENCE.path(namespace, "tiny"), {"spec": {"suspend": True}})
        await end_worker_before_another_container(server, namespace, pods[1], "istio-proxy")

        async def named() -> bool:
            words = f"pod {pods[1]}: its worker has ended, but container istio-proxy"
            [group] = (await status_of(server, namespace))["groups"]
            return words in str(group.get("message"))

        await until("the message about the container", named, details=lambda: process.output)
        for pod in pods:
            await server.delete(POD.path(namespace, pod), {"gracePeriodSeconds": 0})
        assert await process.stop() == 0


async def test_the_api_server_accepts_policies_of_fetches(server: ApiServer, namespace: str) -> None:
    owner = Owner(key=ResourceKey(namespace=namespace, name="tiny"), uid="u")
    narrow = FetchEgress(ports=(3128,), cidrs=("10.0.0.0/8",), excepted=("10.1.0.0/16", "fe80::/10"))
    for allowed in (FetchEgress(), narrow, FetchEgress(ports=())):
        for policy in build_fetch_policies(RESOURCE.spec, owner, Isolation(selectors=({},)), allowed):
            await server.dry_run_create(NETWORK_POLICY.path(namespace), policy, {})
