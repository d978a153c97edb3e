"""Provides control planes with the real kube-scheduler, and nodes without kubelets."""

import itertools
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import pytest_asyncio
import yaml

from heteroinfer_contract import names
from heteroinfer_operator.api.crd import build_crd
from heteroinfer_operator.kube.paths import EVENT, HETERO_INFERENCE, NODE, POD
from heteroinfer_operator.kube.server import ApiServer, load_configuration
from heteroinfer_operator.nodes.node_platform import IMAGE_PLATFORM
from tests.cluster.crds import apply_crds
from tests.cluster.running_cluster import Cluster, start_control_plane_only
from tests.cluster.tools import source_folder
from tests.integration.operator.running_operator import PROFILE, SPEC, end_pod, until

_NUMBERS = itertools.count(1)
FOREIGN_CRDS = {
    "kueue": ("kueue", "config/components/crd/bases/kueue.x-k8s.io_localqueues.yaml"),
    "coscheduling": ("scheduler-plugins", "config/crd/bases/scheduling.x-k8s.io_podgroups.yaml"),
}
"""For each project, the place of its CRD: a module of sigs.k8s.io, which is also a folder of
tests/cluster/modules, and the path in it."""


@pytest.fixture(scope="module")
def plane(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Runs a control plane. Its kube-scheduler has gang scheduling if the test module requests it."""
    gangs = bool(request.module.GANG_SCHEDULING)
    with start_control_plane_only(gang_scheduling=gangs) as cluster:
        apply_crds(cluster, build_crd())
        yield cluster


@pytest_asyncio.fixture
async def server(plane: Cluster) -> AsyncIterator[ApiServer]:
    api_server = ApiServer(await load_configuration(str(plane.kubeconfig)))
    yield api_server
    await api_server.close()


@pytest.fixture
def namespace(plane: Cluster) -> Iterator[str]:
    name = f"scheduling-{next(_NUMBERS)}"
    plane.kubectl("create", "namespace", name)
    plane.kubectl("wait", "-n", name, "--for=create", "serviceaccount/default", "--timeout=20s")
    yield name
    plane.kubectl("delete", "hinf", "--all", "-n", name, "--wait=false")
    plane.kubectl("delete", "namespace", name, "--wait=false")


def install_crd(plane: Cluster, project: str) -> str:
    """Applies another project's CRD from its Go module, and returns its name."""
    module, path = FOREIGN_CRDS[project]
    definition = yaml.safe_load((source_folder(module, f"sigs.k8s.io/{module}") / path).read_text())
    apply_crds(plane, definition)
    return str(definition["metadata"]["name"])


def build_unknown_gang_crd() -> dict[str, Any]:
    """Returns the CRD of a future version of Volcano's API, which the operator does not know."""
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    version = {"name": "v9", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
    group, plural = "scheduling.volcano.sh", "podgroups"
    kinds = {"plural": plural, "singular": "podgroup", "kind": "PodGroup", "listKind": "PodGroupList"}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{group}"},
        "spec": {"group": group, "scope": "Namespaced", "names": kinds, "versions": [version]},
    }


async def add_node(server: ApiServer, name: str, *, gpus: int = 0, **fields: Any) -> None:
    """Adds a ready node whose pods no kubelet runs."""
    taints = fields.pop("taints", [])
    labels = {**IMAGE_PLATFORM, "kubernetes.io/hostname": name, **fields.pop("labels", {})}
    node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}}
    await server.create(NODE.path(), {**node, "spec": {"taints": taints}})
    await set_gpus(server, name, gpus)


async def set_gpus(server: ApiServer, name: str, gpus: int) -> None:
    """Sets the number of a node's GPUs, in place of the kubelet."""
    amounts = {"cpu": "16", "memory": "64Gi", "pods": "110", "nvidia.com/gpu": str(gpus)}
    ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": ""}
    status = {"capacity": amounts, "allocatable": amounts, "conditions": [ready]}
    await server.merge(NODE.path(None, name, "status"), {"status": status})


async def apply(
    server: ApiServer, namespace: str, name: str, *, profile: str = json.dumps(PROFILE), **spec: Any
) -> None:
    """Creates a HeteroInference, and ends its inspect pod with a profile of the model."""
    await create(server, namespace, name, **spec)
    await until("the inspect pod", lambda: inspected(server, namespace, name, profile), timeout_s=30)


async def create(server: ApiServer, namespace: str, name: str, **spec: Any) -> None:
    """Creates a HeteroInference of one CPU and one GPU pod. The given fields replace fields of its spec."""
    roles = [
        {"name": "cpu", "device": "CPU", "resources": {"requests": {"cpu": "2", "memory": "8Gi"}}},
        {"name": "gpu", "device": "GPU", "deviceMemory": "80Gi"},
    ]
    body = {
        "apiVersion": HETERO_INFERENCE.api_version,
        "kind": names.KIND,
        "metadata": {"name": name, "namespace": namespace},
        "spec": {**SPEC, "model": {"uri": "file:///models/tiny"}, "scheduling": {}, "roles": roles, **spec},
    }
    await server.create(HETERO_INFERENCE.path(namespace), body)


async def inspected(server: ApiServer, namespace: str, name: str, profile: str = json.dumps(PROFILE)) -> bool:
    """Ends the inspect pod as soon as it exists, in place of the kubelet."""
    for pod in await pods_of(server, namespace, name, names.COMPONENT_INSPECT):
        await end_pod(server, namespace, pod["metadata"]["name"], exit_code=0, message=profile)
        return True
    return False


async def pods_of(
    server: ApiServer, namespace: str, name: str, component: str = names.COMPONENT_WORKER
) -> list[dict[str, Any]]:
    """Returns the stored pods of a resource."""
    selector = f"{names.LABEL_RESOURCE}={name},{names.LABEL_COMPONENT}={component}"
    listed = await server.get(POD.path(namespace), {"labelSelector": selector})
    return list(listed["items"])


async def delete(server: ApiServer, namespace: str, name: str) -> None:
    """Deletes a resource, and removes its pods in place of the kubelet."""
    # Foreground deletion makes the operator delete the pods. The garbage collector would need time to learn
    # of a new kind.
    await server.delete(HETERO_INFERENCE.path(namespace, name), {"propagationPolicy": "Foreground"})

    async def ended() -> bool:
        pods = await pods_of(server, namespace, name)
        for pod in pods:
            if "deletionTimestamp" in pod["metadata"]:
                await server.delete(POD.path(namespace, pod["metadata"]["name"]), {"gracePeriodSeconds": 0})
        return not pods

    await until(f"the end of {name}'s pods", ended, timeout_s=30)


async def capacity(server: ApiServer, namespace: str, name: str) -> tuple[str, str, str]:
    """Returns status, reason and message of CapacityAvailable, or nothing without this condition."""
    return await condition(server, namespace, name, "CapacityAvailable")


async def condition(server: ApiServer, namespace: str, name: str, kind: str) -> tuple[str, str, str]:
    """Returns status, reason and message of a condition, or nothing without this condition."""
    stored = await server.get(HETERO_INFERENCE.path(namespace, name))
    for condition in stored.get("status", {}).get("conditions", ()):
        if condition["type"] == kind:
            return condition["status"], condition["reason"], condition["message"]
    return "", "", ""


async def events(server: ApiServer, namespace: str, reason: str) -> list[str]:
    """Returns the notes of the events with a reason."""
    listed = await server.get(EVENT.path(namespace))
    return [event["note"] for event in listed["items"] if event["reason"] == reason]
