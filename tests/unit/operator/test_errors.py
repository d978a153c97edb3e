"""Errors that users see."""

from datetime import UTC, datetime

import pytest

from heteroinfer_operator import errors
from heteroinfer_operator.api import ConditionType
from heteroinfer_operator.errors import HeteroInferError
from heteroinfer_operator.nodes.calibrations import CalibrationError, MeasuredKind
from heteroinfer_operator.reconcile.life import build_condition

NOW = datetime(2026, 11, 26, tzinfo=UTC)


def test_every_error_has_a_reason_that_a_condition_can_have() -> None:
    classes = [each for each in vars(errors).values() if isinstance(each, type)]
    shown = [each for each in classes if issubclass(each, HeteroInferError)]
    assert HeteroInferError in shown
    for each in shown:
        error = each("it failed")
        made = build_condition(ConditionType.READY, False, error.reason, error.message, now=NOW, generation=1)
        assert made.reason == error.reason


def test_a_passed_reason_replaces_the_class_reason() -> None:
    assert HeteroInferError("it failed", reason="NodesNotReadable").reason == "NodesNotReadable"


@pytest.mark.parametrize("entry", ['{"nodeSelector": {"a": "b"}, "calibration": {}}'])
def test_a_calibration_that_cannot_be_read_is_reported_by_its_field(entry: str) -> None:
    with pytest.raises(CalibrationError) as raised:
        MeasuredKind.from_entry("m7i.json", entry)
    assert str(raised.value).startswith("m7i.json: Calibration")
    assert "ContractError(" not in str(raised.value)
