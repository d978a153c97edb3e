"""The status: built from pure code, dumped without nulls, read back as it was."""

from datetime import UTC, datetime, timedelta, timezone

import pytest
from pydantic import ValidationError

from heteroinfer_operator.api import (
    Condition,
    ConditionStatus,
    ConditionType,
    FailureStatus,
    GroupStatus,
    HeteroInferenceStatus,
    merge_conditions,
    parse_status,
)
from heteroinfer_operator.api.condition import MAX_CONDITIONS

NOW = datetime(2026, 11, 21, 12, 0, 0, 999_999, tzinfo=UTC)


def condition(
    kind: ConditionType, status: ConditionStatus, reason: str = "Some", at: datetime = NOW
) -> Condition:
    return Condition(type=kind, status=status, reason=reason, message="", last_transition_time=at)


def test_a_status_is_read_back_unchanged() -> None:
    failure = FailureStatus(
        epoch=1, time=NOW, reason="RankExited", message="rank 1 (cpu) exited", rank=1, exit_code=-9
    )
    status = HeteroInferenceStatus(
        replicas=1,
        groups=(GroupStatus(index=0, epoch=2, failures=(failure,)),),
        conditions=(condition(ConditionType.READY, ConditionStatus.TRUE),),
    )
    dumped = status.dump()
    assert dumped["groups"][0]["failures"][0] == {
        "served": True,
        "epoch": 1,
        "time": "2026-11-21T12:00:00Z",
        "reason": "RankExited",
        "message": "rank 1 (cpu) exited",
        "rank": 1,
        "exitCode": -9,
        "counted": True,
    }
    assert parse_status(dumped) == status


def test_a_missing_status_is_parsed_as_an_empty_status() -> None:
    assert parse_status(None) == parse_status({}) == HeteroInferenceStatus()


def test_a_newer_operators_fields_are_dropped() -> None:
    assert parse_status({"replicas": 1, "fromTheFuture": {}}) == HeteroInferenceStatus(replicas=1)


def test_times_are_stored_in_utc() -> None:
    east = NOW.astimezone(timezone(timedelta(hours=9)))
    assert condition(ConditionType.READY, ConditionStatus.TRUE, at=east).dump()["lastTransitionTime"] == (
        "2026-11-21T12:00:00Z"
    )
    with pytest.raises(ValidationError, match="must have a time zone"):
        condition(ConditionType.READY, ConditionStatus.TRUE, at=NOW.replace(tzinfo=None))


def test_a_condition_keeps_its_time_while_its_status_is_the_same() -> None:
    later = NOW + timedelta(minutes=1)
    before = (
        condition(ConditionType.READY, ConditionStatus.FALSE, "Starting"),
        condition(ConditionType.PLANNED, ConditionStatus.TRUE),
        condition(ConditionType.FAILED, ConditionStatus.FALSE),
    )
    wanted = (
        condition(ConditionType.READY, ConditionStatus.FALSE, "Waiting", at=later),
        condition(ConditionType.PLANNED, ConditionStatus.FALSE, at=later),
    )
    merged = merge_conditions(before, wanted, now=later)
    assert [(c.type, c.reason, c.last_transition_time) for c in merged] == [
        ("Planned", "Some", later.replace(microsecond=0)),
        ("Ready", "Waiting", NOW.replace(microsecond=0)),
    ]


def test_conditions_of_other_controllers_stay() -> None:
    foreign = {
        "type": "example.com/Approved",
        "status": "True",
        "reason": "ByReview",
        "message": "m" * 9000,
        "lastTransitionTime": "2026-11-21T12:00:00Z",
        "observedGeneration": 3,
    }
    status = parse_status({"conditions": [foreign]})
    wanted = (condition(ConditionType.READY, ConditionStatus.TRUE),)
    merged = merge_conditions(status.conditions, wanted, now=NOW + timedelta(minutes=1))
    assert [each.type for each in merged] == ["Ready", "example.com/Approved"]
    assert merged[1].dump() == foreign


def test_the_operators_conditions_fit_beside_any_number_of_other_conditions() -> None:
    others = [
        Condition(
            type=f"example.com/C{i}",
            status=ConditionStatus.TRUE,
            reason="R",
            message="",
            last_transition_time=NOW,
        )
        for i in range(MAX_CONDITIONS)
    ]
    merged = merge_conditions(others, [condition(ConditionType.READY, ConditionStatus.TRUE)], now=NOW)
    assert len(merged) == MAX_CONDITIONS
    assert "Ready" in {each.type for each in merged}


def test_conditions_of_other_controllers_take_a_bounded_part_of_the_status() -> None:
    """Etcd refuses a status of 1.5 MiB, and the operator could then write none."""
    ready = condition(ConditionType.READY, ConditionStatus.TRUE)
    large = [ready.changed(type=f"x/C{index}", message="a" * 30_000) for index in range(55)]
    merged = merge_conditions(large, [ready], now=NOW)
    assert [each.type for each in merged] == ["Ready", "x/C0", "x/C1"]
