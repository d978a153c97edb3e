"""Tests a model from a hub under the operator: claim, fetch pod, progress, errors and deletion."""

import contextlib
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from heteroinfer_contract import codec, names
from heteroinfer_contract.failure import Failure, FailureReason
from heteroinfer_contract.model_fetch import (
    CONFIRMED_S,
    QUESTION_HEADER,
    CacheCleanup,
    FetchedModel,
    FetchProgress,
    hash_token,
)
from heteroinfer_contract.model_profile import ModelProfile
from heteroinfer_contract.report_access import CREDENTIALS_HEADER, SCHEME
from heteroinfer_operator.kube.paths import CLAIM, EVENT, HETERO_INFERENCE, NODE, POD
from heteroinfer_operator.kube.server import ApiError, ApiServer
from tests.integration.operator.api_proxy import api_proxy
from tests.integration.operator.life import Install, bind, condition, serve_epoch, status_of, stored
from tests.integration.operator.running_operator import (
    PROFILE,
    SPEC,
    add_node,
    create_resource,
    end_pod,
    operator,
    run_pod,
    until,
)

COMMIT = "c" * 40
ADDRESS = "127.0.0.77"
"""Each pod has its own loopback address, because all worker pods use the same ports."""
SECRET = "hub-token"


def hub_spec(**model: Any) -> dict[str, Any]:
    model = {"uri": "hf://acme/tiny", "servedName": "tiny", "cache": {"size": "1Gi"}, **model}
    return {**SPEC, "model": model}


async def apply(server: ApiServer, namespace: str, spec: dict[str, Any], name: str = "tiny") -> None:
    body = {
        "apiVersion": HETERO_INFERENCE.api_version,
        "kind": names.KIND,
        "metadata": {"name": name, "namespace": namespace},
        "spec": spec,
    }
    await server.apply(HETERO_INFERENCE.path(namespace, name), body, manager="user")


async def wait_for_fetch_pod(server: ApiServer, namespace: str, resource: str = "tiny") -> dict[str, Any]:
    """Waits for the fetch pod of a resource."""

    async def found() -> dict[str, Any] | None:
        for pod in await stored(server, POD, namespace):
            labels = pod["metadata"]["labels"]
            wanted = (names.COMPONENT_FETCH, resource)
            if (labels.get(names.LABEL_COMPONENT), labels[names.LABEL_RESOURCE]) != wanted:
                continue
            if "deletionTimestamp" not in pod["metadata"]:
                return pod
        return None

    pod: dict[str, Any] = await until("the fetch pod", found)
    return pod


def cleanup_of(fetch: dict[str, Any]) -> CacheCleanup | None:
    """Returns the commits that a fetch pod may remove, or None if it removes nothing."""
    (variables,) = (container["env"] for container in fetch["spec"]["containers"])
    found = [each["value"] for each in variables if each["name"] == names.ENV_CACHE_CLEANUP]
    return CacheCleanup.from_json(found[0]) if found else None


@dataclass
class Asking:
    """Answers in place of a fetch pod, and records the operator's confirmations.

    Attributes:
        question: number of the open question, or None.
        confirmed: for each question, the monotonic time of its first confirmation.
        hashes: hashes of the tokens in the pod's environment.
    """

    progress: FetchProgress
    question: int | None = None
    confirmed: dict[int, float] = field(default_factory=dict)
    hashes: tuple[str, ...] = ()

    def answer(self, request: web.Request) -> web.Response:
        if CREDENTIALS_HEADER in request.headers:
            scheme, _, token = request.headers[CREDENTIALS_HEADER].partition(" ")
            assert scheme == SCHEME
            self.confirmed.setdefault(self.hashes.index(hash_token(token)), time.monotonic())
        is_open = self.question is not None and self.question not in self.confirmed
        headers = {QUESTION_HEADER: str(self.question)} if is_open else {}
        return web.Response(text=self.progress.to_json(), headers=headers)


