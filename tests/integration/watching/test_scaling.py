"""Tests the autoscaling examples by waiting requests, with the real Prometheus adapter and the HPA."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.cluster import processes, tools
from tests.cluster.control_plane import reserved_ports
from tests.cluster.crds import wait_established
from tests.cluster.errors import ClusterError
from tests.cluster.folders import REPOSITORY
from tests.cluster.running_cluster import Cluster
from tests.integration.watching.stack import MAX_SEQS, NAME, NAMESPACE, Stack, get

EXAMPLES = REPOSITORY / "examples" / "autoscaling"
METRIC = "heteroinfer_requests_waiting"
API = "custom.metrics.k8s.io"
PATH = f"/apis/{API}/v1beta1/namespaces/{NAMESPACE}/heteroinferences.heteroinfer.dev/{NAME}/{METRIC}"
WAITING = 20

pytestmark = pytest.mark.timeout(600)


def example(name: str) -> dict[str, Any]:
    """Returns an example, adapted to the resource of these tests."""
    text = (
        (EXAMPLES / name)
        .read_text()
        .replace("cpu-pair", NAME)
        .replace('namespace="default"', f'namespace="{NAMESPACE}"')
    )
    return dict(yaml.safe_load(text))


@pytest.fixture(scope="module")
def adapter(stack: Stack) -> Iterator[Cluster]:
    """Runs the Prometheus adapter with the example's rules, as the API server's custom metrics."""
    plane = stack.plane
    rules = plane.state.folder / "adapter-rules.yaml"
    rules.write_text(yaml.safe_dump({"rules": example("prometheus-adapter.yaml")["rules"]["custom"]}))
    with reserved_ports(1) as (port,):
        pass
    access = [
        f"--{name}-kubeconfig={plane.kubeconfig}" for name in ("lister", "authentication", "authorization")
    ]
    processes.spawn(
        [
            str(tools.program(tools.PROMETHEUS_ADAPTER, "adapter")),
            *access,
            f"--config={rules}",
            f"--prometheus-url={stack.prometheus.url}",
            "--metrics-relist-interval=5s",
            "--bind-address=127.0.0.1",
            f"--secure-port={port}",
            f"--cert-dir={plane.state.folder / 'adapter-certificates'}",
        ],
        mark=plane.state.folder,
        log=plane.state.log("prometheus-adapter"),
    )
    plane.kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all(api_service(port)))
    yield plane
    plane.kubectl("delete", "apiservice", f"v1beta1.{API}")


def api_service(port: int) -> list[dict[str, Any]]:
    """Returns the Service and APIService by which the API server queries 127.0.0.1.

    They use a host name, because the API server refuses this address as an endpoint.
    """
    service = {"name": "prometheus-adapter", "namespace": "monitoring"}
    return [
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": service,
            "spec": {"type": "ExternalName", "externalName": "localhost", "ports": [{"port": port}]},
        },
        {
            "apiVersion": "apiregistration.k8s.io/v1",
            "kind": "APIService",
            "metadata": {"name": f"v1beta1.{API}"},
            "spec": {
                "group": API,
                "version": "v1beta1",
                "service": {**service, "port": port},
                "insecureSkipTLSVerify": True,
                "groupPriorityMinimum": 100,
                "versionPriority": 100,
            },
        },
    ]


def waiting_requests(plane: Cluster) -> float:
    """Returns the value of the custom metric, or -1 without a value."""
    try:
        (item,) = json.loads(plane.kubectl("get", "--raw", PATH))["items"]
    except ClusterError as error:
        # The metric is unknown, has no series yet, or the API server has not noticed yet that the adapter
        # answers.
        if not any(word in str(error) for word in ("(NotFound)", "(ServiceUnavailable)")):
            raise
        return -1.0
    assert (item["describedObject"]["kind"], item["describedObject"]["name"]) == ("HeteroInference", NAME)
    value = str(item["value"])
    return float(value[:-1]) / 1000 if value.endswith("m") else float(value)


def test_the_hpa_adds_a_group_while_requests_wait(stack: Stack, adapter: Cluster) -> None:
    hpa = example("hpa.yaml")
    # shorter than the minute of the example
    hpa["spec"]["behavior"]["scaleUp"]["stabilizationWindowSeconds"] = 0
    assert stack.resource["spec"]["replicas"] == 1
    with stack.busy(MAX_SEQS + WAITING):
        log = adapter.state.log("prometheus-adapter")
        processes.wait_until(
            "more than 8 waiting requests in the custom metrics API",
            lambda: waiting_requests(adapter) > 8,
            timeout_s=90,
            log=log,
        )
        adapter.kubectl("apply", "-n", NAMESPACE, "-f", "-", stdin=yaml.safe_dump(hpa))
        processes.wait_until(
            "a second group", lambda: stack.resource["spec"]["replicas"] == 2, timeout_s=90, log=log
        )
    stored = get(adapter, f"hpa/{NAME}")
    conditions = {c["type"]: c["status"] for c in stored["status"]["conditions"]}
    assert (conditions["AbleToScale"], conditions["ScalingActive"]) == ("True", "True"), stored["status"]
    (seen,) = stored["status"]["currentMetrics"]
    assert seen["object"]["metric"]["name"] == METRIC
    # The operator creates the second group. The node holds its pods, but no kubelet runs them.
    processes.wait_until(
        "the status of two groups", lambda: len(stack.resource["status"]["groups"]) == 2, timeout_s=30
    )
    adapter.kubectl("delete", "-n", NAMESPACE, "hpa", NAME)


def test_keda_accepts_the_scaled_object(stack: Stack) -> None:
    folder = tools.source_folder("keda", "github.com/kedacore/keda/v2") / "config" / "crd" / "bases"
    stack.plane.kubectl("apply", "--server-side", "-f", str(folder / "keda.sh_scaledobjects.yaml"))
    wait_established(stack.plane, "scaledobjects.keda.sh")

    def apply(document: dict[str, Any]) -> None:
        stack.plane.kubectl(
            "apply", "-n", NAMESPACE, "--server-side", "--dry-run=server", "--validate=strict", "-f", "-",
            stdin=yaml.safe_dump(document),
        )  # fmt: skip

    scaled = example("keda.yaml")
    apply(scaled)
    with pytest.raises(ClusterError, match="maxReplicas"):
        apply({**scaled, "spec": {**scaled["spec"], "maxReplicas": 3}})
    (trigger,) = scaled["spec"]["triggers"]
    assert stack.prometheus.values(trigger["metadata"]["query"]), "Prometheus answers the trigger's query"
