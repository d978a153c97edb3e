"""Each contract of import-linter holds, and fails for one wrong import or for a module without a layer.

Beside them: that they see every module and every import, what needs no more than the standard library, and
what packages that are in no layer import.
"""

import ast
import copy
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import grimp
import pytest
from importlinter.application import use_cases
from importlinter.configuration import configure
from importlinter.contracts.acyclic_siblings import AcyclicSiblingsContract
from importlinter.contracts.layers import LayersContract

from tests.unit.product import ROOT, SOURCES, above, modules_below

ACROSS = "operator -> contract <- worker, never across"
OPERATOR = "layers of the operator"
WORKER = "layers of the worker: a package for each process, and what several of them share below"
CIRCLES = "no circle between packages, at any depth"

HARD = {"name", "type", "layers", "containers", "exhaustive", "ancestors"}
"""Options of contracts that let nothing through."""
TYPES = {kind.type_name: kind for kind in (AcyclicSiblingsContract, LayersContract)}
configure()
OPTIONS = use_cases.read_user_options(str(ROOT / "pyproject.toml"))
CONTRACTS = {options["name"]: options for options in OPTIONS.contracts_options}


@pytest.fixture(scope="module")
def imports() -> grimp.ImportGraph:
    return grimp.build_graph(
        *OPTIONS.session_options["root_packages"], include_external_packages=True, cache_dir=None
    )


def holds(name: str, imports: grimp.ImportGraph) -> bool:
    """Returns whether a contract of pyproject.toml holds for these imports."""
    options: dict[str, Any] = CONTRACTS[name]
    contract = TYPES[options["type"]](
        name=name, session_options=OPTIONS.session_options, contract_options=options
    )
    return contract.check(copy.deepcopy(imports), verbose=False).kept


def with_import(imports: grimp.ImportGraph, importer: str, imported: str) -> grimp.ImportGraph:
    """Returns the imports and one more."""
    more = copy.deepcopy(imports)
    if imported not in more.modules:
        more.add_module(imported, is_squashed=True)
    more.add_import(importer=importer, imported=imported)
    return more


@pytest.mark.parametrize("name", CONTRACTS)
def test_each_import_contract_holds(imports: grimp.ImportGraph, name: str) -> None:
    assert holds(name, imports)


WRONG = (
    (ACROSS, "heteroinfer_operator.local.process", "vllm_heteroinfer.pod.addresses"),
    (ACROSS, "vllm_heteroinfer.launch.supervisor", "heteroinfer_operator.quantity"),
    (ACROSS, "heteroinfer_contract.plan", "heteroinfer_operator.api"),
    (ACROSS, "heteroinfer_contract.names", "vllm_heteroinfer.pod.channel"),
    (OPERATOR, "heteroinfer_operator.reconcile.one_group.decide", "heteroinfer_operator.kube.server"),
    (OPERATOR, "heteroinfer_operator.planning.planner", "heteroinfer_operator.manifests.service"),
    (OPERATOR, "heteroinfer_operator.kube.adapter", "heteroinfer_operator.local.adapter"),
    (OPERATOR, "heteroinfer_operator.api.spec", "heteroinfer_operator.reconcile.options"),
    (WORKER, "vllm_heteroinfer.pod.channel", "vllm_heteroinfer.group.queues"),
    (WORKER, "vllm_heteroinfer.group.rendezvous", "vllm_heteroinfer.rank.context"),
    (WORKER, "vllm_heteroinfer.distributed.transport", "vllm_heteroinfer.engine.executor"),
    (CIRCLES, "vllm_heteroinfer.group.rendezvous", "vllm_heteroinfer.rank.context"),
    (CIRCLES, "heteroinfer_contract.plan", "heteroinfer_contract.group_report"),
    (CIRCLES, "heteroinfer_operator.cluster", "heteroinfer_operator.kube.server"),
    (CIRCLES, "heteroinfer_operator.reconcile.epoch_end", "heteroinfer_operator.reconcile.one_group.decide"),
    (CIRCLES, "heteroinfer_operator.api.base", "heteroinfer_operator.api.spec"),
)


@pytest.mark.parametrize(("name", "importer", "imported"), WRONG)
def test_each_import_contract_fails_for_a_wrong_import(
    imports: grimp.ImportGraph, name: str, importer: str, imported: str
) -> None:
    assert {importer, imported} <= imports.modules
    assert not holds(name, with_import(imports, importer, imported))


@pytest.mark.parametrize(
    ("name", "package"), [(OPERATOR, "heteroinfer_operator"), (WORKER, "vllm_heteroinfer")]
)
def test_a_module_without_a_layer_is_refused(imports: grimp.ImportGraph, name: str, package: str) -> None:
    wrong = copy.deepcopy(imports)
    wrong.add_module(f"{package}.new")
    assert not holds(name, wrong)


