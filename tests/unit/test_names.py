"""One meaning a name: classes and modules of the product, and files and modules that text names."""

import ast
import functools
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.unit.product import ROOT, SOURCES, modules_below

SAME_IN_EACH_PACKAGE = {
    "adapter": "of the port in cluster.py: on Kubernetes, on this machine",
    "calibration": "of a machine: as a value, and measured",
    "cli": "a distribution's command line",
    "engine": "vLLM's: as users set it, and as it runs",
    "entry": "where a process begins",
    "errors": "of a package",
    "feed_forward": "the mode: as it is planned, and as it runs",
}
FOLDERS = ("charts", "docs", "examples", "operator", "tests", "worker_image")
OF_OTHERS = ("asyncio", "huggingface_hub", "kopf", "torch", "vllm")
"""Projects whose files are cited."""
NO_LONGER_THERE = {
    # docs/contributor/merged-test-files.md names their replacements
    "worker/test_serving.py", "worker/test_features.py", "worker/test_drain.py", "worker/test_death.py",
    "integration/test_control_plane.py", "e2e/test_node.py", "e2e/test_joined_node.py",
}  # fmt: skip
_PATH = re.compile(
    r"(?<![\w./:@{}$~*-])((?:\.\./)*(?:[\w-][\w.-]*/)+[\w.-]*[\w-]\.(?:py|md|ya?ml|toml|cpp|cu|h|sh))(?![\w/])"
)
_MODULE = re.compile(
    r"\b(?:heteroinfer_operator|heteroinfer_contract|vllm_heteroinfer|tests|charts)(?:\.[A-Za-z_]\w*)+"
)


_CAMEL_CASE = re.compile(r"_?[A-Z]\w*[a-z]\w*")
_DOCSTRING = re.compile(r'(?:\A|:\n) *r?"""(.*?)"""', re.S)
"""Of modules, classes and functions. To parse each file took 3 s."""


def normal(name: str) -> str:
    """Returns what two names have in common that differ in case and underscores only."""
    return name.replace("_", "").lower()


def kinds(module: str, text: str) -> Iterator[tuple[str, str]]:
    """Yields names of classes, what else is named like one, and what `as` names, each with what it is."""
    yield from renamed(text)
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.ClassDef(name=name):
                yield name, f"{module}.{name}"
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                if _CAMEL_CASE.fullmatch(name):
                    yield name, f"{module}.{name}"


def renamed(text: str) -> Iterator[tuple[str, str]]:
    """Yields what a module imports by a name of its own: this name, and what it is."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            of = getattr(node, "module", None) or ""
            yield from ((each.asname, f"{of}.{each.name}") for each in node.names if each.asname)


def several(named: Iterable[tuple[str, str]]) -> dict[str, set[str]]:
    """Returns the names that are several things."""
    found = defaultdict(set)
    for name, what in named:
        found[normal(name)].add(what)
    return {name: things for name, things in found.items() if len(things) > 1}


def test_class_names_are_unique() -> None:
    named = [
        each for module, file in modules_below(SOURCES).items() for each in kinds(module, file.read_text())
    ]
    assert len(named) > 300
    assert several(named) == {}, (
        "name one of them after what sets it apart, and import by the name that it has"
    )


@pytest.mark.parametrize(
    "text",
    [
        "class _Plan: pass",
        "class PLAN: pass",
        'Plan = namedtuple("Plan", "stages")',
        'Plan = StrEnum("Plan", "A B")',
        'Plan_ = TypedDict("Plan_", {})',
        'Plan = NewType("Plan", str)',
        "Plan: TypeAlias = tuple[str, ...]",
        "Plan = dict[str, str]",
        "from b import Draft as Plan",
        "import draft as plan",
    ],
)
def test_a_second_class_with_the_same_name_is_found(text: str) -> None:
    assert several([*kinds("a", "class Plan: pass"), *kinds("b", text)]).keys() == {"plan"}


def said_twice(modules: Iterable[str]) -> set[str]:
    """Returns the normal names of several modules or packages; a module that is its package's own may."""
    found = defaultdict(set)
    for module in modules:
        *packages, name = module.split(".")
        found[normal(name)].add((*packages, name) if packages[-1:] != [name] else tuple(packages))
    return {name for name, at in found.items() if len(at) > 1}


