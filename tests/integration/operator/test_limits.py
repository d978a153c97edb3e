"""Tests limits on a real API server: a full status, a quota, and foreign objects with our labels."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from heteroinfer_contract import metric_names, names
from heteroinfer_operator.cluster import CreateObject, PatchStatus
from heteroinfer_operator.kube.child_errors import refusal_message
from heteroinfer_operator.kube.paths import (
    CLAIM,
    CONFIG_MAP,
    DISRUPTION_BUDGET,
    HETERO_INFERENCE,
    NETWORK_POLICY,
    POD,
    SECRET,
    SERVICE,
    Kind,
)
from heteroinfer_operator.kube.server import NOT_FOUND, ApiError, ApiServer
from heteroinfer_operator.reconcile.status_size import fit_groups, fit_plans
from tests.integration.operator.life import Install, condition, stored
from tests.integration.operator.running_operator import (
    PROFILE,
    SPEC,
    OperatorProcess,
    child,
    create_resource,
    end_pod,
    operator,
    pod,
    until,
    watching,
)
from tests.largest_status import build_largest_status

ETCD_BYTES = 1_572_864
"""Default limit of a request (`etcd --max-request-bytes`)."""
QUOTAS = "/api/v1/namespaces/{}/resourcequotas"
LIMITS = {"cpu": "2", "memory": "4Gi", "ephemeral-storage": "1Gi"}
STRANGERS = 100
STRANGER_BYTES = 900_000
MAX_GROWTH_BYTES = 45e6
"""Stored objects would take 90 MB; a page or event briefly exists as bytes, text and values."""


# aiohttp warns about a body above 1 MiB that is written at once. The test writes such a body on purpose.
@pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")
async def test_the_largest_status_is_stored(server: ApiServer, namespace: str) -> None:
    owner = await create_resource(server, namespace)
    largest = build_largest_status()
    async with watching(server, namespace) as watched:
        observation = await watched.cluster.observe(owner.key)
        assert observation is not None
        version = observation.resource.resource_version
        await watched.cluster.run(observation, [PatchStatus(status=largest.dump(), resource_version=version)])
        observation = await watched.cluster.observe(owner.key)
        assert observation is not None
        (refusal,) = observation.refusals
        assert "too large" in refusal.message, "without our own limit the API server refuses it"
        fitted = largest.model_copy(
            update={"groups": fit_groups(largest.groups), "plans": fit_plans(largest.plans)}
        )
    async with watching(server, namespace) as watched:
        observation = await watched.cluster.observe(owner.key)
        assert observation is not None
        version = observation.resource.resource_version
        await watched.cluster.run(observation, [PatchStatus(status=fitted.dump(), resource_version=version)])
    whole = await server.get(HETERO_INFERENCE.path(namespace, "tiny"))
    assert len(whole["status"]["groups"][-1]["members"]) == 64
    managed = len(json.dumps(whole["metadata"]["managedFields"]))
    size = len(json.dumps(whole, separators=(",", ":")))
    print(f"status of {len(fitted.groups)} groups: {size} bytes, {managed} of them managedFields")
    assert managed < 10_000
    assert size < ETCD_BYTES


async def test_a_pod_refused_by_a_quota_releases_its_groups_other_pods(
    server: ApiServer, namespace: str, install: Install, tmp_path: Path, node: str
) -> None:
    # A quota for one of two workers, and for the inspect pod.
    await allow(server, namespace, "one-pod", {f"limits.{each}": amount for each, amount in LIMITS.items()})
    await create_resource(server, namespace)
    kubeconfig = install().kubeconfig
    async with operator(kubeconfig, tmp_path / "unlimited", resync_seconds="1") as process:

        async def told() -> bool:
            text = json.dumps((await server.get(HETERO_INFERENCE.path(namespace, "tiny"))).get("status", {}))
            return (
                "must specify limits.cpu" in text
                and "Set spec.model.resources, or podResources.inspect" in text
            )

        await until("the message about the inspect pod's quota", told, 60, lambda: process.output)
        assert await process.stop() == 0
    limited = json.dumps({"inspect": {"limits": LIMITS}, "worker": {"limits": LIMITS}})
    async with operator(kubeconfig, tmp_path / "log", resync_seconds="1", pod_resources=limited) as process:
        inspect = await until(
            "the inspect pod", lambda: living(server, namespace), 60, lambda: process.output
        )
        await end_pod(server, namespace, inspect[0], exit_code=0, message=json.dumps(PROFILE))

        async def refused() -> bool:
            text = json.dumps((await server.get(HETERO_INFERENCE.path(namespace, "tiny")))["status"])
            advice = f"Raise the quota one-pod of namespace {namespace}, or lower resources of role"
            return "exceeded quota" in text and advice in text and not await living(server, namespace)

        await until("the refusal is reported, and no pod exists", refused, details=lambda: process.output)
        tried, since = await creates(process), time.monotonic()

        async def tried_twice() -> bool:
            return await creates(process) >= tried + 2

        await until("two more attempts", tried_twice, timeout_s=60, details=lambda: process.output)
        assert time.monotonic() - since > 4, "it backs off: the first wait is 5 s"
        await until("the pod is released again", refused, details=lambda: process.output)
        assert (await condition(server, namespace, "Failed"))[0] == "False"
        await server.delete(f"{QUOTAS.format(namespace)}/one-pod", {})

        async def both() -> bool:
            return len(await living(server, namespace)) == 2

        await until("both pods", both, timeout_s=60, details=lambda: process.output)
        assert await process.stop() == 0


async def test_reports_resources_that_a_limit_range_gave_workers(
    server: ApiServer, namespace: str, install: Install, tmp_path: Path, node: str
) -> None:
    default = {"type": "Container", "default": {"cpu": "500m", "memory": "512Mi"}}
    ranges = {"metadata": {"name": "defaults"}, "spec": {"limits": [default]}}
    body = {"apiVersion": "v1", "kind": "LimitRange", **ranges}
    await server.create(f"/api/v1/namespaces/{namespace}/limitranges", body)
    await create_resource(server, namespace)

    async def has(words: str) -> bool:
        status = (await server.get(HETERO_INFERENCE.path(namespace, "tiny"))).get("status", {})
        return any(words in each.get("message", "") for each in status.get("conditions", ()))

    async with operator(install().kubeconfig, tmp_path / "log", resync_seconds="1") as process:
        inspect = await until(
            "the inspect pod", lambda: living(server, namespace), 60, lambda: process.output
        )
        await end_pod(server, namespace, inspect[0], exit_code=0, message=json.dumps(PROFILE))
        values = "requests cpu=500m, memory=512Mi and limits cpu=500m, memory=512Mi"
        words = f"role back: a LimitRange of the namespace gave its pods {values}"
        await until(
            "the message about the resources",
            lambda: has(words),
            timeout_s=40,
            details=lambda: process.output,
        )
        roles = [{**role, "resources": {"requests": {"memory": "8Gi"}}} for role in SPEC["roles"]]
        await server.merge(HETERO_INFERENCE.path(namespace, "tiny"), {"spec": {"roles": roles}})
        words = (
            "less than or equal to memory limit of 512Mi. Set resources of role front that the namespace's "
            "LimitRange allows"
        )
        await until("the refusal", lambda: has(words), timeout_s=40, details=lambda: process.output)
        assert await process.stop() == 0


NO_OBJECTS = {
    "pods": "0",
    "services": "0",
    "configmaps": "0",
    "secrets": "0",
    "count/networkpolicies.networking.k8s.io": "0",
    "count/poddisruptionbudgets.policy": "0",
}


async def test_refusals_of_a_real_api_server_have_a_fix(server: ApiServer, namespace: str) -> None:
    worker = {names.LABEL_COMPONENT: names.COMPONENT_WORKER, names.LABEL_ROLE: "front"}

    async def refusal_of(kind: Kind, spec: dict[str, Any], **labels: str) -> str:
        metadata = {"name": "tiny", "namespace": namespace, "labels": labels}
        manifest = {"apiVersion": kind.api_version, "kind": kind.name, "metadata": metadata}
        manifest |= {"spec": spec} if spec else {}
        with pytest.raises(ApiError) as refused:
            await server.create(kind.path(namespace), manifest)
        return refusal_message(CreateObject(manifest=manifest), refused.value.answer_message)

    container = {"name": "worker", "image": "example.test/worker:1"}
    pod_spec = {"containers": [container]}
    words = await refusal_of(POD, {**pod_spec, "runtimeClassName": "nope"}, **worker)
    assert "Create RuntimeClass nope, or correct roles[].template.runtimeClassName of role front" in words
    words = await refusal_of(POD, {**pod_spec, "priorityClassName": "nope"}, **worker)
    assert words.endswith("Create PriorityClass nope, or correct spec.scheduling.priorityClassName")

    limit = {"type": CLAIM.name, "max": {"storage": "1Gi"}}
    ranges = {"metadata": {"name": "claims"}, "spec": {"limits": [limit]}}
    await server.create(
        f"/api/v1/namespaces/{namespace}/limitranges", {"apiVersion": "v1", "kind": "LimitRange", **ranges}
    )
    claim = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "5Gi"}}}
    assert "Lower spec.model.cache.size, or raise the limit" in await refusal_of(CLAIM, claim)
    await allow(server, namespace, "none", NO_OBJECTS)
    raised = f"Raise the quota none of namespace {namespace}"
    kinds: list[tuple[Kind, dict[str, Any]]] = [
        (SERVICE, {"ports": [{"port": 80}]}),
        (CONFIG_MAP, {}),
        (SECRET, {}),
        (NETWORK_POLICY, {"podSelector": {}}),
        (DISRUPTION_BUDGET, {"minAvailable": 1, "selector": {}}),
    ]
    for kind, spec in kinds:
        assert (await refusal_of(kind, spec)).endswith(raised)
    words = await refusal_of(POD, pod_spec, **worker)
    assert words.endswith(f"{raised}, or lower pods of the roles or spec.replicas")


async def living(server: ApiServer, namespace: str) -> list[str]:
    """Returns the names of pods that have not ended and are not in deletion."""
    return [
        found["metadata"]["name"]
        for found in await stored(server, POD, namespace)
        if "deletionTimestamp" not in found["metadata"]
        and found["status"].get("phase") not in {"Succeeded", "Failed"}
    ]


async def allow(server: ApiServer, namespace: str, name: str, hard: dict[str, str]) -> None:
    """Creates a quota, and waits until its controller has counted the pods and the quota applies."""
    quota = {"metadata": {"name": name}, "spec": {"hard": hard}}
    await server.create(QUOTAS.format(namespace), {"apiVersion": "v1", "kind": "ResourceQuota", **quota})

    async def holds() -> bool:
        found = await server.get(f"{QUOTAS.format(namespace)}/{name}")
        return bool(found.get("status", {}).get("hard"))

    await until("the quota applies", holds, timeout_s=60)


async def creates(process: OperatorProcess) -> float:
    """Returns the number of created pods."""
    wanted = f'{metric_names.OPERATOR_WRITES_TOTAL}{{kind="pods",verb="create"}}'
    return (await process.writes()).get(wanted, 0)


async def test_foreign_objects_with_our_labels_use_no_memory(
    server: ApiServer, namespace: str, install: Install, tmp_path: Path
) -> None:
    installed = install()
    owner = await create_resource(server, namespace)

    async def make(number: int) -> None:
        # Go writes "<" as six bytes of JSON, so the event of the first object has 5.4 MB.
        text = ("x" if number else "<") * STRANGER_BYTES
        stranger = child(owner, "ConfigMap", f"stranger-{number:03d}", data={"text": text})
        del stranger["metadata"]["ownerReferences"]
        await server.create(CONFIG_MAP.path(namespace), stranger)

    async with operator(installed.kubeconfig, tmp_path / "first") as process:
        await process.working()
        before = max_resident_bytes(process.process.pid)
        for number in range(STRANGERS):
            await make(number)
        # The watch has read these objects, and sees later changes.
        unneeded = child(owner, "ConfigMap", "tiny-plan-0", data={})
        unneeded["metadata"]["labels"][names.LABEL_MANAGED_BY] = names.MANAGER
        await server.create(CONFIG_MAP.path(namespace), unneeded)
        await until(
            "a child after them is seen",
            lambda: has_deleted_config_map(server, namespace),
            details=lambda: process.output,
        )
        watched = max_resident_bytes(process.process.pid) - before
    async with operator(installed.kubeconfig, tmp_path / "second") as process:
        await process.working()
        listed = max_resident_bytes(process.process.pid) - before
    print(f"{STRANGERS} strangers of 0.9 MB: {watched / 1e6:.0f} MB watched, {listed / 1e6:.0f} MB listed")
    assert max(watched, listed) < MAX_GROWTH_BYTES


async def has_deleted_config_map(server: ApiServer, namespace: str) -> bool:
    """Checks whether the operator has deleted an unneeded ConfigMap."""
    try:
        await server.get(CONFIG_MAP.path(namespace, "tiny-plan-0"))
    except ApiError as error:
        return error.status == NOT_FOUND
    return False


def max_resident_bytes(pid: int) -> int:
    """Returns the peak memory of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines())
    return int(fields["VmHWM"].split()[0]) * 1024


async def test_foreign_objects_with_our_labels_reserve_no_capacity(server: ApiServer, namespace: str) -> None:
    owner = await create_resource(server, namespace)
    requests = {"resources": {"requests": {"cpu": "3"}}}
    for name in ("tiny-0-1-0", "tiny-0-1-1", "stranger"):
        manifest = pod(owner, name)
        manifest["spec"]["containers"][0] |= requests
        if name == "tiny-0-1-1":
            del manifest["metadata"]["ownerReferences"]
        await server.create(POD.path(namespace), manifest)
    async with watching(server) as watched:
        reserved = [demand.name for demand in watched.cluster_state.reserved_demands()]
        assert f"{namespace}/tiny-0-1-0" in reserved
        assert f"{namespace}/tiny-0-1-1" not in reserved, "no resource owns it"
        assert f"{namespace}/stranger" not in reserved, "the operator creates no pod of that name"
