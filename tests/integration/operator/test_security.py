"""What the operator and its pods may do, asked of a real API server; and that secrets stay secret."""

import json
from pathlib import Path

from heteroinfer_operator.kube.paths import HETERO_INFERENCE
from heteroinfer_operator.kube.server import ApiServer
from tests.cluster.cluster import Cluster
from tests.integration.operator.conftest import Installation
from tests.integration.operator.life import Install, bring_up, nothing_left
from tests.integration.operator.support import create_resource, operator, until


async def test_namespaced_scope_serves_its_namespaces_with_a_role_only(
    server: ApiServer, namespace: str, install: Install, tmp_path: Path, control_plane: Cluster
) -> None:
    installed = install("scope=Namespaced", f"watchNamespaces={{{namespace}}}")
    elsewhere = installed.release
    await create_resource(server, elsewhere)
    settings = {"watch_namespaces": namespace, "resync_seconds": "1"}
    async with operator(installed.kubeconfig, tmp_path / "log", **settings) as process:
        await process.working()
        pods = await bring_up(server, namespace)
        assert len(pods) == 2
        untouched = await server.get(HETERO_INFERENCE.path(elsewhere, "tiny"))
        assert "finalizers" not in untouched["metadata"]
        await server.delete(HETERO_INFERENCE.path(namespace, "tiny"), {})
        await until("nothing is left", lambda: nothing_left(server, namespace), timeout_s=60)
        assert await process.stop() == 0
        assert " 403 " not in process.said
    for verb, resource in (
        ("list", "pods"),
        ("create", "pods"),
        ("list", "heteroinferences.heteroinfer.dev"),
    ):
        assert not may(control_plane, installed, verb, resource, elsewhere)
    assert not may(control_plane, installed, "list", "nodes", "")


def may(cluster: Cluster, installed: Installation, verb: str, resource: str, namespace: str) -> bool:
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {
            "user": installed.account,
            "resourceAttributes": {
                "verb": verb,
                "namespace": namespace,
                "resource": resource.partition(".")[0].partition("/")[0],
                "subresource": resource.partition("/")[2],
                "group": resource.partition(".")[2],
            },
        },
    }
    answer = cluster.kubectl("create", "-f", "-", "-o", "json", stdin=json.dumps(review))
    return bool(json.loads(answer)["status"]["allowed"])


FORBIDDEN = (
    ("get", "secrets"),
    ("list", "secrets"),
    ("patch", "pods"),
    ("update", "pods"),
    ("create", "pods/exec"),
    ("get", "pods/log"),
    ("deletecollection", "pods"),
    ("create", "heteroinferences.heteroinfer.dev"),
    ("delete", "heteroinferences.heteroinfer.dev"),
    ("patch", "nodes"),
    ("get", "serviceaccounts"),
    ("create", "deployments.apps"),
    ("create", "roles.rbac.authorization.k8s.io"),
    ("get", "leases.coordination.k8s.io"),
)


def test_what_the_operator_does_not_need_is_denied(
    control_plane: Cluster, install: Install, namespace: str
) -> None:
    installed = install()
    assert may(control_plane, installed, "create", "pods", namespace)
    allowed = [f"{v} {r}" for v, r in FORBIDDEN if may(control_plane, installed, v, r, namespace)]
    assert allowed == []
