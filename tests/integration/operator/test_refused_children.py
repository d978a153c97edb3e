"""Tests objects that others refuse, own or change: the operator reports this, and retries rarely."""

import asyncio
import base64
import json
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from heteroinfer_contract import metric_names, names
from heteroinfer_operator.kube.paths import EVENT, HETERO_INFERENCE, NETWORK_POLICY, SERVICE
from heteroinfer_operator.kube.server import ApiServer
from heteroinfer_operator.nodes.node_assignment import Gang
from tests.integration.operator.life import (
    Install,
    bring_up,
    condition,
    is_ready,
    serve_epoch,
    status_of,
    workers,
)
from tests.integration.operator.own_servers import end_tls
from tests.integration.operator.running_operator import (
    PROFILE,
    OperatorProcess,
    create_resource,
    end_pod,
    operator,
    run_pod,
    served_gangs,
    until,
)
from tests.integration.operator.test_limits import QUOTAS, allow, living

CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
WEBHOOKS = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations"
POD_GROUPS: dict[str, Any] = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": "podgroups.scheduling.volcano.sh"},
    "spec": {
        "group": "scheduling.volcano.sh",
        "names": {"kind": "PodGroup", "plural": "podgroups", "singular": "podgroup"},
        "scope": "Namespaced",
        "versions": [
            {
                "name": "v1beta1",
                "served": True,
                "storage": True,
                "schema": {
                    "openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
                },
            }
        ],
    },
}
"""Any PodGroup of Volcano; its content does not matter here."""


async def writes(process: OperatorProcess, kind: str, verb: str) -> float:
    """Returns the number of accepted writes of a kind. A write of a status counts for its resource."""
    name = f'{metric_names.OPERATOR_WRITES_TOTAL}{{kind="{kind}",verb="{verb}"}}'
    return (await process.writes()).get(name, 0)


async def reasons(server: ApiServer, namespace: str) -> list[str]:
    return [event["reason"] for event in (await server.get(EVENT.path(namespace)))["items"]]


async def test_a_refused_gang_object_is_one_refusal(
    server: ApiServer, namespace: str, install: Install, tmp_path: Path, node: str
) -> None:
    await server.create(CRDS, POD_GROUPS)
    try:
        await until("PodGroups", lambda: has_volcano(server), timeout_s=30)
        await allow(server, namespace, "none", {"count/podgroups.scheduling.volcano.sh": "0"})
        await create_resource(server, namespace, scheduling={"gang": "Always"})
        async with operator(install().kubeconfig, tmp_path / "log", resync_seconds="5") as process:
            inspect = await until(
                "the inspect pod", lambda: living(server, namespace), 60, lambda: process.output
            )
            await end_pod(server, namespace, inspect[0], exit_code=0, message=json.dumps(PROFILE))

            async def refused() -> bool:
                return await condition(server, namespace, "Ready") == ("False", "ObjectRefused")

            await until("the refusal is reported", refused, timeout_s=30, details=lambda: process.output)
            (group,) = (await status_of(server, namespace))["groups"]
            statuses = await writes(process, names.PLURAL, "update")
            await asyncio.sleep(5)
            (after,) = (await status_of(server, namespace))["groups"]
            assert after["epoch"] == group["epoch"]
            # One write is usual, and messages about nodes may also change. The defect caused five writes a
            # second.
            assert await writes(process, names.PLURAL, "update") - statuses <= 10
            assert (await reasons(server, namespace)).count("ObjectRefused") == 1
            await server.delete(f"{QUOTAS.format(namespace)}/none", {})
            await serve_epoch(server, namespace, 1)
            assert await process.stop() == 0
    finally:
        await server.delete(f"{CRDS}/{POD_GROUPS['metadata']['name']}", {})


async def has_volcano(server: ApiServer) -> bool:
    return Gang.VOLCANO in await served_gangs(server)


