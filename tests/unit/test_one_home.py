"""What the product writes once only: reasons, variables, exit codes of signals, rates in words."""

import ast
import re
from collections.abc import Iterator

import pytest

from heteroinfer_operator.api import GroupPhase, StartupPhase
from tests.unit.product import SOURCES, modules_below
from tests.unit.test_reasons import in_code

REASONS = {each for each in in_code() - {*GroupPhase, *StartupPhase} if re.search(r"[a-z][A-Z]", each)}
"""Of two words or more: one is said of other things, too. Phases are of the contract, and of the resource."""
_VARIABLE = re.compile(r"[A-Z]{2,}[A-Z0-9]*(_[A-Z0-9]+)+")
_OF_RATE = re.compile(r"^\s*GB/s|\}\s*GB/s|%[.\d]*[dfg]\s*GB/s")
_EXIT_CODE, _RATE = "128 and a signal", "a rate in GB/s"
HOMES = {_EXIT_CODE: "heteroinfer_contract.names", _RATE: "heteroinfer_operator.quantity"}


def written(text: str) -> Iterator[str]:
    """Yields each thing that has one home and that a module writes."""
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Constant(value=str(word)) if word in REASONS or _VARIABLE.fullmatch(word):
                yield word
            case ast.Constant(value=str(words)) if _OF_RATE.search(words):
                yield _RATE
            case ast.BinOp(op=ast.Add() | ast.Sub() | ast.BitOr(), left=left, right=right):
                if any(isinstance(side, ast.Constant) and side.value == 128 for side in (left, right)):
                    yield _EXIT_CODE


def test_each_name_is_written_in_one_place() -> None:
    assert len(REASONS) > 60
    found: dict[str, list[str]] = {}
    for module, file in modules_below(SOURCES).items():
        for each in written(file.read_text()):
            found.setdefault(each, []).append(module)
    assert {each: at for each, at in found.items() if len(at) > 1} == {}, (
        "import the constant (variables: heteroinfer_contract/names.py) or call the function of its home"
    )
    assert {each: found[each] for each in HOMES} == {each: [home] for each, home in HOMES.items()}


@pytest.mark.parametrize(
    ("text", "each"),
    [
        ('end = EpochEnd(reason="PodDeleted")', "PodDeleted"),
        ('count("InvalidSpec")', "InvalidSpec"),
        ('os.environ["OMP_PLACES"]', "OMP_PLACES"),
        ("code = -signal if signal < 0 else signal + 128", _EXIT_CODE),
        ("exit_code = 128 - code", _EXIT_CODE),
        ('f"{rate / 1e9:.0f} GB/s"', _RATE),
        ('f"reads {rate:.1f} GB/s of it"', _RATE),
        ('"%.1f GB/s" % rate', _RATE),
        ('"{:.0f} GB/s".format(rate)', _RATE),
        ('str(rate) + " GB/s"', _RATE),
        ('"FP8 is slow (0.5 GB/s)"', None),
        ('"""Reads 115 GB/s where OMP_PLACES is set."""', None),
        ("code = 128 * 2", None),
    ],
)
def test_recognizes_each_kind_of_name(text: str, each: str | None) -> None:
    assert list(written(text)) == ([each] if each else [])
