"""Draws pictures of the dashboards for the documentation, with data from Prometheus.

Grafana does not run: a picture shows the panels and their data, but not Grafana's design.
"""

import io
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from charts.dashboards.board import GRID, Board, Kind, Panel, Position, Query, Row
from tests.watching.watched import Series, Watched

_WIDTH_IN: Final = 15.0
_ROW_IN: Final = 0.30
_DPI: Final = 96
_COLOURS: Final = ("#3274d9", "#ff9830", "#73bf69", "#e02f44", "#a352cc", "#fade2a", "#5794f2", "#8ab8ff")
_INK: Final = "#24292e"
_QUIET: Final = "#6a737d"
_MAX_SERIES: Final = 8
_SCALES: Final[dict[str, tuple[tuple[float, str], ...]]] = {
    "s": ((60.0, "min"), (1.0, "s"), (1e-3, "ms"), (1e-6, "µs")),
    "bytes": ((2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B")),
    "Bps": ((2.0**30, "GiB/s"), (2.0**20, "MiB/s"), (2.0**10, "KiB/s"), (1.0, "B/s")),
    "percentunit": ((1e-2, "%"),),
}

ShownParts = list[tuple[Query, list[Series]]]
"""The result of each query of a panel."""


def draw(board: Board, watched: Watched, target: Path) -> None:
    """Draws a dashboard with the data of a watched group, and writes the picture."""
    positions = list(board.positions())
    height = max(position.y + position.height for _, position in positions)
    figure = Figure(figsize=(_WIDTH_IN, (height + 1) * _ROW_IN), facecolor="white")
    figure.text(0.008, 1 - 0.8 / (height + 1), board.title, fontsize=13, weight="bold", color=_INK)
    for item, position in positions:
        if isinstance(item, Row):
            y = 1 - (position.y + 1.75) / (height + 1)
            figure.text(0.008, y, item.title, fontsize=10, weight="bold", color=_QUIET)
        else:
            shown = [(query, watched.samples(query, item)) for query in item.queries]
            _DRAWN[item.kind](_axes(figure, item, position, height + 1), item, shown)
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=_DPI)
    # Few colours are enough, and reduce the file to a third.
    Image.open(drawn).convert("RGB").quantize(64).save(target, optimize=True)


def _axes(figure: Figure, panel: Panel, position: Position, height: int) -> Axes:
    """Returns the axes of a panel with its title, inside its area."""
    wide, high = 1 / GRID, 1 / height
    left = 0.045 if panel.kind is Kind.TIME else 0.012
    if panel.kind in {Kind.BARS, Kind.STACK}:
        left = 0.12 if panel.kind is Kind.BARS else 0.03
    x, y = position.x * wide + left, 1 - (position.y + 1 + position.height) * high
    below = (1.9 if panel.kind is Kind.TIME else 1.1 if panel.kind is Kind.STACK else 0.3) * high
    axes = figure.add_axes(
        (x, y + below, position.width * wide - left - 0.012, (position.height - 1.3) * high - below)
    )
    figure.text(
        position.x * wide + 0.008,
        y + (position.height - 0.8) * high,
        panel.title,
        fontsize=8.5,
        color=_INK,
        weight="normal",
    )
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_color("#d0d7de" if side in {"left", "bottom"} else "none")
    axes.tick_params(labelsize=7, colors=_QUIET, length=0)
    return axes


def _name(query: Query, labels: dict[str, str]) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda found: labels.get(found[1], ""), query.legend)


def _text(value: float, unit: str) -> str:
    """Formats a value with its unit, scaled as in Grafana."""
    for scale, name in _SCALES.get(unit, ()):
        if abs(value) >= scale or (scale, name) == _SCALES[unit][-1]:
            return f"{value / scale:.3g} {name}"
    return f"{value:.0f}" if value == round(value) else f"{value:.3g}"


def _scaled(unit: str, most: float) -> tuple[float, str]:
    """Returns the divisor for the values of an axis, and the resulting unit."""
    for scale, name in _SCALES.get(unit, ()):
        if most >= scale or (scale, name) == _SCALES[unit][-1]:
            return scale, name
    return 1.0, ""


def _draw_stat(axes: Axes, panel: Panel, shown: ShownParts) -> None:
    """Draws a panel with one value, in the colour of the highest threshold that the value reaches."""
    axes.axis("off")
    ((query, series),) = shown
    labels, samples = series[0]
    text = _name(query, labels) or _text(samples[-1][1], panel.unit)
    reached = sum(samples[-1][1] >= limit for limit in panel.thresholds)
    colour = ("#37872d", "#e07400", "#c4162a")[reached]
    axes.text(0.5, 0.5, text, ha="center", va="center", fontsize=17, color=colour, transform=axes.transAxes)