def test_every_contract_is_tried() -> None:
    assert {name for name, _, _ in WRONG} == CONTRACTS.keys()


def test_no_import_contract_has_exceptions() -> None:
    softened = {name: options.keys() - HARD for name, options in CONTRACTS.items() if options.keys() - HARD}
    assert softened == {}, "mend the import, not the contract: without ignore_imports, depth or such"
    assert OPTIONS.session_options.keys() == {"root_packages", "include_external_packages"}


def unseen(sources: Iterable[Path], imports: grimp.ImportGraph) -> set[str]:
    """Returns the modules that no contract sees: grimp takes a folder only with `__init__.py`."""
    return modules_below(sources).keys() - imports.modules


def test_the_contracts_see_every_module(imports: grimp.ImportGraph) -> None:
    assert len(modules_below(SOURCES)) > 300
    assert unseen(SOURCES, imports) == set()


@pytest.mark.parametrize(
    ("file", "module"),
    [
        ("seen/folder/module.py", "seen.folder.module"),
        ("seen/folder/inner/__init__.py", "seen.folder.inner"),
        ("root/__init__.py", "root"),
        ("loose.py", "loose"),
    ],
)
def test_a_module_without_an_import_contract_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, module: str
) -> None:
    for each in ("seen/__init__.py", "seen/module.py", file):
        (tmp_path / each).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / each).touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert unseen([tmp_path], grimp.build_graph("seen", cache_dir=None)) == {module}


_SAYS_STDLIB = re.compile(r'\A"""(?:(?!""").)*\bstdlib (?:and the contract )?only\b', re.S | re.I)
STDLIB = sys.stdlib_module_names - {"importlib", "pkgutil", "runpy"}
"""Less what imports by a name that no graph sees."""
MORE = {
    ("vllm_heteroinfer.launch.cli", "vllm_heteroinfer.fetch.fetch_pod"): "`heteroinfer-worker fetch`",
    ("vllm_heteroinfer.launch.cli", "vllm_heteroinfer.fetch.job"): "`heteroinfer-worker fetch`",
    ("vllm_heteroinfer.pod.forking", "runpy"): "a fork becomes what it was asked for",
    ("vllm_heteroinfer.rank.preload", "importlib"): "where a package is, which is not imported",
    ("vllm_heteroinfer.calibration.hardware", "importlib"): "which versions are installed",
}
"""What is imported all the same, and for what: where nothing is supervised, or nothing imported by it."""


def not_of_stdlib(imports: grimp.ImportGraph) -> dict[str, set[str]]:
    """Returns what modules need beside the standard library that say `Stdlib only`, or whose package does.

    Through modules of ours, too, and where it is imported in a function.
    """
    less = copy.deepcopy(imports)
    for importer, imported in MORE:
        less.remove_import(importer=importer, imported=imported)
    modules = modules_below(SOURCES)
    says = {name for name, file in modules.items() if _SAYS_STDLIB.match(file.read_text())}
    assert {"heteroinfer_contract", "vllm_heteroinfer.launch", "vllm_heteroinfer.pod"} <= says
    needs = {
        name: less.find_upstream_modules(name) - modules.keys() - STDLIB
        for name in modules
        if above(name) & says
    }
    return {name: others for name, others in needs.items() if others}


def test_modules_declared_stdlib_only_import_nothing_else(imports: grimp.ImportGraph) -> None:
    assert not_of_stdlib(imports) == {}
    assert [
        pair for pair in MORE if not imports.direct_import_exists(importer=pair[0], imported=pair[1])
    ] == []


@pytest.mark.parametrize(
    ("importer", "imported"),
    [
        ("heteroinfer_contract.plan", "pydantic"),
        ("heteroinfer_contract.model.config", "importlib"),
        ("vllm_heteroinfer.launch.supervisor", "torch"),
        ("vllm_heteroinfer.launch.supervisor", "psutil"),
        ("vllm_heteroinfer.launch.cli", "vllm_heteroinfer.group.rendezvous"),
        ("vllm_heteroinfer.pod.channel", "vllm"),
        ("vllm_heteroinfer.pod.channel", "numpy"),
        ("vllm_heteroinfer.pod.addresses", "transformers"),
        ("vllm_heteroinfer.calibration.command", "torch"),
    ],
)
def test_an_import_outside_the_standard_library_is_refused(
    imports: grimp.ImportGraph, importer: str, imported: str
) -> None:
    assert importer in not_of_stdlib(with_import(imports, importer, imported))


