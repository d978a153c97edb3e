"""Tests the chart's objects for Prometheus and Grafana with the Prometheus Operator's own CRDs."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from heteroinfer_contract import names
from tests.cluster import processes, tools
from tests.cluster.errors import ClusterError
from tests.cluster.running_cluster import Cluster
from tests.integration.chart.test_chart import CHART, of_kind, render
from tests.watching.monitoring import install_definitions

RULES = CHART / "rules" / "heteroinfer.yaml"
ALL = ("podMonitor.enabled=true", "prometheusRule.enabled=true", "dashboards.enabled=true")
OURS = ("PodMonitor", "PrometheusRule", "ConfigMap")
SERVICE_MONITOR = (
    "serviceMonitor.enabled=true",
    "serviceMonitor.scrapeTimeout=10s",
    "serviceMonitor.labels.team=ml",
    "serviceMonitor.relabelings[0].targetLabel=team",
    "serviceMonitor.relabelings[0].replacement=ml",
    "serviceMonitor.metricRelabelings[0].regex=node",
    "serviceMonitor.metricRelabelings[0].action=labeldrop",
    "podMonitor.relabelings[0].targetLabel=team",
    "podMonitor.relabelings[0].replacement=ml",
)


@pytest.fixture(scope="module")
def plane(control_plane: Cluster) -> Cluster:
    install_definitions(control_plane)
    return control_plane


def rules_of(objects: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns the alerts of the only PrometheusRule by name."""
    (rendered,) = of_kind(objects, "PrometheusRule")
    rules = [rule for group in rendered["spec"]["groups"] for rule in group["rules"]]
    return {rule["alert"]: rule for rule in rules if "alert" in rule}


def test_the_chart_adds_no_monitoring_objects_by_default(plane: Cluster) -> None:
    assert {o["kind"] for o in render(plane)}.isdisjoint(OURS)


def dry_run(plane: Cluster, *objects: dict[str, Any]) -> str:
    """Applies objects as a dry run in which unknown fields are errors; returns the answer."""
    for stored in objects:
        stored["metadata"]["namespace"] = "default"
    return plane.kubectl(
        "apply", "--server-side", "--dry-run=server", "--validate=strict", "-f", "-",
        stdin=yaml.safe_dump_all(objects),
    )  # fmt: skip


def test_the_api_server_accepts_the_objects_by_their_real_definitions(plane: Cluster) -> None:
    objects = [o for o in render(plane, *ALL) if o["kind"] in OURS]
    assert sorted({o["kind"] for o in objects}) == sorted(OURS)
    assert dry_run(plane, *objects).count("serverside-applied (server dry run)") == len(objects)
    monitor = of_kind(objects, "PodMonitor")[0]
    with pytest.raises(ClusterError, match="podMetricsEndpoint"):
        dry_run(plane, {**monitor, "spec": {**monitor["spec"], "podMetricsEndpoint": []}})


def test_the_service_monitor_replaces_the_pod_monitor_of_the_operator(plane: Cluster) -> None:
    """The real definition accepts all fields of the ServiceMonitor, and its Service selects the operator."""
    objects = render(plane, *ALL, *SERVICE_MONITOR)
    (monitor,) = of_kind(objects, "ServiceMonitor")
    (ranks,) = of_kind(objects, "PodMonitor")
    assert ranks["metadata"]["name"].endswith("-ranks")
    assert dry_run(plane, monitor, ranks).count("serverside-applied (server dry run)") == 2
    wanted = monitor["spec"]["selector"]["matchLabels"].items()
    (service,) = (o for o in of_kind(objects, "Service") if wanted <= o["metadata"]["labels"].items())
    (deployment,) = of_kind(objects, "Deployment")
    template = deployment["spec"]["template"]
    assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    (endpoint,) = monitor["spec"]["endpoints"]
    assert [port["name"] for port in service["spec"]["ports"]] == [endpoint["port"]]
    assert (endpoint["honorLabels"], monitor["metadata"]["labels"]["team"]) == (True, "ml")
    broken = {**monitor["spec"], "endpoints": [{**endpoint, "relabeling": []}]}
    with pytest.raises(ClusterError, match="relabeling"):
        dry_run(plane, {**monitor, "spec": broken})


