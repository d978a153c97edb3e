"""Counts repeated identical writes of children."""

from datetime import UTC, datetime, timedelta
from typing import Any

from heteroinfer_operator.kube.kept import CONSECUTIVE_WITHIN, MAX_RESTORATIONS, RepeatedWrites

NOW = datetime(2026, 5, 5, tzinfo=UTC)


def policy(rule: int = 0, name: str = "demo-0-ranks") -> dict[str, Any]:
    return {"kind": "NetworkPolicy", "metadata": {"name": name}, "spec": {"rule": rule}}


def notes(manifests: list[dict[str, Any]], every: timedelta) -> list[bool]:
    written = RepeatedWrites()
    return [note(written, manifest, NOW + i * every) for i, manifest in enumerate(manifests)]


def note(written: RepeatedWrites, manifest: dict[str, Any], now: datetime) -> bool:
    return written.count_write(manifest["kind"], manifest["metadata"]["name"], manifest, now)


def test_repeated_identical_writes_count_as_undone_by_others() -> None:
    assert (
        notes([policy()] * (MAX_RESTORATIONS + 2), timedelta(seconds=1))
        == [False] * (MAX_RESTORATIONS - 1) + [True] * 3
    )


def test_writes_far_apart_are_not_consecutive() -> None:
    assert not any(notes([policy()] * 20, CONSECUTIVE_WITHIN))


def test_another_manifest_restarts_the_count() -> None:
    assert not any(notes([policy(0), policy(1)] * 20, timedelta(seconds=1)))


def test_each_object_is_counted_separately() -> None:
    assert not any(notes([policy(name=f"demo-{i}-ranks") for i in range(20)], timedelta(seconds=1)))


def test_setting_the_clock_back_restarts_the_count() -> None:
    written = RepeatedWrites()
    for _ in range(MAX_RESTORATIONS):
        said = note(written, policy(), NOW)
    assert said
    assert not note(written, policy(), NOW - timedelta(days=1))


def test_repeated_deletions_count_as_undone_by_others() -> None:
    written = RepeatedWrites()
    times = [written.count_write("NetworkPolicy", "demo-0-ranks", None, NOW) for _ in range(MAX_RESTORATIONS)]
    assert times == [False] * (MAX_RESTORATIONS - 1) + [True]
    assert not note(written, policy(), NOW), "writes and deletions are counted separately"