@contextlib.asynccontextmanager
async def telling(asking: Asking) -> AsyncIterator[None]:
    """Answers the operator's queries in place of the pod, because no kubelet runs here."""

    async def fetch(request: web.Request) -> web.Response:
        return asking.answer(request)

    app = web.Application()
    app.add_routes([web.get(names.PATH_FETCH, fetch)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, ADDRESS, names.DEFAULT_HEALTH_PORT).start()
    try:
        yield
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("label", [names.LABEL_COMPONENT, names.LABEL_RESOURCE])
async def test_the_inspect_pod_is_recognized_without_its_label(
    server: ApiServer, namespace: str, install: Install, tmp_path: Path, node: str, label: str
) -> None:
    """Earlier, the operator tried to create the pod again and again, but its name already existed."""
    async with operator(install().kubeconfig, tmp_path / "log", resync_seconds="1") as process:
        await process.working()
        await create_resource(server, namespace)

        async def inspects() -> str:
            found = [pod["metadata"]["name"] for pod in await stored(server, POD, namespace)]
            return next((name for name in found if "-inspect-" in name), "")

        name = await until("the inspect pod", inspects)
        await server.merge(POD.path(namespace, name), {"metadata": {"labels": {label: None}}})

        async def reported() -> bool:
            events = (await server.get(EVENT.path(namespace)))["items"]
            return any(event["reason"] == "PodLabelLost" and name in event["note"] for event in events)

        await until("the event", reported, details=lambda: process.output)
        await end_pod(server, namespace, name, exit_code=0, message=json.dumps(PROFILE))
        await serve_epoch(server, namespace, 1)
        with pytest.raises(ApiError, match="not found"):
            await server.get(POD.path(namespace, name))


async def test_reports_the_provisioners_message_for_an_unbound_claim(
    server: ApiServer, namespace: str, install: Install, tmp_path: Path, node: str
) -> None:
    storage_class: dict[str, Any] = {
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": {"name": f"blocks-{namespace}"},
        "provisioner": "blocks.example.test",
    }
    await server.create("/apis/storage.k8s.io/v1/storageclasses", storage_class)
    message = "blocks.example.test only supports ReadWriteOnce"
    async with operator(install().kubeconfig, tmp_path / "log", resync_seconds="60") as process:
        await process.working()
        cache = {"size": "1Gi", "storageClassName": storage_class["metadata"]["name"]}
        await apply(server, namespace, hub_spec(cache=cache))

        async def claims() -> list[dict[str, Any]]:
            return await stored(server, CLAIM, namespace)

        (claim,) = await until("the claim", claims, details=lambda: process.output)
        # External provisioners record a Warning about the claim.
        about = {"kind": CLAIM.name, "namespace": namespace, "name": claim["metadata"]["name"]}
        event = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"generateName": "claim-"},
            "involvedObject": {"apiVersion": "v1", "uid": claim["metadata"]["uid"], **about},
            "type": "Warning",
            "reason": "ProvisioningFailed",
            "message": message,
            "source": {"component": "blocks.example.test_provisioner"},
        }
        await server.create(f"/api/v1/namespaces/{namespace}/events", event)

        async def quoted() -> bool:
            conditions = (await status_of(server, namespace)).get("conditions", ())
            words = next((each.get("message", "") for each in conditions if each["type"] == "ModelReady"), "")
            settings = f"storage class {cache['storageClassName']}, ReadWriteMany, 1Gi"
            expected = (
                f"claim {about['name']} ({settings}) is not bound",
                f'blocks.example.test_provisioner reports ProvisioningFailed: "{message}"',
                "Set spec.model.cache.storageClassName and accessMode",
            )
            return all(each in words for each in expected)

        await until("the provisioner's message", quoted, timeout_s=40, details=lambda: process.output)
        gone = {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": f"made-{namespace}"}}
        volume = {
            "capacity": {"storage": "1Gi"},
            "accessModes": ["ReadWriteMany"],
            "storageClassName": cache["storageClassName"],
            "hostPath": {"path": "/none"},
            "claimRef": {"namespace": namespace, "name": about["name"]},
        }
        await server.create("/api/v1/persistentvolumes", {**gone, "spec": volume})

        async def bound() -> bool:
            text = json.dumps((await status_of(server, namespace)).get("conditions", ()))
            return "is not bound" not in text

        await until("the claim binds", bound, timeout_s=40, details=lambda: process.output)
        assert await process.stop() == 0


async def test_reports_a_missing_config_map_of_a_pod(
    server: ApiServer, namespace: str, install: Install, tmp_path: Path, node: str
) -> None:
    async with operator(install().kubeconfig, tmp_path / "log", resync_seconds="60") as process:
        await process.working()
        await apply(server, namespace, hub_spec(caBundle={"configMapKeyRef": {"name": "ours", "key": "ca"}}))
        fetch = await wait_for_fetch_pod(server, namespace)
        name = fetch["metadata"]["name"]
        await bind(server, namespace, name, node)
        # Like a kubelet.
        about = {"apiVersion": "v1", "kind": POD.name, "namespace": namespace, "name": name}
        event = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"generateName": "mount-"},
            "involvedObject": {"uid": fetch["metadata"]["uid"], **about},
            "type": "Warning",
            "reason": "FailedMount",
            "message": 'MountVolume.SetUp failed for volume "ca-bundle" : configmap "ours" not found',
            "source": {"component": "kubelet"},
        }
        await server.create(f"/api/v1/namespaces/{namespace}/events", event)

        async def named() -> bool:
            conditions = (await status_of(server, namespace)).get("conditions", ())
            [found] = [each for each in conditions if each["type"] == "ModelReady"] or [{}]
            words = f"pod {name} cannot start: ConfigMap ours does not exist in namespace {namespace}"
            return found.get("reason") == "FailedMount" and words in found["message"]

        await until("the name of the ConfigMap", named, timeout_s=10, details=lambda: process.output)
        await server.delete(POD.path(namespace, name), {"gracePeriodSeconds": 0})
        assert await process.stop() == 0


