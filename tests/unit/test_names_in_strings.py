"""Names of our code in strings of the tests: in scripts for other processes, and of modules and tests.

mypy reads no strings, so a name that has changed would be found only when its test runs.
"""

import ast
import functools
import re
import symtable
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.planted_faults.faults import FAULTS, PlantedFault
from tests.unit.product import ROOT, SOURCES, above, modules_below

MODULES = modules_below(SOURCES) | {
    f"tests.{name}": file for name, file in modules_below([ROOT / "tests"]).items()
}
PACKAGES = {name for module in MODULES for name in above(module)}
OURS = {module.partition(".")[0] for module in MODULES}
RULES = {
    Path(__file__).name,
    *(f"test_{rule}.py" for rule in ("commands", "import_contracts", "names", "pure")),
}
"""Tests of rules: the code in their strings is made up."""
_DOTTED = re.compile(rf"(?:{'|'.join(sorted(OURS))})(?:\.[A-Za-z_]\w*)+")


def is_ours(module: str) -> bool:
    return module.partition(".")[0] in OURS


@functools.cache
def names_of(module: str) -> set[str]:
    """Returns what a module defines or imports, and its submodules."""
    below = {name.rpartition(".")[2] for name in PACKAGES if name.rpartition(".")[0] == module}
    if module not in MODULES:
        return below
    symbols = symtable.symtable(MODULES[module].read_text(), module, "exec").get_symbols()
    return below | {each.get_name() for each in symbols if each.is_assigned() or each.is_imported()}


def missing(dotted: str) -> bool:
    """Returns whether neither a module nor a member of a module has this name."""
    module = next(
        name for name in sorted(above(dotted), key=len, reverse=True) if name in PACKAGES or "." not in name
    )
    rest = dotted.removeprefix(module).strip(".")
    return bool(rest) and rest.partition(".")[0] not in names_of(module)


def wrong_names(source: str) -> set[str]:
    """Returns the names of our code that a script uses and that do not exist."""
    used: set[str] = set()
    modules: dict[str, str] = {}
    tree = ast.parse(textwrap.dedent(source))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and is_ours(node.module or ""):
            used |= {f"{node.module}.{each.name}" for each in node.names}
            modules |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
        elif isinstance(node, ast.Import):
            used |= {each.name for each in node.names if is_ours(each.name)}
            modules |= {each.asname: each.name for each in node.names if each.asname and is_ours(each.name)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module = modules.get(node.value.id, "")
            used |= {f"{module}.{node.attr}"} if module in PACKAGES else set()
    return {name for name in used if missing(name)}


def strings(file: Path) -> Iterator[str]:
    """Yields the strings of a file; `{}` stands for each value in an f-string."""
    inside = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.JoinedStr):
            inside |= set(map(id, node.values))
            parts = (each.value if isinstance(each, ast.Constant) else "{}" for each in node.values)
            yield "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            yield node.value


def is_script(text: str) -> bool:
    if not re.search(r"\bimport\b", text) or not any(name in text for name in OURS):
        return False
    try:
        ast.parse(textwrap.dedent(text))
    except SyntaxError:
        return False
    return True


def test_strings_name_modules_and_members_that_exist() -> None:
    scripts, dotted, wrong = 0, 0, {}
    for file in sorted((ROOT / "tests").rglob("*.py")):
        for text in () if file.name in RULES else strings(file):
            found = set()
            if is_script(text):
                scripts += 1
                found = wrong_names(text)
            elif _DOTTED.fullmatch(text):
                dotted += 1
                found = {text} if missing(text) else set()
            if found:
                wrong[str(file.relative_to(ROOT))] = found
    assert wrong == {}
    assert scripts > 20
    assert dotted > 20


@pytest.mark.parametrize(
    ("source", "wrong"),
    [
        ("from tests.unit.product import ROOT, below", {"tests.unit.product.below"}),
        ("from tests.unit import product as p\np.ROOT\np.below", {"tests.unit.product.below"}),
        ("import tests.unit.produce", {"tests.unit.produce"}),
        ("from tests.unit.product import ROOT\nROOT.anything", set()),
    ],
)
def test_a_name_that_does_not_exist_is_found(source: str, wrong: set[str]) -> None:
    assert is_script(source)
    assert wrong_names(source) == wrong


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_finds_its_text_and_its_tests(fault: PlantedFault) -> None:
    assert (ROOT / fault.path).read_text().count(fault.right) == 1
    paths, words = list(fault.tests), {"test_"}
    if "-k" in fault.tests:
        *paths, _, expression = fault.tests
        words = set(re.findall(r"\w+", expression)) - {"and", "or", "not"}
    files = [ROOT / path for path in paths]
    sources = [each for file in files for each in (file.rglob("test_*.py") if file.is_dir() else [file])]
    names = [name for each in sources for name in re.findall(r"def (test_\w+)", each.read_text())]
    assert any(word in name for name in names for word in words)