@asynccontextmanager
async def policies_with_a_rule_more(server: ApiServer, folder: Path) -> AsyncIterator[None]:
    """Runs a webhook that adds a rule for monitoring to every NetworkPolicy on each write."""
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    new = ["-newkey", "rsa:2048", "-nodes", "-keyout", str(key), "-out", str(certificate), "-days", "1"]
    subject = ["-subj", "/CN=webhook", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(["openssl", "req", "-x509", *new, *subject], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    app = web.Application()
    app.router.add_post("/mutate", _let_monitoring_in)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
    port = runner.addresses[0][1]
    rule = {"apiGroups": ["networking.k8s.io"], "apiVersions": ["v1"], "resources": ["networkpolicies"]}
    client = {
        "url": f"https://127.0.0.1:{port}/mutate",
        "caBundle": base64.b64encode(certificate.read_bytes()).decode(),
    }
    webhook = {
        "name": "monitoring.example.test",
        "admissionReviewVersions": ["v1"],
        "sideEffects": "None",
        "failurePolicy": "Fail",
        "clientConfig": client,
        "rules": [{**rule, "operations": ["CREATE", "UPDATE"]}],
    }
    configuration = {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "MutatingWebhookConfiguration",
        "metadata": {"name": "monitoring"},
        "webhooks": [webhook],
    }
    await server.create(WEBHOOKS, configuration)
    try:
        yield
    finally:
        await server.delete(f"{WEBHOOKS}/monitoring", {})
        await end_tls(runner)


async def _let_monitoring_in(request: web.Request) -> web.Response:
    review = (await request.json())["request"]
    answer: dict[str, Any] = {"uid": review["uid"], "allowed": True}
    rules = review["object"]["spec"]["ingress"]
    if "monitoring" not in json.dumps(rules):
        rule = {"from": [{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}]}
        patch = json.dumps([{"op": "add", "path": "/spec/ingress/-", "value": rule}])
        answer |= {"patchType": "JSONPatch", "patch": base64.b64encode(patch.encode()).decode()}
    review = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": answer}
    return web.json_response(review)


async def test_reports_a_foreign_service_and_policies_changed_by_a_webhook(
    server: ApiServer, namespace: str, install: Install, tmp_path: Path, node: str
) -> None:
    theirs = {"selector": {"app": "somebody-else"}, "ports": [{"port": 8000}]}
    metadata = {"name": "tiny", "namespace": namespace}
    await server.create(
        SERVICE.path(namespace),
        {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": theirs},
    )
    async with operator(install().kubeconfig, tmp_path / "log", resync_seconds="30") as process:
        await process.working()
        async with policies_with_a_rule_more(server, tmp_path):

            async def changed() -> bool:
                return "ChangedByOthers" in await reasons(server, namespace)

            await create_resource(server, namespace)
            inspect = await until("the inspect pod", lambda: living(server, namespace))
            await end_pod(server, namespace, inspect[0], exit_code=0, message=json.dumps(PROFILE))

            async def both() -> list[str]:
                found = await workers(server, namespace, 1)
                return found if len(found) == 2 else []

            for pod in await until("its pods", both, timeout_s=30, details=lambda: process.output):
                await run_pod(server, namespace, pod)

            async def serves_nobody() -> bool:
                found = [await condition(server, namespace, kind) for kind in ("Available", "Ready")]
                status = await status_of(server, namespace)
                return status.get("readyReplicas") == 1 and found == [("False", "NameTaken")] * 2

            await until("an unreachable group", serves_nobody, 60, lambda: process.output)
            assert "endpoint" not in await status_of(server, namespace)
            await server.delete(SERVICE.path(namespace, "tiny"), {})
            await until("Ready", lambda: is_ready(server, namespace), 40, lambda: process.output)
            await until(
                "the changed fields are reported", changed, timeout_s=30, details=lambda: process.output
            )
            assert await condition(server, namespace, "Progressing") == ("False", "ChangedByOthers")
            before = await writes(process, "networkpolicies", "patch")
            await asyncio.sleep(5)
            assert await writes(process, "networkpolicies", "patch") - before <= 6
        assert (await reasons(server, namespace)).count("ChangedByOthers") == 1

        async def mended() -> bool:
            policy = await server.get(NETWORK_POLICY.path(namespace, "tiny-0-ranks"))
            return "monitoring" not in json.dumps(policy["spec"]) and await is_ready(server, namespace)

        await until("the policy is ours again", mended, timeout_s=60, details=lambda: process.output)
        resource = await server.get(HETERO_INFERENCE.path(namespace, "tiny"))
        assert resource["status"]["endpoint"]
        assert await process.stop() == 0


RULE: dict[str, Any] = {"from": [{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}]}


async def meddle(server: ApiServer, namespace: str, *, delete: bool) -> None:
    """Changes or deletes the policy of a group again and again, like another controller, until cancelled."""
    path = NETWORK_POLICY.path(namespace, "tiny-0-ranks")
    only = {"fieldSelector": "metadata.name=tiny-0-ranks"}
    async for event in server.watch(NETWORK_POLICY.path(namespace), only):
        rules = event["object"]["spec"]["ingress"]
        if event["type"] == "DELETED":
            continue
        if delete:
            await server.delete(path, {})
        elif RULE not in rules:
            await server.merge(path, {"spec": {"ingress": [*rules, RULE]}})


@pytest.mark.parametrize("reason", ["ChangedByOthers", "DeletedByOthers"])
async def test_reports_a_policy_that_another_controller_keeps_changing(
    server: ApiServer,
    namespace: str,
    install: Install,
    tmp_path: Path,
    node: str,
    reason: str,
) -> None:
    async with operator(install().kubeconfig, tmp_path / "log", resync_seconds="30") as process:
        await process.working()
        await bring_up(server, namespace)
        controller = asyncio.ensure_future(meddle(server, namespace, delete=reason == "DeletedByOthers"))
        try:

            async def is_reported() -> bool:
                return await condition(server, namespace, "Progressing") == ("False", reason)

            await until(
                "the other controller is reported", is_reported, timeout_s=30, details=lambda: process.output
            )
            before = await writes(process, "networkpolicies", "patch")
            await asyncio.sleep(5)
            assert await writes(process, "networkpolicies", "patch") - before <= 6
            assert not controller.done()
        finally:
            controller.cancel()
        assert await is_ready(server, namespace)
        assert (await reasons(server, namespace)).count(reason) == 1

        async def ours() -> bool:
            found = (await server.get(NETWORK_POLICY.path(namespace)))["items"]
            return len(found) == 1 and RULE not in found[0]["spec"]["ingress"] and not await is_reported()

        await until("the policy is ours again", ours, timeout_s=90, details=lambda: process.output)
        assert await process.stop() == 0