async def test_a_model_in_an_image_waits_for_a_node_that_can_mount_it(
    server: ApiServer, namespace: str, install: Install, tmp_path: Path
) -> None:
    """Both nodes have a containerd without image volumes; then one node is upgraded."""
    uri = f"oci://registry.test/llama@sha256:{'a' * 64}"
    pool = {"pool": namespace}
    role = {"device": "CPU", "template": {"nodeSelector": pool}}
    spec = {**SPEC, "model": {"uri": uri}, "roles": [{"name": name, **role} for name in ("front", "back")]}
    nodes = [f"{namespace}-{name}" for name in ("kept", "upgraded")]
    for name in nodes:
        await add_node(server, name)
        await server.merge(NODE.path(None, name), {"metadata": {"labels": pool}})
        await set_runtime(server, name, "containerd://1.7.20")

    async def inspects() -> list[dict[str, Any]]:
        pods = await stored(server, POD, namespace)
        return [pod for pod in pods if "-inspect-" in pod["metadata"]["name"]]

    try:
        async with operator(install().kubeconfig, tmp_path / "log", resync_seconds="2") as process:
            await process.working()
            await apply(server, namespace, spec)

            async def refused() -> str:
                conditions = (await status_of(server, namespace)).get("conditions", ())
                [found] = [each for each in conditions if each["type"] == "ModelReady"] or [{}]
                state = (found.get("status"), found.get("reason"))
                return str(found["message"]) if state == ("False", "ImageVolumesNotSupported") else ""

            words = await until("the refusal", refused, details=lambda: process.output)
            assert words.startswith(f"{uri}: no node can mount this image: nodes {nodes[0]}, {nodes[1]} have")
            assert "containerd 1.7, which cannot mount image volumes (containerd 2.1 can)" in words
            assert "use hf:// or pvc:// in model.uri" in words
            assert await stored(server, POD, namespace) == []

            await set_runtime(server, nodes[1], "containerd://2.1.4")
            (pod,) = await until("the inspect pod", inspects, timeout_s=90, details=lambda: process.output)
            images = [volume["image"] for volume in pod["spec"]["volumes"] if "image" in volume]
            assert [image["reference"] for image in images] == [uri.removeprefix("oci://")]
            required = "requiredDuringSchedulingIgnoredDuringExecution"
            terms = pod["spec"]["affinity"]["nodeAffinity"][required]["nodeSelectorTerms"]
            excluded = {"key": "metadata.name", "operator": "NotIn", "values": [nodes[0]]}
            assert [term["matchFields"] for term in terms] == [[excluded]]
            await until("no refusal", lambda: is_accepted(server, namespace), details=lambda: process.output)
            assert await process.stop() == 0
    finally:
        for name in nodes:
            await server.delete(NODE.path(None, name), {})


