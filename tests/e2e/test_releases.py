"""Tests several releases on a real node: two releases side by side, and deleted namespaces and CRDs."""

import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from heteroinfer_contract import names
from tests.cluster import processes
from tests.cluster.folders import REPOSITORY
from tests.cluster.node import NodeCluster
from tests.cluster.volumes import volume_manifests
from tests.e2e.serving import OPERATOR_LABELS, VALUES, Resource

CRD = f"{names.PLURAL}.{names.API_GROUP}"
NAMESPACE = "served-by-two"
GONE_S = 120.0
"""For a namespace: pods have their grace period, and the garbage collector learns of a new kind within 50
s."""

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def cluster(node_cluster: NodeCluster) -> Iterator[NodeCluster]:
    yield node_cluster
    node_cluster.kubectl("delete", "crd", CRD, "--timeout=30s", "--ignore-not-found")


def install(cluster: NodeCluster, release: str, *values: str) -> None:
    """Installs a release in a namespace of its own name. The first release installs the CRD."""
    crds = CRD in cluster.kubectl("get", "crd", "-o", "name")
    sets = (*values, *(["crds.install=false"] if crds else []))
    cluster.helm(
        "install", release, str(REPOSITORY / "charts/heteroinfer"), "--namespace", release,
        "--create-namespace", "--values", str(VALUES), *(word for each in sets for word in ("--set", each)),
        "--wait", "--timeout", "120s",
    )  # fmt: skip


def apply(cluster: NodeCluster, namespace: str, name: str, **spec: Any) -> Resource:
    document = yaml.safe_load((REPOSITORY / "examples/cpu-pair.yaml").read_text())
    document["metadata"]["name"] = name
    document["spec"] |= spec
    cluster.kubectl("apply", "-n", namespace, "-f", "-", stdin=yaml.safe_dump(document))
    return Resource(cluster=cluster, namespace=namespace, name=name)


def namespaces(cluster: NodeCluster) -> dict[str, Any]:
    items = json.loads(cluster.kubectl("get", "namespaces", "-o", "json"))["items"]
    return {item["metadata"]["name"]: item for item in items}


def is_gone(cluster: NodeCluster, namespace: str) -> Callable[[], bool]:
    return lambda: namespace not in namespaces(cluster)


@pytest.mark.parametrize("operator_ends", ["at the same time", "before"])
def test_a_namespace_with_an_operator_and_a_resource_can_be_deleted(
    cluster: NodeCluster, model: tuple[Path, dict[str, Any]], operator_ends: str
) -> None:
    namespace = "all-in-one"
    install(cluster, namespace, "scope=Namespaced")
    cluster.kubectl("apply", "-f", "-", stdin=volume_manifests(namespace, model[0]))
    pair = apply(cluster, namespace, "cpu-pair")
    processes.wait_until("pods of the group", lambda: len(pair.pods()) == 2, timeout_s=120)
    if operator_ends == "before":
        cluster.helm("uninstall", namespace, "--namespace", namespace, "--wait", "--timeout", "60s")
    cluster.kubectl("delete", "namespace", namespace, "--wait=false")
    if operator_ends == "at the same time":
        ends = ("--grace-period=0", "--force", "--ignore-not-found")
        cluster.kubectl("delete", "pods", "-n", namespace, "-l", OPERATOR_LABELS, *ends)
    processes.wait_until(
        f"the end of namespace {namespace}: {json.dumps(namespaces(cluster).get(namespace))}",
        is_gone(cluster, namespace),
        timeout_s=GONE_S,
    )
    cluster.kubectl("delete", "pv", f"models-{namespace}", "--timeout=30s")


SEEN_S = 30.0


def seen(resource: Resource) -> bool:
    stored = resource.get(names.SINGULAR, resource.name)
    return bool(stored.get("status", {}).get("observedGeneration") == stored["metadata"]["generation"])


def children(resource: Resource) -> list[str]:
    """Returns the objects that the operator created for a resource."""
    kinds = "pods,services,configmaps,secrets,networkpolicies,poddisruptionbudgets"
    selector = f"{names.LABEL_RESOURCE}={resource.name}"
    return resource.cluster.kubectl(
        "get", "-n", resource.namespace, kinds, "-l", selector, "-o", "name"
    ).split()


def uids(resource: Resource) -> list[str]:
    """Returns the UIDs of the worker pods."""
    return [pod["metadata"]["uid"] for pod in resource.pods()]


def scale(resource: Resource, replicas: int) -> None:
    resource.cluster.kubectl(
        "scale", "-n", resource.namespace, f"hinf/{resource.name}", f"--replicas={replicas}"
    )