def test_pod_monitors_scrape_the_operator_every_rank_and_vllm(plane: Cluster) -> None:
    objects = render(plane, *ALL, "podMonitor.ranksPerPod=2", "podMonitor.labels.team=ml")
    operator, ranks = of_kind(objects, "PodMonitor")
    (deployment,) = of_kind(objects, "Deployment")
    labels = deployment["spec"]["template"]["metadata"]["labels"].items()
    assert operator["spec"]["selector"]["matchLabels"].items() <= labels
    assert [(e["port"], e["honorLabels"]) for e in operator["spec"]["podMetricsEndpoints"]] == [
        ("http", True)
    ]
    assert ranks["spec"]["selector"]["matchLabels"] == {names.LABEL_COMPONENT: names.COMPONENT_WORKER}
    ports = [e["port"] for e in ranks["spec"]["podMetricsEndpoints"]]
    assert ports == [f"{names.PORT_METRICS}-0", f"{names.PORT_METRICS}-1", names.PORT_API]
    assert operator["metadata"]["labels"]["team"] == "ml"


def test_the_rules_equal_the_file_with_the_url_of_the_runbooks(plane: Cluster) -> None:
    alerts = rules_of(render(plane, *ALL, "prometheusRule.runbooks=https://wiki.example/runbooks"))
    file = yaml.safe_load(RULES.read_text())
    wanted = {rule["alert"]: rule for group in file["groups"] for rule in group["rules"] if "alert" in rule}
    assert set(alerts) == set(wanted)
    for name, rule in wanted.items():
        rule["annotations"]["runbook_url"] = f"https://wiki.example/runbooks#{name.lower()}"
        assert alerts[name] == rule


def test_an_alert_can_be_removed_delayed_and_labelled(plane: Cluster) -> None:
    changes = (
        "prometheusRule.alerts.HeteroInferGroupFailed.enabled=false",
        "prometheusRule.alerts.HeteroInferGroupNotReady.for=40m",
        "prometheusRule.alerts.HeteroInferGroupNotReady.labels.severity=info",
        "prometheusRule.alerts.HeteroInferOperatorStale.labels.team=ml",
    )
    before, after = rules_of(render(plane, *ALL)), rules_of(render(plane, *ALL, *changes))
    assert set(before) - set(after) == {"HeteroInferGroupFailed"}
    changed = after["HeteroInferGroupNotReady"]
    assert (changed["for"], changed["labels"]) == ("40m", {"severity": "info"})
    assert after["HeteroInferOperatorStale"]["labels"] == {"severity": "critical", "team": "ml"}


def test_the_schema_knows_every_alert() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    known = schema["properties"]["prometheusRule"]["properties"]["alerts"]["properties"]
    file = yaml.safe_load(RULES.read_text())
    assert set(known) == {
        rule["alert"] for group in file["groups"] for rule in group["rules"] if "alert" in rule
    }


def test_dashboards_are_config_maps_that_grafanas_sidecar_finds(plane: Cluster) -> None:
    objects = of_kind(render(plane, *ALL, "dashboards.namespace=grafana"), "ConfigMap")
    files = {path.name: path.read_text() for path in (CHART / "dashboards").glob("*.json")}
    assert len(objects) == len(files) == 3
    for stored in objects:
        assert stored["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert stored["metadata"]["annotations"] == {"grafana_folder": "HeteroInfer"}
        assert stored["metadata"]["namespace"] == "grafana"
        ((name, text),) = stored["data"].items()
        assert json.loads(text) == json.loads(files.pop(name))


def test_promtool_accepts_the_rules_and_each_alert_fires_as_expected(tmp_path: Path) -> None:
    promtool = str(tools.program(tools.PROMETHEUS, "promtool"))
    assert "SUCCESS" in processes.run([promtool, "check", "rules", str(RULES)])
    shutil.copy(RULES, tmp_path)
    cases = Path(__file__).parents[2] / "watching" / "rules_test.yaml"
    shutil.copy(cases, tmp_path)
    output = processes.run([promtool, "test", "rules", cases.name], cwd=tmp_path)
    assert "SUCCESS" in output
    alerts = {
        rule["alert"]
        for g in yaml.safe_load(RULES.read_text())["groups"]
        for rule in g["rules"]
        if "alert" in rule
    }
    asked = [case for test in yaml.safe_load(cases.read_text())["tests"] for case in test["alert_rule_test"]]
    assert {case["alertname"] for case in asked if case.get("exp_alerts")} == alerts, (
        "each alert fires in a test"
    )
    assert {case["alertname"] for case in asked if not case.get("exp_alerts")} == alerts, (
        "each alert is silent in a test"
    )