async def set_runtime(server: ApiServer, name: str, runtime: str) -> None:
    """Reports the container runtime of a node, in place of its kubelet."""
    info = {"containerRuntimeVersion": runtime, "kubeletVersion": "v1.35.4"}
    await server.merge(NODE.path(None, name, "status"), {"status": {"nodeInfo": info}})


async def is_accepted(server: ApiServer, namespace: str) -> bool:
    return (await condition(server, namespace, "ModelReady"))[1] != "ImageVolumesNotSupported"


async def test_a_model_of_a_hub_becomes_ready(
    server: ApiServer, namespace: str, install: Install, tmp_path: Path, node: str
) -> None:
    installed = install()
    async with operator(installed.kubeconfig, tmp_path / "log", **installed.key) as process:
        await process.working()
        await apply(server, namespace, hub_spec())
        fetch = await wait_for_fetch_pod(server, namespace)
        (claim,) = await stored(server, CLAIM, namespace)
        assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
        mounted = {"claimName": claim["metadata"]["name"]}
        cleanup = cleanup_of(fetch)
        assert cleanup is not None
        assert cleanup.keep == 2
        assert fetch["spec"]["volumes"][-1]["persistentVolumeClaim"] == mounted

        failure = Failure(reason=FailureReason.MODEL_ACCESS_DENIED, message="gated: Accept its licence")
        name = fetch["metadata"]["name"]
        await end_pod(server, namespace, name, exit_code=names.EXIT_FETCH_FAILED, message=failure.to_json())

        async def denied() -> bool:
            return await condition(server, namespace, "ModelReady") == ("False", "ModelAccessDenied")

        await until("the refusal in the status", denied)

        async def reported() -> bool:
            events = (await server.get(EVENT.path(namespace)))["items"]
            return any(e["reason"] == "ModelAccessDenied" and "licence" in e["note"] for e in events)

        await until("the event", reported)

        # With a token, the operator creates another pod immediately, and leaves the claim unchanged.
        token = {"tokenSecretRef": {"name": SECRET}}
        await apply(server, namespace, hub_spec(**token))

        async def another() -> str:
            pod = await wait_for_fetch_pod(server, namespace)
            return str(pod["metadata"]["name"]) if pod["metadata"]["name"] != name else ""

        name = await until("a fetch with the token", another)
        gibi = 2**30
        async with telling(Asking(FetchProgress(commit=COMMIT, done_bytes=gibi, total_bytes=4 * gibi))):
            await run_pod(server, namespace, name)
            address = {"podIP": ADDRESS, "podIPs": [{"ip": ADDRESS}]}
            await server.merge(POD.path(namespace, name, "status"), {"status": address})

            async def progress() -> bool:
                model = (await status_of(server, namespace)).get("model", {})
                return (model.get("bytesDone"), model.get("bytesTotal")) == (gibi, 4 * gibi)

            await until("progress in the status", progress)
        assert await condition(server, namespace, "ModelReady") == ("Unknown", "Fetching")

        profile = codec.from_mapping(ModelProfile, PROFILE)
        answer = FetchedModel(commit=COMMIT, size_bytes=4 * gibi, profile=profile)
        await end_pod(server, namespace, name, exit_code=0, message=answer.to_json())
        for worker in await serve_epoch(server, namespace, 1):
            spec = (await server.get(POD.path(namespace, worker)))["spec"]
            assert spec["volumes"][-1]["persistentVolumeClaim"] == {**mounted, "readOnly": True}
            env = {variable["name"]: variable for variable in spec["containers"][0]["env"]}
            assert env[names.ENV_HUB_OFFLINE]["value"] == "1"
            assert names.ENV_HUB_TOKEN not in env
        assert (await status_of(server, namespace))["model"]["commit"] == COMMIT

        await server.delete(HETERO_INFERENCE.path(namespace, "tiny"), {})

        async def gone() -> bool:
            return not await stored(server, CLAIM, namespace) and not await stored(server, POD, namespace)

        await until("the end of pods and claim", gone, timeout_s=60)
    log = (tmp_path / "log").read_text()
    assert "Traceback" not in log


