"""One module writes a group's status, mypy checks the changes, and precedence is data."""

import ast
import sys
from pathlib import Path
from typing import Any

import pytest
from mypy import api as mypy

from heteroinfer_operator.api import ConditionType, GroupStatus
from heteroinfer_operator.reconcile import transitions
from heteroinfer_operator.reconcile.conditions import CHECKS
from heteroinfer_operator.reconcile.one_group.ends import ENDS
from tests.unit.product import SOURCES, modules_below
from tests.unit.reconcile.world import World, cpu_pair

REPOSITORY = Path(__file__).parents[3]
PLANTED = """
from heteroinfer_operator.api import GroupPhase, GroupStatus, ModelStatus, RankEntry

def change(group: GroupStatus, model: ModelStatus, rank: RankEntry) -> GroupStatus:
    group.changed(epok=3)
    group.changed(epoch="3")
    group.changed(failures=[])
    model.changed(phase="Ready")
    rank.changed(node=1)
    return group.changed(epoch=3, phase=GroupPhase.READY, members=(rank.changed(ready=True),))
"""


def test_mypy_finds_a_misspelt_field_and_a_wrong_type_in_a_change(tmp_path: Path) -> None:
    planted = tmp_path / "planted.py"
    planted.write_text(PLANTED)
    config = ["--config-file", str(REPOSITORY / "pyproject.toml"), "--cache-dir", str(tmp_path / "cache")]
    said, _, _ = mypy.run([*config, str(planted)])
    lines = [line.split(": ", 1)[0].rsplit(":", 1)[1] for line in said.splitlines() if ": error: " in line]
    assert lines == ["5", "6", "7", "8", "9"], said


def test_no_change_hides_its_fields_from_mypy() -> None:
    hidden = [
        f"{name}:{node.lineno}"
        for name, file in modules_below(SOURCES).items()
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if (node.func.attr == "changed" and any(keyword.arg is None for keyword in node.keywords))
        or (node.func.attr == "model_copy" and name != "heteroinfer_operator.api.base")
    ]
    assert hidden == []


def test_one_module_changes_the_status_of_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    writers = set()
    change = GroupStatus.changed

    def changed(self: GroupStatus, **fields: Any) -> GroupStatus:
        writers.add(sys._getframe(1).f_globals["__name__"])
        return change(self, **fields)

    monkeypatch.setattr(GroupStatus, "changed", changed)
    world = World(spec=cpu_pair())
    world.serve()
    world.change_spec(engine={"maxModelLen": 1024})
    world.settle()
    world.serve()
    world.end_pod(world.workers()[1])
    world.settle()
    world.reap()
    world.settle()
    world.change_spec(suspend=True)
    world.settle()
    assert writers == {transitions.__name__}


def test_the_first_cause_determines_the_end_of_an_epoch() -> None:
    assert [check.__name__ for check in ENDS] == [
        "pod_ended",
        "node_lost",
        "kueue_holds_pod_name",
        "pod_gone",
        "plan_lost",
        "key_lost",
        "images_changed",
    ]


def test_the_first_check_with_an_answer_decides_a_condition() -> None:
    found = {kind: [check.__name__ for check in checks] for kind, checks in CHECKS.items()}
    assert found == {
        ConditionType.AVAILABLE: [
            "no_group_wanted",
            "no_client_reaches_groups",
            "some_group_serves",
            "serving_group_lost_labels",
            "leader_does_not_answer",
            "worst_group_down",
        ],
        ConditionType.READY: [
            "ready_if_no_pod_left",
            "all_serve_spec",
            "stalled_but_none_failed",
            "object_refused",
            "a_group_is_down",
            "rolling_out",
        ],
        ConditionType.STALLED: [
            "answer_if_no_group_is_wanted",
            "group_failed",
            "spec_cannot_start",
            "labels_must_be_restored",
            "not_stalled",
        ],
        ConditionType.PROGRESSING: [
            "any_object_refused",
            "pod_blocked",
            "pods_end",
            "rollout_stuck",
            "group_starts_or_stops",
            "rollout_in_progress",
            "no_change",
        ],
        ConditionType.DEGRADED: ["no_group_wanted", "only_some_serve"],
        ConditionType.FAILED: ["no_group_wanted", "restarts_used_up"],
    }
