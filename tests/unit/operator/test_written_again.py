"""Children that are written again and again."""

from datetime import UTC, datetime, timedelta
from typing import Any

from heteroinfer_operator.kube.kept import MOST, WITHIN, WrittenAgain

NOW = datetime(2026, 5, 5, tzinfo=UTC)


def policy(rule: int = 0, name: str = "demo-0-ranks") -> dict[str, Any]:
    return {"kind": "NetworkPolicy", "metadata": {"name": name}, "spec": {"rule": rule}}


def notes(manifests: list[dict[str, Any]], every: timedelta) -> list[bool]:
    written = WrittenAgain()
    return [note(written, manifest, NOW + i * every) for i, manifest in enumerate(manifests)]


def note(written: WrittenAgain, manifest: dict[str, Any], now: datetime) -> bool:
    return written.note(manifest["kind"], manifest["metadata"]["name"], manifest, now)


def test_the_same_again_and_again_is_undone_by_others() -> None:
    assert notes([policy()] * (MOST + 2), timedelta(seconds=1)) == [False] * (MOST - 1) + [True] * 3


def test_writes_far_apart_are_not_in_a_row() -> None:
    assert not any(notes([policy()] * 20, WITHIN))


def test_another_manifest_begins_anew() -> None:
    assert not any(notes([policy(0), policy(1)] * 20, timedelta(seconds=1)))


def test_objects_are_counted_each_by_itself() -> None:
    assert not any(notes([policy(name=f"demo-{i}-ranks") for i in range(20)], timedelta(seconds=1)))


def test_a_clock_that_is_set_back_begins_anew() -> None:
    written = WrittenAgain()
    for _ in range(MOST):
        said = note(written, policy(), NOW)
    assert said
    assert not note(written, policy(), NOW - timedelta(days=1))


def test_a_deletion_again_and_again_is_undone_by_others_too() -> None:
    written = WrittenAgain()
    times = [written.note("NetworkPolicy", "demo-0-ranks", None, NOW) for _ in range(MOST)]
    assert times == [False] * (MOST - 1) + [True]
    assert not note(written, policy(), NOW), "a write is counted by itself"