async def create_claim(server: ApiServer, namespace: str, name: str) -> None:
    """Creates a claim that belongs to the user."""
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": name},
        "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}},
    }
    await server.create(CLAIM.path(namespace), claim)


async def test_a_fetch_may_not_remove_commits_of_other_resources(
    server: ApiServer, namespace: str, install: Install, tmp_path: Path, node: str
) -> None:
    """Three resources download into one claim of the user: `other` first, `early` meanwhile, `tiny` later."""
    await create_claim(server, namespace, "shared")
    release = install()
    async with operator(release.kubeconfig, tmp_path / "log", **release.key) as process:
        await process.working()
        await apply(server, namespace, hub_spec(cache={"claimName": "shared"}), "other")
        fetch = await wait_for_fetch_pod(server, namespace, "other")
        assert cleanup_of(fetch) is None, "the claim belongs to the user, who set no `keep`"

        spec = hub_spec(cache={"claimName": "shared", "keep": 1})
        await apply(server, namespace, spec, "early")
        early = await wait_for_fetch_pod(server, namespace, "early")
        assert cleanup_of(early) is None, "the commit of `other` is not known yet"
        await server.delete(HETERO_INFERENCE.path(namespace, "early"), {})

        profile = codec.from_mapping(ModelProfile, PROFILE)
        answer = FetchedModel(commit=COMMIT, size_bytes=2**30, profile=profile).to_json()
        await end_pod(server, namespace, fetch["metadata"]["name"], exit_code=0, message=answer)

        async def recorded() -> bool:
            model = (await server.get(HETERO_INFERENCE.path(namespace, "other"))).get("status", {})
            return bool(model.get("model", {}).get("commit") == COMMIT)

        await until("the commit of `other` in its status", recorded, details=lambda: process.output)

        async def early_is_gone() -> bool:
            found = await stored(server, POD, namespace)
            return not [pod for pod in found if pod["metadata"]["labels"][names.LABEL_RESOURCE] == "early"]

        await until("the end of `early`", early_is_gone, timeout_s=60, details=lambda: process.output)
        await apply(server, namespace, spec)
        cleanup = cleanup_of(await wait_for_fetch_pod(server, namespace))
        assert cleanup is not None
        assert (cleanup.keep, COMMIT in cleanup.in_use) == (1, True)


async def run_fetch(server: ApiServer, namespace: str, asking: Asking) -> None:
    """Creates a resource that may remove commits from claim `shared`, and runs its fetch pod."""
    await apply(server, namespace, hub_spec(cache={"claimName": "shared", "keep": 1}))
    fetch = await wait_for_fetch_pod(server, namespace)
    cleanup = cleanup_of(fetch)
    assert cleanup is not None
    assert COMMIT not in cleanup.in_use
    asking.hashes = cleanup.token_hashes
    name = fetch["metadata"]["name"]
    await run_pod(server, namespace, name)
    address = {"podIP": ADDRESS, "podIPs": [{"ip": ADDRESS}]}
    await server.merge(POD.path(namespace, name, "status"), {"status": address})


