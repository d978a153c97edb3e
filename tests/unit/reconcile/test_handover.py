"""Upgrade and rollback: an operator takes over the objects of another version, each with its own code.

versions/ contains the modules of 0.1.0 and of 0.2.0 before typed transitions. Remove them together with
reconcile/older_statuses.py.
"""

import json
import os
import subprocess
import sys
import tarfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.unit.reconcile import handover

FIRST, BEFORE = "0.1.0", "0.2.0-at-81a91cc"
"""The released version, and the commit before the life of a group became typed transitions."""
OF_BOTH = ("serving", "again", "failed", "backoff", "paused", "refused", "rolling", "unreadable", "noted")
LEFT = {BEFORE: tuple(handover.STATES), FIRST: OF_BOTH}
NEW_FIELDS = (
    *("damagedPod", "notes", "kvCache", "maxModelLen", "images", "roles", "mode"),
    *("stepMicroseconds", "predictedStepMicroseconds"),
    "calibration",  # words about the rates, which no version reads
)
READ_BACK = ("kubectl label", "kubectl patch")
"""Parts of the messages that those versions parse; all other messages may change."""
NEW_REASONS = {
    ("failed", False): ["RestartsUsedUp"],
    ("refused", False): ["RefusedArgument"],
    ("unreadable", False): ["ModelPodEnded"],
    ("unreadable", True): ["ModelNotReadable"],
}
"""Events after a change from or to 0.1.0, by state and direction: 0.1.0 uses other reasons."""

NEW_MESSAGES = {
    ("refused", True): ["RefusedArgument"],
    ("unreadable", True): ["ModelPodEnded"],
}
"""Events after a change to the version before typed transitions: it reports the reason again."""

BUDGETS = {
    (state, back): ["ApplyObject"] * (1 + back) + ["DeleteObject"] * (2 - back)
    for state in ("serving", "rolling")
    for back in (False, True)
} | {("stuck", back): ["ApplyObject"] for back in (False, True)}
"""Writes of budgets: since then two groups share one, and pods beside a stuck pod may be evicted."""


WITHOUT_NODES = ("rolling", "stuck")
"""States with pods without a node. CapacityAvailable was True then, and since then is Unknown."""


def drop_capacity(*statuses: dict[str, Any]) -> None:
    """Removes the condition CapacityAvailable, which differs between the two versions."""
    for status in statuses:
        conditions = {each["type"]: each for each in status["conditions"]}
        assert conditions.pop("CapacityAvailable")["reason"] in {"Placed", "Scheduling"}
        status["conditions"] = list(conditions.values())


@pytest.fixture(scope="session")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("versions")
    for version in LEFT:
        with tarfile.open(Path(__file__).parent / "versions" / f"{version}.tar.xz") as archive:
            archive.extractall(folder / version, filter="data")
    return folder


@cache
def left_by(packages: Path, version: str) -> dict[str, Any]:
    """Returns the objects that an older version leaves behind."""
    return run(packages / version, "leave", *LEFT[version])


@cache
def taken_back(packages: Path, version: str) -> dict[str, Any]:
    """Returns the actions of an older version on objects of this version."""
    given = {state: handover.to_json(handover.STATES[state]()) for state in LEFT[version]}
    return run(packages / version, "take", stdin=json.dumps(given, default=str))


def run(packages: Path, *arguments: str, stdin: str = "") -> dict[str, Any]:
    command = [sys.executable, handover.__file__, *arguments]
    environment = {**os.environ, "PYTHONPATH": str(packages)}
    done = subprocess.run(
        command, env=environment, input=stdin, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def handed_over(
    packages: Path, version: str, state: str, *, back: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the status before, and the actions of the other version."""
    if back:
        left = json.loads(json.dumps(handover.to_json(handover.STATES[state]()), default=str))
        return left["status"], taken_back(packages, version)[state]
    left = json.loads(json.dumps(left_by(packages, version)[state]))
    # The API server wrote the default of the older CRD into each object.
    left["spec"].setdefault("parallelism", {}).setdefault("mode", "Pipeline")
    return json.loads(json.dumps(left["status"])), handover.taken(handover.from_json(left))


def comparable(value: Any) -> Any:
    """Drops new fields, and messages that no version parses."""
    if isinstance(value, list):
        return [comparable(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        key: comparable(item)
        for key, item in value.items()
        if key not in NEW_FIELDS and (key != "message" or _is_parsed(value))
    }


def _is_parsed(owner: dict[str, Any]) -> bool:
    reports_plan = owner.get("type") == "Planned" and owner.get("status") == "True"
    return reports_plan or any(part in owner["message"] for part in READ_BACK)


both_ways = pytest.mark.parametrize("back", [False, True], ids=["upgrade", "rollback"])


@both_ways
@pytest.mark.parametrize("state", LEFT[BEFORE])
def test_a_status_from_before_typed_transitions_stays_unchanged(
    packages: Path, state: str, back: bool
) -> None:
    before, taken = handed_over(packages, BEFORE, state, back=back)
    if state in WITHOUT_NODES:
        drop_capacity(before, taken["status"])
    assert comparable(taken["status"]) == comparable(before)
    assert taken["events"] == NEW_MESSAGES.get((state, back), [])
    assert taken["touched"] == []
    if state != "cut off":  # its refused Service is retried
        finalizer = ["SetFinalizer" if back else "RemoveFinalizer"]
        added = ["PatchStatus"] * (taken["status"] != before)
        assert [kind for kind in taken["writes"] if kind != "TryObjects"] == finalizer + added
    assert sorted(taken["budgets"]) == BUDGETS.get((state, back), [])


@both_ways
@pytest.mark.parametrize("state", LEFT[FIRST])
def test_groups_keep_running_across_an_upgrade_from_0_1_0_and_back(
    packages: Path, state: str, back: bool
) -> None:
    before, taken = handed_over(packages, FIRST, state, back=back)
    after = taken["status"]
    kept = ("phase", "epoch", "revision", "planHash", "restarts", "nextEpochTime")
    for old, new in zip(before["groups"], after["groups"], strict=True):
        members = [
            [(entry["rank"], entry["pod"]) for entry in group.get("members", ())] for group in (old, new)
        ]
        assert members[0] == members[1]
        assert {key: new.get(key) for key in kept} == {key: old.get(key) for key in kept}
        assert len(new.get("failures", ())) == len(old.get("failures", ()))
    assert [name for name in taken["touched"] if "-inspect-" not in name] == []
    assert taken["events"] == NEW_REASONS.get((state, back), [])
    if state == "noted":
        assert planned(after) == planned(before)
        assert "CPU ranks add capacity" in planned(after)


def planned(status: dict[str, Any]) -> str:
    """Returns the message of Planned, which holds the notes on plans."""
    return next(str(each["message"]) for each in status["conditions"] if each["type"] == "Planned")
