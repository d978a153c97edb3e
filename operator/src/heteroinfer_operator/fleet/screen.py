"""The table of resources, groups and ranks that `heteroinfer up` and `heteroinfer top` show."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from heteroinfer_contract.printable import printable
from heteroinfer_operator.fleet.lines import GroupLine, ResourceLine

Row = Mapping[str, str]
"""Text by column. A column that is missing in a row stays empty."""

TOP_COLUMNS: Final = (
    "name", "node", "phase", "steps", "step", "compute", "wait", "predicted", "kv", "restarts",
    "last failure",
)  # fmt: skip
UP_COLUMNS: Final = (
    "name", "stage", "device", "layers", "phase", "steps", "step", "compute", "wait", "predicted", "seen",
)  # fmt: skip
_TEXTS: Final = frozenset({"name", "node", "device", "layers", "phase", "last failure"})
"""Columns of texts, which are aligned left. Columns of numbers are aligned right."""
_CAPTION: Final = (
    "Times are in ms. step = compute + wait + transfer. The slowest rank has the longest compute. predicted: "
    "time of a group's step or of a rank's compute, with one request"
)


def build_screen(resources: Sequence[ResourceLine], note: str) -> RenderableType:
    """Builds the table of resources, and below the table lines about waits and predictions, and the note.

    A resource that no operator has acted on has no row, because the row would be empty.

    Args:
        note: a text about the source of the values, or "".
    """
    if not resources:
        return Text("found no HeteroInference. To search all namespaces, add -A")
    rows = [row for resource in resources if resource.has_status for row in build_rows(resource)]
    lines = (*describe_waits(resources), *describe_predictions(resources), *([note] if note else ()))
    texts = [Text(printable(line)) for line in lines]
    return Group(build_table(rows, TOP_COLUMNS), *texts) if rows else Group(*texts)


def build_table(rows: Iterable[Row], columns: Sequence[str]) -> Table:
    """Builds a table. Cells are neither wrapped nor interpreted as markup."""
    seen = ". seen: seconds since the last heartbeat" if "seen" in columns else ""
    table = Table(box=None, pad_edge=False, caption=f"{_CAPTION}{seen}", caption_justify="left")
    for column in columns:
        table.add_column(column, justify="left" if column in _TEXTS else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(printable(row.get(column, ""))) for column in columns))
    return table


def build_rows(resource: ResourceLine) -> Iterable[Row]:
    """Yields the row of a resource, then the rows of its groups."""
    available = {"True": "Available", "False": "not Available"}.get(resource.available, "")
    groups = f"{resource.groups} groups ready" if resource.groups else ""
    phase = ", ".join(text for text in (available, groups) if text)
    if phase and resource.reason:
        phase = f"{phase} ({resource.reason})"
    yield {"name": str(resource.key), "phase": phase or resource.reason}
    for group in resource.lines:
        yield from build_group_rows(group)


def build_group_rows(group: GroupLine) -> Iterable[Row]:
    """Yields the row of a group, then the rows of its ranks."""
    steps_ms = (rank.step_ms for rank in group.ranks if rank.step_ms is not None)
    yield {
        "name": f"  group {group.index} epoch {group.epoch}",
        "phase": group.phase,
        "step": _one_decimal(max(steps_ms, default=None)),
        "predicted": _one_decimal(group.predicted_ms),
        "kv": _kv_use(group),
        "restarts": str(group.restarts),
        "last failure": group.last_failure_text,
    }
    for rank in group.ranks:
        yield {
            "name": f"    rank {rank.rank} {rank.role}",
            "node": rank.node,
            "stage": "" if rank.stage is None else str(rank.stage),
            "device": rank.device or "",
            "layers": rank.layers or "",
            "phase": rank.phase,
            "steps": "" if rank.steps is None else str(rank.steps),
            "step": _one_decimal(rank.step_ms),
            "compute": _one_decimal(rank.compute_ms),
            "wait": _one_decimal(rank.wait_ms),
            "predicted": _one_decimal(rank.predicted_ms),
            "seen": _one_decimal(rank.seen_s),
        }


def describe_waits(resources: Sequence[ResourceLine]) -> Iterable[str]:
    """Yields a line for each resource that is not Ready: its reason and the messages of its groups.

    If no group has a message, the line contains the message of the condition Ready instead.
    """
    for resource in resources:
        if not resource.has_status:
            text = "no operator has acted on this resource yet. Run `heteroinfer check`"
            yield f"{resource.key}: {text}"
        elif resource.ready != "True":
            group_messages = sorted({group.message for group in resource.lines if group.message})
            text = "; ".join(group_messages) or resource.message
            yield f"{resource.key}: {resource.reason}" + (f": {text}" if text else "")


def describe_predictions(resources: Sequence[ResourceLine]) -> Iterable[str]:
    """Yields a line for each calibration that predictions use, and for each description of long prompts."""
    for resource in resources:
        for rates in dict.fromkeys(group.calibration for group in resource.lines if group.calibration):
            yield f"{resource.key}: predictions use {rates}"
        for text in dict.fromkeys(group.long_prompts for group in resource.lines if group.long_prompts):
            yield f"{resource.key}: {text}"


def _one_decimal(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _kv_use(group: GroupLine) -> str:
    """Returns the use of the KV cache, such as "12 % of 4096 tokens"; "" if it is unknown."""
    if group.kv_tokens is None:
        return ""
    use = "" if group.kv_use is None else f"{100 * group.kv_use:.0f} % of "
    return f"{use}{group.kv_tokens} tokens"
