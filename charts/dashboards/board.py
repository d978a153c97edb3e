"""Dashboards as values, and the JSON that Grafana reads.

Each panel defines its content and its width. Positions are computed from the widths, row by row.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

GRID: Final = 24
"""Columns of Grafana's grid."""
SCHEMA_VERSION: Final = 39
"""Schema of Grafana 10.4; later versions read it, too."""
_DATASOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}


class Kind(StrEnum):
    """How a panel shows its data."""

    STAT = "stat"
    TIME = "timeseries"
    BARS = "bargauge"
    TABLE = "table"
    STACK = "barchart"
    """A bar for each value of the first column, its parts named by the queries' legends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """One query of a panel.

    Attributes:
        expr: PromQL; `$namespace`, `$group`, `$rank` and `$__rate_interval` are Grafana's.
        legend: name of each series; `{{label}}` stands for the value of a label.
        only_where: what a group needs to have data for this query, in words; "" if all groups have data.
    """

    expr: str
    legend: str = ""
    only_where: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One panel.

    Attributes:
        unit: Grafana's name of the values' unit.
        text: explanation in the panel's tooltip.
        width: columns of GRID.
        height: Grafana's rows of 30 pixels.
        stacked: whether the sum of the series has a meaning.
        most: end of the axis, if the values have a natural maximum.
        thresholds: values at which the colour turns orange and red.
        columns: labels that a table shows, in order; for a stack, the label whose values are the bars.
        link: whether a click opens the group's dashboard.
    """

    title: str
    queries: tuple[Query, ...]
    kind: Kind = Kind.TIME
    unit: str = "short"
    text: str = ""
    width: int = 8
    height: int = 8
    stacked: bool = False
    most: float | None = None
    thresholds: tuple[float, ...] = ()
    columns: tuple[str, ...] = ()
    link: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Panels under one heading."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """A choice at the top of a dashboard: the values of a label of a metric.

    Attributes:
        label: the label that offers its values.
        series: series with this label; may refer to earlier variables.
        many: whether the user may choose several values, or all.
    """

    name: str
    label: str
    series: str
    many: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Position of a panel in the grid: columns and rows from the top left."""

    x: int
    y: int
    width: int
    height: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """A dashboard.

    Attributes:
        uid: address in Grafana, and name of the file.
        text: the questions that the dashboard answers.
        variables: choices at the top.
    """

    uid: str
    title: str
    text: str
    variables: tuple[Variable, ...]
    rows: tuple[Row, ...] = field(default=())

    @property
    def panels(self) -> tuple[Panel, ...]:
        """Returns the panels of all rows."""
        return tuple(panel for row in self.rows for panel in row.panels)

    def positions(self) -> Iterator[tuple[Row | Panel, Position]]:
        """Yields each row's heading and each panel with its position, from the top."""
        top = 0
        for row in self.rows:
            yield row, Position(x=0, y=top, width=GRID, height=1)
            left, top, below = 0, top + 1, top + 1
            for panel in row.panels:
                if left + panel.width > GRID:
                    left, top = 0, below
                yield panel, Position(x=left, y=top, width=panel.width, height=panel.height)
                left += panel.width
                below = max(below, top + panel.height)
            top = below


def render(board: Board) -> str:
    """Renders the dashboard as the JSON file in the chart."""
    document = {
        "uid": board.uid,
        "title": board.title,
        "description": board.text,
        "tags": ["heteroinfer"],
        "editable": True,
        "graphTooltip": 1,
        "schemaVersion": SCHEMA_VERSION,
        "time": {"from": "now-1h", "to": "now"},
        "refresh": "30s",
        "links": [
            {
                "type": "dashboards",
                "tags": ["heteroinfer"],
                "title": "HeteroInfer",
                "asDropdown": False,
                "includeVars": True,
                "keepTime": True,
                "icon": "external link",
            }
        ],
        "templating": {"list": [_datasource(), *(_variable(variable) for variable in board.variables)]},
        "annotations": {"list": []},
        "panels": [
            _heading(number, item, position) if isinstance(item, Row) else _panel(number, item, position)
            for number, (item, position) in enumerate(board.positions(), start=1)
        ],
    }
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def _datasource() -> dict[str, Any]:
    """Returns the choice of the Prometheus data source at the top of a dashboard."""
    return {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}


def _variable(variable: Variable) -> dict[str, Any]:
    """Returns a choice at the top of a dashboard; a choice of several values begins with all values."""
    query = f"label_values({variable.series}, {variable.label})"
    return {
        "name": variable.name,
        "label": variable.name.capitalize(),
        "type": "query",
        "datasource": _DATASOURCE,
        "definition": query,
        "query": {"query": query, "refId": "Values"},
        "refresh": 2,
        "sort": 1,
        "multi": variable.many,
        "includeAll": variable.many,
        **({"current": {"text": "All", "value": "$__all"}} if variable.many else {}),
    }


