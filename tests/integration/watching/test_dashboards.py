"""Tests that every panel shows data of a serving group, and that every rule can be evaluated."""

import re

import pytest
import yaml

from charts.dashboards import BOARDS
from charts.dashboards.board import Board, Query
from heteroinfer_contract import metric_names as contract
from tests.cluster import processes
from tests.integration.watching.stack import CHART, GROUP, NAMESPACE, Stack, metrics_of, watch
from tests.integration.worker.groups import fetch
from tests.watching.watched import Watched

pytestmark = pytest.mark.timeout(600)
WATCHED_S = 45.0
"""Seconds of traffic: enough for rates over the windows of the panels."""


@pytest.fixture(scope="session")
def watched(stack: Stack) -> Watched:
    return watch(stack, WATCHED_S)


def queries() -> list[Query]:
    return [query for board in BOARDS for panel in board.panels for query in panel.queries]


def test_prometheus_scrapes_the_operator_every_rank_and_vllm(stack: Stack) -> None:
    hosts = [address.host for address in stack.group.addresses]
    wanted = {f"http://{host}:9400/metrics" for host in hosts} | {f"http://{hosts[0]}:8000/metrics"}

    def all_up() -> bool:
        targets = stack.prometheus.targets()
        ours = wanted <= set(targets) and len(targets) == len(wanted) + 1  # and the operator
        return ours and set(targets.values()) == {"up"}

    processes.wait_until(f"four targets up, three of them {wanted}", all_up, timeout_s=30)


def test_ranks_and_vllm_have_the_labels_that_panels_join_by(watched: Watched) -> None:
    for metric in (contract.KV_BLOCKS, "vllm:num_requests_running", contract.GROUP_READY):
        found = watched.prometheus.values(metric)
        assert found, metric
        for labels, _ in found:
            assert (labels["namespace"], labels["name"], labels["group"]) == (NAMESPACE, "tiny", GROUP), (
                metric
            )
            assert not {label for label in labels if label.startswith("exported_")}, metric


@pytest.mark.parametrize("board", BOARDS, ids=[board.uid for board in BOARDS])
def test_every_panel_has_data(watched: Watched, board: Board) -> None:
    empty = [
        f"{panel.title}: {query.expr}"
        for panel in board.panels
        for query in panel.queries
        if not query.only_where and not watched.samples(query, panel)
    ]
    assert empty == []


def test_every_metric_in_dashboards_and_rules_is_served(stack: Stack, watched: Watched) -> None:
    served = metrics_of(fetch(f"{stack.group.url}/metrics") or "")
    ours = {value for name, value in vars(contract).items() if name.isupper() and isinstance(value, str)}
    rules = yaml.safe_load((CHART / "rules" / "heteroinfer.yaml").read_text())
    listed = [rule for group in rules["groups"] for rule in group["rules"]]
    recorded = {rule["record"] for rule in listed if "record" in rule}
    exprs = [query.expr for query in queries()] + [rule["expr"] for rule in listed]
    named = {
        name
        for expr in exprs
        for name in re.findall(
            r"\b(?:heteroinfer_|heteroinfer:|vllm:|process_)\w[\w:]*", re.sub(r'"[^"]*"', "", expr)
        )
    }
    assert any(name.startswith("vllm:") for name in named)
    parts = {base + part for base in ours for part in ("", "_sum", "_count", "_bucket")}
    assert named - parts - recorded - served == set()


def test_rules_have_no_errors_and_only_the_expected_alert_fires(stack: Stack, watched: Watched) -> None:
    rules = [rule for group in stack.prometheus.get("rules")["groups"] for rule in group["rules"]]
    file = yaml.safe_load((CHART / "rules" / "heteroinfer.yaml").read_text())
    assert len(rules) == sum(len(group["rules"]) for group in file["groups"])
    assert {rule["health"] for rule in rules} == {"ok"}, rules
    # The first epoch ended by a lost pod, so only this alert may fire.
    assert stack.prometheus.firing() == {"HeteroInferRankHeartbeatLost"}