def test_module_names_are_unique_or_have_one_meaning() -> None:
    twice = said_twice(modules_below(SOURCES))
    same = set(map(normal, SAME_IN_EACH_PACKAGE))
    assert twice - same == set(), "rename one; if they are the same thing, say so in SAME_IN_EACH_PACKAGE"
    assert twice == same, "names that stand once need no reason"


def test_no_import_alias_is_the_name_of_another_module() -> None:
    modules = {normal(module.rpartition(".")[2]): module for module in modules_below(SOURCES)}
    by_another = [each for file in modules_below(SOURCES).values() for each in renamed(file.read_text())]
    assert len(by_another) > 10
    assert {name: what for name, what in by_another if modules.get(normal(name), what) != what} == {}


@pytest.mark.parametrize(
    ("module", "twice"),
    [
        ("a.measuring.kernels", {"kernels"}),
        ("a.measuring.bridge", {"bridge"}),
        ("a.plan", {"plan"}),
        ("a.brid_ge", {"bridge"}),
        ("a._plan", {"plan"}),
        ("a.bridge.bridge", set()),
        ("a.kernels.linear", set()),
    ],
)
def test_a_second_module_with_the_same_name_is_found(module: str, twice: set[str]) -> None:
    assert said_twice(["a", "a.kernels", "a.bridge", "a.bridge.slab", "b.plan", module]) == twice


@functools.cache
def text() -> list[tuple[Path, str]]:
    """Returns what is written for people: pages, and docstrings, each with its file."""
    return list(_text())


def _text() -> Iterator[tuple[Path, str]]:
    for file in (*ROOT.glob("*.md"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*"))):
        if file.suffix == ".md":
            yield file, file.read_text()
        elif file.suffix == ".py":
            for docstring in _DOCSTRING.findall(file.read_text()):
                yield file, docstring


def test_every_file_that_a_text_names_exists() -> None:
    """By its path from the root or the page, or by the end of its path, as `kube/rights.py`."""
    files = [path.relative_to(ROOT).as_posix() for folder in FOLDERS for path in (ROOT / folder).rglob("*.*")]
    ends = {"/".join(parts[i:]) for parts in (file.split("/") for file in files) for i in range(len(parts))}
    named = missing = 0
    wrong = []
    for file, words in text():
        for match in _PATH.finditer(words):
            name, named = match[1], named + 1
            if name.split("/")[0] in OF_OTHERS or name in NO_LONGER_THERE:
                missing += 1
            elif not (name in ends or (file.parent / name).exists() or (ROOT / name).exists()):
                wrong.append(f"{file.relative_to(ROOT)}: {name}")
    assert named - missing > 100
    assert wrong == []


def test_every_module_that_a_text_names_exists() -> None:
    wrong = []
    named = 0
    for file, words in text():
        for match in _MODULE.finditer(words):
            named += 1
            if not is_there(match[0].split(".")):
                wrong.append(f"{file.relative_to(ROOT)}: {match[0]}")
    assert named > 30
    assert wrong == []


def is_there(parts: list[str]) -> bool:
    """Returns whether the parts are a module, a package, or what a module's text names after it."""
    for base in (ROOT, *SOURCES):
        path = base
        for i, part in enumerate(parts):
            if (path / part).is_dir():
                path = path / part
                continue
            module = path / f"{part}.py"
            if module.is_file():
                return all(name in module.read_text() for name in parts[i + 1 :])
            init = path / "__init__.py"
            if i and init.is_file() and part in init.read_text():
                return True
            break
        else:
            return True
    return False


def test_the_invariants_name_existing_tests() -> None:
    page = (ROOT / "docs/contributor/invariants.md").read_text()
    named = set(re.findall(r"`(\w+_\w+)`", page))
    assert len(named) > 70
    there = {
        found
        for file in (ROOT / "tests").rglob("test_*.py")
        for found in re.findall(r"^ *(?:async )?def (\w+)", file.read_text(), re.M)
    }
    assert named - there == set()