@pytest.mark.parametrize("first_to_go", ["default", "beta"])
def test_two_releases_can_be_uninstalled_in_either_order(
    cluster: NodeCluster, model: tuple[Path, dict[str, Any]], first_to_go: str
) -> None:
    """The default release serves all namespaces, and the other release (with a class) only this one.

    After a release is uninstalled, the pods of its group stay until their resource is deleted.
    """
    releases = {"default": "release-default", "beta": "release-beta"}
    cluster.kubectl("create", "namespace", NAMESPACE)
    cluster.kubectl("apply", "-f", "-", stdin=volume_manifests(NAMESPACE, model[0]))
    install(cluster, releases["default"])
    install(
        cluster,
        releases["beta"],
        "operatorClass=beta",
        "scope=Namespaced",
        f"watchNamespaces={{{NAMESPACE}}}",
    )
    resources = {
        "default": apply(cluster, NAMESPACE, "plain", replicas=0),
        "beta": apply(cluster, NAMESPACE, "classed", replicas=0, operatorClass="beta"),
    }
    for resource in resources.values():
        processes.wait_until(
            f"{resource.name} is served", functools.partial(seen, resource), timeout_s=SEEN_S
        )
    for name, release in releases.items():
        log = cluster.kubectl("logs", "-n", release, "-l", OPERATOR_LABELS, "--tail=-1")
        assert not [line for line in log.splitlines() if "Traceback" in line or " 403 " in line]
        for other, resource in resources.items():
            assert other == name or f"{NAMESPACE}/{resource.name}" not in log
    (stays,) = releases.keys() - {first_to_go}
    left_behind = resources[first_to_go]
    scale(left_behind, 1)
    processes.wait_until("pods of the group", lambda: len(left_behind.pods()) == 2, timeout_s=120)
    before = uids(left_behind)
    cluster.helm("uninstall", releases[first_to_go], "--namespace", releases[first_to_go], "--wait")
    for resource in resources.values():
        scale(resource, 1)
        scale(resource, 0)
    processes.wait_until("the other release still works", lambda: seen(resources[stays]), timeout_s=SEEN_S)
    assert not seen(left_behind), "its release is gone, but its group serves"
    assert uids(left_behind) == before
    # Both resources are deleted: the one without an operator, and the one whose operator still runs.
    for resource in resources.values():
        cluster.kubectl("delete", "hinf", "-n", NAMESPACE, resource.name, "--timeout=20s")
    kept = functools.partial(children, left_behind)
    processes.wait_until("the end of the group without an operator", lambda: not kept(), timeout_s=GONE_S)
    cluster.helm("uninstall", releases[stays], "--namespace", releases[stays], "--wait")
    for namespace in (NAMESPACE, *releases.values()):
        cluster.kubectl("delete", "namespace", namespace, "--wait=false")
    for namespace in (NAMESPACE, *releases.values()):
        processes.wait_until(f"the end of {namespace}", is_gone(cluster, namespace), timeout_s=GONE_S)
    cluster.kubectl("delete", "pv", f"models-{NAMESPACE}", "--timeout=30s")
    left = cluster.kubectl("get", "clusterroles,clusterrolebindings", "-o", "name")
    assert not [name for name in left.split() if any(release in name for release in releases.values())]


def test_deleting_the_crd_deletes_all_resources_and_pods_without_an_operator(
    cluster: NodeCluster, model: tuple[Path, dict[str, Any]]
) -> None:
    """This is the last test.

    No operator runs any more, so neither the resource nor its pods may wait for it.
    """
    namespace = "without-crd"
    install(cluster, namespace)
    cluster.kubectl("apply", "-f", "-", stdin=volume_manifests(namespace, model[0]))
    pair = apply(cluster, namespace, "cpu-pair")
    processes.wait_until("pods of the group", lambda: len(pair.pods()) == 2, timeout_s=120)
    cluster.kubectl("delete", "pods", "-n", namespace, "-l", OPERATOR_LABELS, "--grace-period=0", "--force")
    cluster.kubectl("delete", "crd", CRD, "--timeout=60s", timeout_s=70)
    processes.wait_until("the end of all children", lambda: not children(pair), timeout_s=GONE_S)
    cluster.helm("uninstall", namespace, "--namespace", namespace, "--wait", "--timeout", "60s")
    cluster.kubectl("delete", "namespace", namespace, "--timeout=60s", timeout_s=70)
    cluster.kubectl("delete", "pv", f"models-{namespace}", "--timeout=30s")