def _draw_time(axes: Axes, panel: Panel, shown: ShownParts) -> None:
    """Draws a panel over time, as lines or as stacked areas."""
    lines = [(_name(query, labels), samples) for query, series in shown for labels, samples in series]
    lines = sorted(lines, key=lambda line: -max(value for _, value in line[1]))[:_MAX_SERIES]
    if panel.stacked:
        lines = [(_name(query, labels), samples) for query, series in shown for labels, samples in series]
    scale, unit = _scaled(panel.unit, max(value for _, samples in lines for _, value in samples))
    start = min(samples[0][0] for _, samples in lines)
    colours = _COLOURS[: len(lines)]
    if panel.stacked:
        times = sorted({t for _, samples in lines for t, _ in samples})
        at = [dict(samples) for _, samples in lines]
        heights = [[values.get(t, 0.0) / scale for t in times] for values in at]
        axes.stackplot(
            [t - start for t in times], heights, labels=[n for n, _ in lines], colors=colours, alpha=0.85
        )
    else:
        for (name, samples), colour in zip(lines, colours, strict=True):
            x, y = [t - start for t, _ in samples], [value / scale for _, value in samples]
            axes.plot(x, y, label=name, color=colour, linewidth=1.2)
    axes.set_ylim(bottom=0, top=None if panel.most is None else panel.most / scale)
    axes.grid(axis="y", color="#eaeef2", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_ylabel(unit, fontsize=7, color=_QUIET)
    axes.yaxis.set_major_locator(_locator())
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:.0f} s")
    columns = 4 if sum(len(name) for name, _ in lines) < 60 else 2
    axes.legend(loc="upper left", bbox_to_anchor=(-0.05, -0.1), ncol=columns, **_LEGEND)


def _draw_bars(axes: Axes, panel: Panel, shown: ShownParts) -> None:
    bars = [(_name(query, labels), samples[-1][1]) for query, series in shown for labels, samples in series]
    numbers = range(len(bars))
    axes.barh(numbers, [value for _, value in bars], color=_COLOURS[0], height=0.6)
    axes.set_yticks(numbers, [name for name, _ in bars], fontsize=7.5)
    axes.set_ylim(len(bars) - 0.4, -0.6)
    axes.set_xlim(0, max(value for _, value in bars) * 1.25)
    axes.set_xticks([])
    for number, (_, value) in zip(numbers, bars, strict=True):
        axes.text(value, number, f" {_text(value, panel.unit)}", va="center", fontsize=8, color=_INK)


def _draw_stack(axes: Axes, panel: Panel, shown: ShownParts) -> None:
    """Draws the last values of a panel as stacked bars, a bar for each rank."""
    (column,) = panel.columns
    names = sorted({labels[column] for _, series in shown for labels, _ in series}, reverse=True)
    left = [0.0] * len(names)
    for (query, series), colour in zip(shown, _COLOURS, strict=False):
        last = {labels[column]: samples[-1][1] for labels, samples in series}
        parts = [last.get(name, 0.0) for name in names]
        axes.barh(names, parts, left=left, color=colour, height=0.6, label=query.legend)
        left = [a + b for a, b in zip(left, parts, strict=True)]
    axes.set_yticks(
        range(len(names)), [f"rank {name}" for name in names], fontsize=7.5, rotation=90, va="center"
    )
    axes.xaxis.set_major_formatter(lambda x, _: _text(x, panel.unit))
    axes.xaxis.set_major_locator(_locator())
    axes.legend(loc="upper left", bbox_to_anchor=(-0.02, -0.09), ncol=len(shown), **_LEGEND)


def _draw_table(axes: Axes, panel: Panel, shown: ShownParts) -> None:
    axes.axis("off")
    rows = [
        [*(labels.get(column, "") for column in panel.columns), _text(samples[-1][1], panel.unit)]
        for _, series in shown
        for labels, samples in series
    ]
    _write_rows(axes, [*panel.columns, "Value"], rows)


def _write_rows(axes: Axes, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Writes a table with its head and at most seven rows."""
    for number, row in enumerate([head, *rows[:7]]):
        for column, text in enumerate(row):
            axes.text(
                column / len(head), 0.92 - number * 0.125, text, fontsize=8, transform=axes.transAxes,
                color=_INK if number else _QUIET, weight="normal", va="center",
            )  # fmt: skip


def _locator() -> Any:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(4)


_LEGEND: Final[dict[str, Any]] = {
    "fontsize": 7,
    "frameon": False,
    "handlelength": 1.0,
    "columnspacing": 1.0,
    "labelcolor": _QUIET,
}
_DRAWN: Final[dict[Kind, Callable[[Axes, Panel, ShownParts], None]]] = {
    Kind.STAT: _draw_stat,
    Kind.TIME: _draw_time,
    Kind.BARS: _draw_bars,
    Kind.STACK: _draw_stack,
    Kind.TABLE: _draw_table,
}
