"""The dashboards, the alerts and what the documents say of them belong together."""

import json
import re
from typing import Any

import pytest
import yaml

from charts.dashboards import BOARDS
from charts.dashboards.__main__ import FOLDER
from charts.dashboards.board import GRID, Board, Kind, render
from heteroinfer_contract import metric_names
from heteroinfer_contract.failure import FailureReason
from heteroinfer_operator.api import GroupPhase
from tests.cluster.folders import REPOSITORY

RULES = yaml.safe_load((REPOSITORY / "charts/heteroinfer/rules/heteroinfer.yaml").read_text())
ALERTS = {rule["alert"]: rule for group in RULES["groups"] for rule in group["rules"] if "alert" in rule}
of_each_board = pytest.mark.parametrize("board", BOARDS, ids=[board.uid for board in BOARDS])


def test_the_chart_has_the_dashboards_as_they_are_defined() -> None:
    files = {path.name: path.read_text() for path in FOLDER.glob("*.json")}
    assert files == {f"{board.uid}.json": render(board) for board in BOARDS}, (
        "run: python -m charts.dashboards"
    )


@of_each_board
def test_panels_fill_the_grid_without_overlap(board: Board) -> None:
    taken: set[tuple[int, int]] = set()
    for _, position in board.positions():
        cells = {
            (x, y)
            for x in range(position.x, position.x + position.width)
            for y in range(position.y, position.y + position.height)
        }
        assert position.x + position.width <= GRID
        assert not cells & taken
        taken |= cells


@of_each_board
def test_every_panel_of_the_json_is_whole(board: Board) -> None:
    panels: list[dict[str, Any]] = json.loads(render(board))["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    shown = [panel for panel in panels if panel["type"] != "row"]
    assert len(shown) == len(board.panels)
    for panel in shown:
        assert panel["targets"], panel["title"]
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
        assert all(target["range"] == (panel["type"] == Kind.TIME) for target in panel["targets"])
        assert panel["title"]


def test_only_variables_that_a_dashboard_has_are_used() -> None:
    for board in BOARDS:
        known = {variable.name for variable in board.variables} | {"__rate_interval"}
        used = {
            name
            for panel in board.panels
            for query in panel.queries
            for name in re.findall(r"\$(\w+)", query.expr)
        }
        assert used <= known, board.uid
        assert known <= used, board.uid


def test_every_alert_has_instructions_and_a_runbook() -> None:
    text = (REPOSITORY / "docs/user/runbooks.md").read_text()
    sections = dict(zip(*[iter(re.split(r"^## (\w+)\n", text, flags=re.MULTILINE)[1:])] * 2, strict=True))
    assert set(sections) == set(ALERTS)
    monitor = (REPOSITORY / "docs/user/monitor.md").read_text()
    for name, rule in ALERTS.items():
        assert rule["annotations"]["runbook_url"] == f"#{name.lower()}"
        assert {"summary", "description"} <= set(rule["annotations"])
        assert rule["labels"]["severity"] in {"warning", "critical"}
        assert "**Means**" in sections[name]
        assert "**Do**" in sections[name]
        assert f"[{name}](runbooks.md#{name.lower()})" in monitor


def test_every_metric_is_explained() -> None:
    reported = set(re.findall(r"`([a-z_]+)[`{]", (REPOSITORY / "docs/user/reference/metrics.md").read_text()))
    names = {v for k, v in vars(metric_names).items() if k.isupper() and isinstance(v, str) and "_" in v}
    assert names - reported == set()


def test_reasons_and_phases_that_rules_name_exist() -> None:
    words = {
        label: {
            word
            for rule in ALERTS.values()
            for found in re.findall(rf'{label}=~?"([^"]*)"', rule["expr"])
            for word in found.split("|")
        }
        for label in ("reason", "phase")
    }
    of_kubernetes = {"NodeLost"}
    of_conditions = {"Suspended", "ScaledToZero"}
    assert words["reason"] <= {reason.value for reason in FailureReason} | of_kubernetes | of_conditions
    assert words["phase"] <= {phase.value for phase in GroupPhase}
