"""The fault matrix as data, what is measured of a row, and the page that shows both."""

import pytest

from heteroinfer_contract import names
from tests.e2e.faults.matrix import MATRIX
from tests.e2e.faults.measuring import Turn, find_turn
from tests.e2e.faults.table import PAGE, Measured, build_table, expectation
from tests.e2e.watching import Change


def pod(kind: str, at: float, name: str, epoch: int) -> Change:
    stored = {"metadata": {"name": name, "labels": {names.LABEL_EPOCH: str(epoch)}}}
    return Change(at=at, kind=kind, stored=stored)


def test_each_row_has_a_name_of_its_own() -> None:
    assert len({fault.name for fault in MATRIX}) == len(MATRIX)


def test_the_page_has_each_fault_and_its_expected_result() -> None:
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    rows = {
        cells[1]: cells for line in lines if len(cells := [cell.strip() for cell in line.split("|")]) == 9
    }
    rows.pop("fault")
    assert list(rows) == [fault.name for fault in MATRIX]
    for fault in MATRIX:
        assert rows[fault.name][2] == fault.how
        assert rows[fault.name][3].startswith(expectation(fault))


def test_a_table_has_a_line_for_each_row() -> None:
    table = build_table({fault.name: Measured(ready_false_s=1.25) for fault in MATRIX})
    assert len(table.splitlines()) == 2 + len(MATRIX)
    assert table.count("| 1.2 s |") == len(MATRIX)


def test_a_turn_lasts_from_the_last_old_pod_to_the_last_new_pod() -> None:
    changes = [
        pod("ADDED", 1.0, "a-1", 1),
        pod("ADDED", 1.1, "b-1", 1),
        pod("DELETED", 5.0, "a-1", 1),
        pod("DELETED", 6.0, "b-1", 1),
        pod("ADDED", 6.5, "a-2", 2),
        pod("ADDED", 7.0, "b-2", 2),
        pod("MODIFIED", 8.0, "b-2", 2),
        pod("ADDED", 9.0, "b-2", 2),  # the watch was begun again
    ]
    turn = find_turn(changes, epoch=1, count=2)
    assert turn == Turn(epoch=2, old_gone=6.0, first_created=6.5, last_created=7.0)
    assert turn.wait_s == 1.0
    with pytest.raises(AssertionError, match="expected the end of 2 pods of epoch 1"):
        find_turn(changes[:3], epoch=1, count=2)
    with pytest.raises(AssertionError, match="expected 2 pods of epoch 2"):
        find_turn(changes[:5], epoch=1, count=2)
