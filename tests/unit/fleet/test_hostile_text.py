"""Texts of pods, leaders and statuses cannot control an administrator's terminal or end a command."""

import io
import json
import logging
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from heteroinfer_contract import names
from heteroinfer_operator.api import parse_status
from heteroinfer_operator.cluster import PodView, ResourceKey
from heteroinfer_operator.commands.printable_logs import JsonFormatter, PrintableFormatter
from heteroinfer_operator.fleet.fleet_reader import kv_use_of
from heteroinfer_operator.fleet.lines import build_line
from heteroinfer_operator.fleet.screen import build_screen
from heteroinfer_operator.fleet.story import build_stories, epochs
from heteroinfer_operator.manifests.identity import Owner
from heteroinfer_operator.reconcile.reading import with_complete_labels
from heteroinfer_operator.up.console import Display

HOSTILE = "\x1b]0;title\x07\x1b]52;c;cm0=\x07\x1b[2J\x1b[1;1H\u202e\x9b2J"
NOW = datetime(2026, 11, 26, tzinfo=UTC)


def status(text: str) -> dict[str, Any]:
    time = "2026-01-01T00:00:00Z"
    return {
        "conditions": [
            {
                "type": "Ready",
                "status": "False",
                "reason": "Starting",
                "message": text,
                "lastTransitionTime": time,
            }
        ],
        "groups": [
            {
                "index": 0,
                "epoch": 3,
                "phase": "Starting",
                "message": text,
                "failures": [{"epoch": 2, "time": time, "reason": "RankExited", "message": text}],
                "members": [{"rank": 0, "role": "cpu", "pod": "p-0-3-0", "node": "n"}],
            }
        ],
    }


def shown(renderable: object) -> str:
    out = io.StringIO()
    Console(file=out, force_terminal=True, color_system=None, width=2000).print(renderable)
    return out.getvalue()


def test_top_shows_no_terminal_sequence() -> None:
    line = build_line(ResourceKey(namespace="a", name="b"), parse_status(status(HOSTILE)), {})
    text = shown(build_screen([line], f"note {HOSTILE}"))
    assert "\\x1b]52;c;cm0=\\x07" in text
    assert text.replace("\n", "").isprintable()


def test_up_and_logs_of_the_operator_show_no_terminal_sequence() -> None:
    out = io.StringIO()
    display = Display(Console(file=out, force_terminal=True, color_system=None, width=2000), live=False)
    display.print_line(HOSTILE, warning=True)
    display.print_plain(HOSTILE)
    assert out.getvalue().replace("\n", "").isprintable()
    record = logging.LogRecord("x", logging.WARNING, "x.py", 1, "pod: %s\nnext", (HOSTILE,), None)
    logged = PrintableFormatter("%(message)s").format(record)
    assert logged.replace("\n", "").isprintable()
    assert "\nnext" in logged
    line = JsonFormatter().format(record)
    assert line.isprintable()
    assert line.isascii()
    assert json.loads(line)["message"] == f"pod: {HOSTILE}\nnext"


@pytest.mark.parametrize(
    ("value", "share"),
    [("0.5", 0.5), ("x", None), ("nan", None), ("inf", None), ("1e999", None), ("-1", None), ("7", None)],
)
def test_an_invalid_share_leaves_only_its_cell_empty(value: str, share: float | None) -> None:
    assert kv_use_of(f'vllm:kv_cache_usage_perc{{a="b"}} {value}\n') == share


@given(st.text(), st.text())
def test_labels_with_any_text_do_not_break_commands(epoch: str, index: str) -> None:
    labels = {names.LABEL_EPOCH: epoch, names.LABEL_POD_INDEX: index, names.LABEL_GROUP: "0"}
    owner = Owner(key=ResourceKey(namespace="default", name="p"), uid="")
    pods = with_complete_labels([PodView(name="p-0-3-0", uid="u", labels=labels, created=NOW)], owner)
    group = parse_status(status("starts")).groups[0]
    assert epochs(pods) == (3,)
    assert len(build_stories(group, pods, 3)) == 1
