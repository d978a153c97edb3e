"""Tests that the CRDs of other projects accept our examples, and that the examples name our objects."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml

from heteroinfer_operator.api import parse_resource
from heteroinfer_operator.cluster import ResourceKey
from heteroinfer_operator.manifests.identity import Owner, leader_labels
from heteroinfer_operator.manifests.service import build_client_service
from tests.cluster import tools
from tests.cluster.crds import wait_established
from tests.cluster.errors import ClusterError
from tests.cluster.folders import REPOSITORY
from tests.cluster.running_cluster import Cluster

EXAMPLES = REPOSITORY / "examples"
NAMESPACE = "examples-of-others"
CRDS = (
    ("gateway-api", "sigs.k8s.io/gateway-api", "config/crd/standard/gateway.networking.k8s.io_gateways.yaml"),
    (
        "gateway-api",
        "sigs.k8s.io/gateway-api",
        "config/crd/standard/gateway.networking.k8s.io_httproutes.yaml",
    ),
    (
        "endpoint-picker",
        "sigs.k8s.io/gateway-api-inference-extension",
        "config/crd/bases/inference.networking.k8s.io_inferencepools.yaml",
    ),
    (
        "http-add-on",
        "github.com/kedacore/http-add-on",
        "config/crd/bases/http.keda.sh_httpscaledobjects.yaml",
    ),
)
"""For each folder of tests/cluster/modules: the module that it pins, and the file with the CRD."""


def documents(*files: str) -> list[dict[str, Any]]:
    return [item for file in files for item in yaml.safe_load_all((EXAMPLES / file).read_text())]


ROUTES = sorted(str(file.relative_to(EXAMPLES)) for file in (EXAMPLES / "routes").iterdir())
SCALED = sorted(str(file.relative_to(EXAMPLES)) for file in (EXAMPLES / "scale-to-zero").iterdir())


@pytest.fixture(scope="module")
def with_crds(cluster: Cluster) -> Cluster:
    """Yields the API server with the CRDs of other projects."""
    for folder, module, file in CRDS:
        path = tools.source_folder(folder, module) / file
        cluster.kubectl("apply", "--server-side", "-f", str(path))
        wait_established(cluster, yaml.safe_load(Path(path).read_text())["metadata"]["name"])
    cluster.kubectl("create", "namespace", NAMESPACE)
    return cluster


def apply(cluster: Cluster, items: Iterable[dict[str, Any]]) -> None:
    cluster.kubectl(
        "apply", "-n", NAMESPACE, "--server-side", "--dry-run=server", "--validate=strict", "-f", "-",
        stdin=yaml.safe_dump_all(list(items)),
    )  # fmt: skip


@pytest.mark.parametrize("file", [*ROUTES, *SCALED])
def test_the_crds_of_other_projects_accept_the_examples(with_crds: Cluster, file: str) -> None:
    found = documents(file)
    apply(with_crds, found)
    with pytest.raises(ClusterError, match="not declared in schema"):
        apply(with_crds, [{**found[0], "spec": {**found[0]["spec"], "noSuchField": 1}}])


def test_routes_in_examples_name_the_service_and_the_leaders() -> None:
    resource = parse_resource(yaml.safe_load((EXAMPLES / "cpu-pair.yaml").read_text()))
    name = resource.metadata.name
    owner = Owner(key=ResourceKey(namespace=NAMESPACE, name=name), uid="uid")
    service = build_client_service(owner, (resource.spec.engine.port,))
    (port,) = service["spec"]["ports"]
    found = {item["kind"]: item for item in documents(*ROUTES, *SCALED)}
    (rule,) = found["Ingress"]["spec"]["rules"]
    (path,) = rule["http"]["paths"]
    assert path["backend"]["service"] == {"name": name, "port": {"name": port["name"]}}
    (route,) = found["HTTPRoute"]["spec"]["rules"]
    assert route["backendRefs"] == [{"name": name, "port": port["port"]}]
    pool = found["InferencePool"]["spec"]
    assert pool["selector"]["matchLabels"] == leader_labels(owner)
    assert pool["targetPorts"] == [{"number": resource.spec.engine.port}]
    target = found["HTTPScaledObject"]["spec"]["scaleTargetRef"]
    assert (target["service"], target["port"], target["name"]) == (name, port["port"], name)
    assert pool["endpointPickerRef"]["name"] == found["Service"]["metadata"]["name"]