BY_NAME = {
    ("heteroinfer_operator.cli", "import_module"): "the module of a command, once it is asked for",
    ("vllm_heteroinfer.patches.replacing", "import_module"): "what a patch replaces is data",
    ("vllm_heteroinfer.pod.forking", "runpy"): "a fork becomes what it was asked for",
    ("vllm_heteroinfer.rank.imports", "import_module"): "what every process of a pod imports is data",
}
"""Where the product imports by a name, which no contract sees, and for what."""
_LOADING = {"importlib", "importlib.util", "sys"}
_IMPORTERS = {"builtins", "imp", "pkgutil", "pydoc", "runpy", "zipimport"}
_IMPORTING = {
    "__builtins__", "__import__", "eval", "exec", "exec_module", "import_module", "load_module",
    "module_from_spec", "resolve_obj_by_qualname", "spec_from_file_location",
}  # fmt: skip


def imports_by_name(text: str) -> Iterator[str]:
    """Yields what a module has that imports by a name."""
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Import(names=names):
                yield from (each.name for each in names if each.name in _IMPORTERS)
                yield from (f"{each.name} as" for each in names if each.asname and each.name in _LOADING)
            case ast.ImportFrom(module=origin, names=names, level=0):
                yield from {origin or ""} & _IMPORTERS
                yield from {each.name for each in names} & _IMPORTING
                if origin == "sys":
                    yield from (each.name for each in names if each.name == "modules")
            case ast.Attribute(value=ast.Name(id="sys"), attr="modules" as name):
                yield name
            case ast.Call(func=ast.Name(id="getattr" | "vars"), args=[ast.Name(id=owner), *_]) if (
                owner in _LOADING
            ):
                yield f"getattr({owner}, ...)"
            case ast.Attribute(attr=name) if name in _IMPORTING - {"eval"}:  # a model's eval() is none
                yield name
            case ast.Name(id=name) | ast.Constant(value=str(name)) if name in _IMPORTING:
                yield name


def test_no_module_imports_by_a_name() -> None:
    found = {
        (module, each)
        for module, file in modules_below(SOURCES).items()
        for each in imports_by_name(file.read_text())
    }
    assert found - BY_NAME.keys() == set(), "import it by a statement, or give the reason in BY_NAME"
    assert BY_NAME.keys() - found == set(), "no longer there"


@pytest.mark.parametrize(
    "text",
    [
        'importlib.import_module("vllm")',
        "from importlib import import_module",
        "from importlib import import_module as load",
        "import importlib as i",
        'getattr(importlib, "import_" + "module")',
        'getattr(sys, "modules")',
        'vars(sys)["modules"]',
        "import pkgutil",
        "from pkgutil import resolve_name",
        "from runpy import run_path",
        '__import__("vllm")',
        "import builtins",
        'sys.modules["heteroinfer_operator.api"]',
        "from sys import modules",
        "import sys as s",
        "importlib.util.module_from_spec(spec)",
        'exec("import vllm")',
    ],
)
def test_an_import_by_name_is_found(text: str) -> None:
    assert list(imports_by_name(text)) != []


IN_NO_LAYER = {
    "heteroinfer_contract": set[str](),
    "heteroinfer_operator": set[str](),
    "vllm_heteroinfer": {"heteroinfer_contract.names", "os"},
}
"""What the packages themselves import, whose modules the layers hold."""


def imported_by_roots(imports: grimp.ImportGraph) -> dict[str, set[str]]:
    return {root: imports.find_modules_directly_imported_by(root) for root in IN_NO_LAYER}


def test_root_packages_import_only_the_recorded_modules(imports: grimp.ImportGraph) -> None:
    assert set(OPTIONS.session_options["root_packages"]) == IN_NO_LAYER.keys()
    found = imported_by_roots(imports)
    for root, file in ((root, modules_below(SOURCES)[root].relative_to(ROOT)) for root in IN_NO_LAYER):
        assert found[root] == IN_NO_LAYER[root], (
            f"{file} is in no layer: import in a module below; what it needs all the same is in IN_NO_LAYER"
        )


@pytest.mark.parametrize(
    ("root", "imported"),
    [
        ("heteroinfer_operator", "heteroinfer_operator.kube.server"),
        ("vllm_heteroinfer", "vllm"),
        ("heteroinfer_contract", "heteroinfer_contract.plan"),
    ],
)
def test_an_unrecorded_import_of_a_root_package_is_refused(
    imports: grimp.ImportGraph, root: str, imported: str
) -> None:
    assert imported_by_roots(with_import(imports, root, imported)) != IN_NO_LAYER
