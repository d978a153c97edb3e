"""The operator's metrics through the chart's Service and ServiceMonitor, scraped by a real Prometheus."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.cluster import processes, tools
from tests.cluster.folders import LEAST_VALUES
from tests.cluster.running_cluster import Cluster, ensure_tools, start_control_plane_only
from tests.integration.operator.running_operator import OperatorProcess
from tests.integration.operator.test_user_commands import own_address
from tests.integration.watching.stack import (
    CHART,
    NAME,
    NAMESPACE,
    NODE,
    SYSTEM,
    build_resource,
    show_operator,
)
from tests.ports import free_port
from tests.watching.monitoring import Prometheus, install_definitions, start_prometheus

pytestmark = pytest.mark.timeout(300)
VALUES = (
    "replicas=0",  # the operator runs as a process
    "prometheusRule.enabled=true",
    "serviceMonitor.enabled=true",
    "serviceMonitor.interval=1s",
    "serviceMonitor.relabelings[0].targetLabel=team",
    "serviceMonitor.relabelings[0].replacement=ml",
    "serviceMonitor.metricRelabelings[0].sourceLabels={__name__}",
    "serviceMonitor.metricRelabelings[0].regex=heteroinfer_operator_queue_length",
    "serviceMonitor.metricRelabelings[0].action=drop",
)


@pytest.fixture(scope="module")
def plane() -> Iterator[Cluster]:
    ensure_tools(tools.SETS["all"])
    with start_control_plane_only() as cluster:
        install_definitions(cluster)
        sets = ["-f", str(LEAST_VALUES), *(option for value in VALUES for option in ("--set", value))]
        cluster.helm("install", "heteroinfer", str(CHART), "-n", SYSTEM, "--create-namespace", *sets)
        cluster.kubectl("create", "namespace", NAMESPACE)
        for namespace in (SYSTEM, NAMESPACE):
            cluster.kubectl(
                "wait", "-n", namespace, "--for=create", "serviceaccount/default", "--timeout=20s"
            )
        yield cluster


@pytest.fixture(scope="module")
def prometheus(plane: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Watches an operator with one resource, by the ServiceMonitor alone."""
    log: Path = tmp_path_factory.mktemp("watching") / "operator.log"
    port = free_port()
    operator = OperatorProcess(plane.kubeconfig, log, http_port=str(port), resync_seconds="2")
    try:
        plane.kubectl("create", "-f", "-", stdin=yaml.safe_dump(NODE))
        show_operator(plane, port, address=own_address(), node=NODE["metadata"]["name"])
        plane.kubectl("apply", "-n", NAMESPACE, "-f", "-", stdin=yaml.safe_dump(build_resource()))
        yield start_prometheus(plane, {f"serviceMonitor/{SYSTEM}/heteroinfer"})
    finally:
        operator.kill()


def test_prometheus_scrapes_the_operator_by_the_service(prometheus: Prometheus) -> None:
    """The labels of resources stay, and both kinds of relabelings apply."""

    def is_seen() -> bool:
        found = prometheus.values("heteroinfer_resource_condition")
        return any((each.get("namespace"), each.get("name")) == (NAMESPACE, NAME) for each, _ in found)

    processes.wait_until("metrics of the resource", is_seen, timeout_s=60)
    targets = prometheus.targets()
    assert list(targets.values()) == ["up"]
    for labels, _ in prometheus.values("heteroinfer_resource_condition"):
        assert (labels["team"], labels["service"]) == ("ml", "heteroinfer-metrics")
        assert not {label for label in labels if label.startswith("exported_")}
    assert prometheus.values("heteroinfer_operator_writes_total")
    assert prometheus.values("heteroinfer_operator_queue_length") == [], "dropped by metricRelabelings"
