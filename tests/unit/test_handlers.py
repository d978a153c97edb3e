"""No `except` of the product stands behind one that takes its errors already."""

import ast
import builtins
from collections.abc import Iterator

from heteroinfer_contract import errors as contract_errors
from heteroinfer_operator import errors as operator_errors
from tests.unit.product import SOURCES, modules_below

KNOWN = {
    name: found
    for module in (builtins, contract_errors, operator_errors)
    for name, found in vars(module).items()
    if isinstance(found, type) and issubclass(found, BaseException)
}
"""Classes of errors, by name; those of other modules are not looked at."""


def _taken(handler: ast.ExceptHandler) -> list[type[BaseException]]:
    """Returns the known classes that a handler takes."""
    if handler.type is None:
        return [BaseException]
    items = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    words = (ast.unparse(item).rpartition(".")[2] for item in items)
    return [KNOWN[word] for word in words if word in KNOWN]


def _never_reached(source: str) -> Iterator[str]:
    """Finds each class that a handler names and an earlier one of the same `try` takes."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Try | ast.TryStar):
            continue
        before: tuple[type[BaseException], ...] = ()
        for handler in node.handlers:
            taken = _taken(handler)
            yield from (f"{handler.lineno}: {kind.__name__}" for kind in taken if issubclass(kind, before))
            before += tuple(taken)


def test_the_rule_finds_each_unreachable_handler() -> None:
    source = (
        "try: pass\nexcept (ValueError, KeyError): pass\nexcept (CalibrationError, ContractError): pass\n"
        "try: pass\nexcept ContractError: pass\nexcept ValueError: pass\n"
        "try: pass\nexcept OSError: pass\nexcept errors.SpecError: pass\nexcept builtins.TimeoutError: pass\n"
    )
    assert list(_never_reached(source)) == ["3: ContractError", "10: TimeoutError"]


def test_every_handler_can_be_reached() -> None:
    found = {
        name: lines
        for name, file in modules_below(SOURCES).items()
        if (lines := list(_never_reached(file.read_text())))
    }
    assert found == {}, "let the handler of the narrower class come first"