def _at(position: Position) -> dict[str, int]:
    """Returns a position under Grafana's names."""
    return {"x": position.x, "y": position.y, "w": position.width, "h": position.height}


def _heading(number: int, row: Row, position: Position) -> dict[str, Any]:
    """Returns the heading of a row of panels."""
    return {
        "id": number,
        "type": "row",
        "title": row.title,
        "gridPos": _at(position),
        "collapsed": False,
        "panels": [],
    }


def _panel(number: int, panel: Panel, position: Position) -> dict[str, Any]:
    """Returns a panel. Only a panel over time queries a range; the others query the newest values."""
    transformations = _transformations(panel)
    return {
        "id": number,
        "type": panel.kind.value,
        "title": panel.title,
        "description": panel.text,
        "gridPos": _at(position),
        "datasource": _DATASOURCE,
        "targets": [_target(query, index, panel) for index, query in enumerate(panel.queries)],
        "fieldConfig": {"defaults": _field(panel), "overrides": []},
        "options": _options(panel),
        **({"transformations": transformations} if transformations else {}),
    }


def _target(query: Query, index: int, panel: Panel) -> dict[str, Any]:
    """Returns a query of a panel; `index` is its place among the panel's queries."""
    instant = panel.kind is not Kind.TIME
    return {
        "refId": chr(ord("A") + index),
        "datasource": _DATASOURCE,
        "expr": query.expr,
        "legendFormat": query.legend,
        "instant": instant,
        "range": not instant,
        "format": "table" if panel.kind in {Kind.TABLE, Kind.STACK} else "time_series",
    }


def _field(panel: Panel) -> dict[str, Any]:
    """Returns the settings of a panel's values: unit, colours, thresholds, axis and link."""
    colours = ("green", "orange", "red")
    values = [None, *panel.thresholds]
    defaults: dict[str, Any] = {
        "unit": panel.unit,
        "color": {"mode": "palette-classic" if panel.kind in {Kind.TIME, Kind.STACK} else "thresholds"},
        "thresholds": {
            "mode": "absolute",
            "steps": [
                {"color": colour, "value": value} for colour, value in zip(colours, values, strict=False)
            ],
        },
        "min": 0,
    }
    if panel.most is not None:
        defaults["max"] = panel.most
    if panel.kind is Kind.TIME:
        defaults["custom"] = {
            "lineWidth": 1,
            "fillOpacity": 60 if panel.stacked else 10,
            "showPoints": "never",
            "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
        }
    if panel.kind is Kind.TABLE:
        del defaults["min"]
    if panel.link:
        defaults["links"] = [
            {
                "title": "Group",
                "url": "/d/heteroinfer-group?var-group=${__field.labels.group}&${__url_time_range}",
            }
        ]
    return defaults


def _options(panel: Panel) -> dict[str, Any]:
    """Returns Grafana's options for a panel of this kind."""
    last = {"calcs": ["lastNotNull"], "fields": "", "values": False}
    match panel.kind:
        case Kind.STAT:
            return {"reduceOptions": last, "colorMode": "value", "graphMode": "area", "textMode": "auto"}
        case Kind.BARS:
            return {"reduceOptions": last, "orientation": "horizontal", "displayMode": "basic"}
        case Kind.TABLE:
            return {"showHeader": True, "cellHeight": "sm"}
        case Kind.STACK:
            shown = {"displayMode": "list", "placement": "bottom", "showLegend": True}
            return {
                "orientation": "horizontal",
                "stacking": "normal",
                "xField": panel.columns[0],
                "legend": shown,
            }
        case Kind.TIME:
            legend = {"displayMode": "list", "placement": "bottom", "showLegend": True}
            return {"legend": legend, "tooltip": {"mode": "multi", "sort": "desc"}}


def _transformations(panel: Panel) -> list[dict[str, Any]]:
    """Returns transformations that keep a table's columns, in order, and the values."""
    if panel.kind is Kind.TABLE:
        values = {"Value": "Value"}
    elif panel.kind is Kind.STACK:
        values = {
            f"Value #{chr(ord('A') + index)}": query.legend for index, query in enumerate(panel.queries)
        }
    else:
        return []
    order = {name: index for index, name in enumerate([*panel.columns, *values])}
    renamed = {name: word for name, word in values.items() if name != word}
    joined = [{"id": "joinByField", "options": {"byField": panel.columns[0], "mode": "outer"}}]
    return [
        *(joined if panel.kind is Kind.STACK else []),
        {"id": "filterFieldsByName", "options": {"include": {"names": list(order)}}},
        {"id": "organize", "options": {"indexByName": order, "renameByName": renamed}},
    ]