async def test_a_fetch_removes_no_commit_that_a_new_resource_begins_to_use(
    server: ApiServer, namespace: str, install: Install, tmp_path: Path, node: str
) -> None:
    """The operator confirms the fetch's list. Then resource `late` names a commit, and the fetch asks."""
    await create_claim(server, namespace, "shared")
    release = install()
    asking = Asking(FetchProgress(commit="a" * 40, done_bytes=1, total_bytes=2), 0)
    async with operator(release.kubeconfig, tmp_path / "log", **release.key) as process, telling(asking):
        await process.working()
        await run_fetch(server, namespace, asking)

        async def is_confirmed() -> bool:
            return 0 in asking.confirmed

        await until("the confirmation", is_confirmed, timeout_s=30, details=lambda: process.output)
        asking.question = 1
        model = {"uri": f"pvc://shared/acme--tiny/{COMMIT}"}
        await apply(server, namespace, {**SPEC, "model": model}, "late")

        async def waits() -> bool:
            late = await server.get(HETERO_INFERENCE.path(namespace, "late"))
            conditions = late.get("status", {}).get("conditions", ())
            return any(found["reason"] == "CacheCleaning" for found in conditions)

        await until("the wait of `late`", waits, timeout_s=30, details=lambda: process.output)

        async def inspected() -> bool:
            pods = await stored(server, POD, namespace)
            return any(pod["metadata"]["labels"][names.LABEL_RESOURCE] == "late" for pod in pods)

        await until("the inspect pod of `late`", inspected, timeout_s=90, details=lambda: process.output)
        waited_s = time.monotonic() - asking.confirmed[0]
        assert waited_s > CONFIRMED_S - 1, "the fetch may remove the commit until then"
        assert 1 not in asking.confirmed


async def test_a_silent_watch_confirms_no_removal_of_a_commit_in_use(
    server: ApiServer, namespace: str, install: Install, tmp_path: Path, node: str
) -> None:
    """The watch of resources is silent, so the cache lacks resource `late`, which names a commit."""
    await create_claim(server, namespace, "shared")
    release = install()
    asking = Asking(FetchProgress(commit="a" * 40, done_bytes=1, total_bytes=2))
    async with (
        api_proxy(release.kubeconfig, tmp_path / "through") as proxy,
        operator(tmp_path / "through", tmp_path / "log", **release.key) as process,
        telling(asking),
    ):
        await process.working()
        await run_fetch(server, namespace, asking)
        proxy.inject(rf"/{names.PLURAL}\?.*watch=true", hang=True)
        model = {"uri": f"pvc://shared/acme--tiny/{COMMIT}"}
        await apply(server, namespace, {**SPEC, "model": model}, "late")
        asking.question = 0
        lists = proxy.count(rf"namespaces/{namespace}/{names.PLURAL}\?limit", "GET")

        async def has_listed() -> bool:
            return proxy.count(rf"namespaces/{namespace}/{names.PLURAL}\?limit", "GET") > lists

        await until("a list for the question", has_listed, timeout_s=30, details=lambda: process.output)
        late = HETERO_INFERENCE.path(namespace, "late")

        async def waits() -> bool:
            return bool((await server.get(late)).get("status"))

        await until(
            "the operator sees `late` in the list", waits, timeout_s=30, details=lambda: process.output
        )
        assert asking.confirmed == {}
        await server.delete(late, {})
        proxy.heal()

        async def is_confirmed() -> bool:
            return 0 in asking.confirmed

        await until("the confirmation", is_confirmed, timeout_s=60, details=lambda: process.output)
