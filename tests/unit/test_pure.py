"""A module that says Pure imports and calls nothing but what is pure, and so does all that it imports.

Its docstring says so (`Pure.`, `pure: ...`). A package that says so has pure modules alone.
"""

import ast
import re
import sys
from collections.abc import Iterable, Iterator, Set
from pathlib import Path, PurePath

import pytest

from tests.unit.product import SOURCES, above, modules_below

_SAYS_PURE = re.compile(r'\A"""(?:(?!""").)*\bpure[.:;]', re.S | re.I)
VALUES = frozenset(
    {
        "base64", "bisect", "collections", "collections.abc", "dataclasses", "decimal", "difflib", "enum",
        "fractions", "functools", "hashlib", "hmac", "ipaddress", "itertools", "json", "math", "re",
        "statistics", "struct", "types", "typing", "urllib.parse", "zlib",
        "datetime.UTC", "datetime.datetime", "datetime.timedelta", "pathlib.PurePosixPath", "signal.Signals",
    }
)  # fmt: skip
"""Of the standard library, all that pure modules may import: modules, and names of some with effects, too."""
_PYDANTIC = frozenset(
    {
        "pydantic.AfterValidator", "pydantic.BaseModel", "pydantic.BeforeValidator", "pydantic.ConfigDict",
        "pydantic.Field", "pydantic.GetJsonSchemaHandler", "pydantic.PlainSerializer",
        "pydantic.ValidationError", "pydantic.ValidationInfo", "pydantic.WithJsonSchema",
        "pydantic.alias_generators",
        "pydantic.json_schema", "pydantic.model_validator", "pydantic_core.CoreSchema",
        "pydantic_core.PydanticCustomError",
    }
)  # fmt: skip
"""It has types, too, that ask a clock or a disk."""
LIBRARIES = {
    "heteroinfer_operator.api": _PYDANTIC,
    "heteroinfer_operator.api.crd": frozenset({"yaml"}),
    "heteroinfer_operator.fleet.lines": frozenset({"pydantic.alias_generators"}),
}
"""Of others, what a module may import, or each of a package."""
BUILTINS = frozenset(
    {
        "__builtins__", "__import__", "breakpoint", "compile", "delattr", "eval", "exec", "globals", "hash",
        "id", "input", "locals", "open", "print", "setattr", "vars",
    }
)  # fmt: skip
"""That no pure module names; the `hash` of a text and an `id` are others in each process."""
OF_VALUES = frozenset({"copy", "group", "info", "replace"})
"""Methods of paths that texts, matches and dictionaries have, too."""
METHODS = {*dir(Path)} - {*dir(PurePath)} - OF_VALUES | {"now", "today", "utcnow"}
"""Of paths and clocks, which an argument may be: refused where they are called."""
ARGUMENTS = {"astimezone": 1, "fromtimestamp": 2}
"""With fewer, these read the zone of the machine."""
EMPTY = frozenset({"bytearray", "dict", "list", "set"})
STATE = frozenset({"Counter", "OrderedDict", "count", "cycle", "defaultdict", "deque", "iter"})
"""What a module or a class keeps and can only change; of EMPTY without arguments, as `[]` and `{}`."""


MODULES = {name: file.read_text() for name, file in modules_below(SOURCES).items()}
PURE = frozenset(name for name, text in MODULES.items() if _SAYS_PURE.match(text))


def effects(module: str, text: str) -> Iterator[str]:
    """Yields what a module imports, calls or keeps that a pure one may not."""
    allowed = VALUES | PURE | frozenset().union(*(LIBRARIES.get(name, ()) for name in above(module)))
    tree = ast.parse(text)
    for node in ast.walk(tree):
        yield from _imports(node, allowed)
        match node:
            case ast.Name(id=name, ctx=ast.Load()) if name in BUILTINS:
                yield name
            case ast.Attribute(value=ast.Name(id="datetime"), attr="now" | "today" | "utcnow" as name):
                yield name
            case ast.Attribute(value=ast.Name(id=owner), attr=name) if owner in VALUES:
                yield from (each for each in (f"{owner}.{name}",) if _is_another(each))
            case ast.Call(func=ast.Name(id="getattr"), args=[ast.Name(id=owner), *_]):
                yield from (f"getattr({owner}, ...)" for _ in {owner} & _imported(tree))
            case ast.Call(func=ast.Attribute(attr=name)):
                yield from (f"{name}()" for _ in {name} & METHODS)
                if len([*node.args, *node.keywords]) < ARGUMENTS.get(name, 0):
                    yield f"{name}() without a zone"
            case ast.Global(names=names):
                yield from names
            case ast.Module(body=body) | ast.ClassDef(body=body):
                yield from (f"state: {ast.unparse(each)}" for each in body if _is_state(each))


def _imports(node: ast.AST, allowed: Set[str]) -> Iterator[str]:
    match node:
        case ast.Import(names=names):
            yield from {_said(name) for name in names} - allowed
        case ast.ImportFrom(module=origin, names=names, level=level):
            imported = {f"{'.' * level}{origin or ''}.{_said(name)}" for name in names}
            is_whole = level == 0 and origin in allowed
            yield from filter(_is_another, imported) if is_whole else imported - allowed


def _imported(tree: ast.Module) -> set[str]:
    imports = (node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom))
    return {each.asname or each.name for node in imports for each in node.names}


def _is_state(node: ast.stmt) -> bool:
    """Returns whether a module or a class keeps here what can only be there to be changed."""
    match node:
        case ast.Assign(value=value) | ast.AnnAssign(value=value):
            pass
        case _:
            return False
    match value:
        case ast.List(elts=[]) | ast.Dict(keys=[]):
            return True
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=args, keywords=keywords):
            return name in STATE or (name in EMPTY and not args and not keywords)
    return False


def _said(name: ast.alias) -> str:
    """Returns what is imported; by another name it is no module of VALUES, and none of its names."""
    return f"{name.name} as {name.asname}" if name.asname not in (None, name.name) else name.name


def _is_another(name: str) -> bool:
    """Returns whether this is another module that a pure one happens to have, as `json.codecs`."""
    return name not in VALUES and name.split(maxsplit=1)[0].rpartition(".")[2] in sys.stdlib_module_names


def impure_in_pure_packages(modules: Iterable[str], pure: Set[str]) -> set[str]:
    """Returns the modules that don't say that they are pure, of packages that do."""
    return {name for name in modules if name not in pure and above(name) & pure}


def test_modules_that_are_declared_pure_are_pure() -> None:
    assert {f"heteroinfer_operator.{name}" for name in ("api", "manifests", "planning", "reconcile")} <= PURE
    found = {name: sorted(set(effects(name, MODULES[name]))) for name in sorted(PURE)}
    assert {name: each for name, each in found.items() if each} == {}, (
        "hand it in as an argument, or don't say Pure; what has no effect all the same is to be added: a "
        "module or name to VALUES or, of other projects, LIBRARIES; a method of values, too, to OF_VALUES"
    )


def test_a_pure_package_has_only_pure_modules() -> None:
    assert impure_in_pure_packages(MODULES, PURE) == set()
    assert impure_in_pure_packages(["a", "a.b", "a.c.d", "e"], {"a", "a.b"}) == {"a.c.d"}


@pytest.mark.parametrize(
    ("text", "pure"),
    [
        ('"""Decides. Pure."""', True),
        ('"""Decides.\n\nStdlib only; pure: constants.\n"""', True),
        ('"""Decides. PURE: a plan in, variables out.\n"""', True),
        ('"""Pure but for one function.\n"""', False),
        ('"""Decides."""\n\n"""Pure."""', False),
    ],
)
def test_a_docstring_declares_a_module_pure(text: str, pure: bool) -> None:
    assert bool(_SAYS_PURE.match(text)) is pure


@pytest.mark.parametrize(
    "text",
    [
        "import time",
        "from pydantic import PastDatetime",
        "from pydantic import FutureDate",
        "from pydantic import FilePath",
        "from pydantic import DirectoryPath, NewPath",
        "import pydantic",
        "start.astimezone()",
        "datetime.fromtimestamp(0)",
        "path.resolve()",
        "path.rename(other)",
        "path.is_symlink()",
        "path.rmdir()",
        "path.chmod(0o600)",
        "key = id(node)",
        "from datetime import datetime\ngetattr(datetime, 'now')()",
        "vars(datetime)['now']",
        "_NUMBERS = itertools.count()",
        "_TURNS = cycle('ab')",
        "_SEEN: list[str] = []",
        "_SEEN: Final = {}",
        "_SEEN = set()",
        "_SEEN = dict()",
        "_SEEN = list()",
        "_SEEN = defaultdict(list)",
        "class Seen:\n    names: ClassVar[set[str]] = set()",
        "import os",
        "from os import environ",
        "import random",
        "import secrets",
        "from uuid import uuid4",
        "import subprocess",
        "import logging",
        "import importlib",
        "import yaml",
        "import torch",
        "import requests",
        "from pydantic import BaseModel",
        "import datetime",
        "from datetime import date",
        "from datetime import datetime as dt",
        "from pathlib import Path",
        "import enum as e",
        "from typing import sys",
        "from typing import sys as s",
        "import json.tool",
        "from json.tool import main",
        "from . import conditions",
        "from heteroinfer_contract import cgroups",
        "from heteroinfer_contract.model_files import read_profile",
        "import heteroinfer_contract.report_access",
        "from heteroinfer_operator.kube.server import Server",
        "def late():\n    import socket",
        "if TYPE_CHECKING:\n    import asyncio",
        "now = datetime.now(UTC)",
        "clock = datetime.now",
        "clock = datetime.utcnow",
        "now = context.now.now()",
        "datetime.utcnow()",
        "datetime.today()",
        "open('/etc/hosts')",
        "print('done')",
        "input()",
        "__import__('os')",
        "eval('1')",
        "hash('text')",
        "path.read_text()",
        "path.exists()",
        "path.open()",
        "json.codecs.open('/etc/hosts')",
        "typing.sys.stdout",
        "def count():\n    global seen",
    ],
)
def test_effects_in_a_pure_module_are_found(text: str) -> None:
    assert "heteroinfer_operator.reconcile.conditions" in PURE
    assert list(effects("heteroinfer_operator.reconcile.conditions", text)) != []


@pytest.mark.parametrize(
    "text",
    [
        "import collections.abc\nimport json\njson.loads('1')",
        "from datetime import UTC, datetime, timedelta\ndatetime.fromisoformat('')\nlate = context.now - due",
        "from heteroinfer_contract import names",
        "from heteroinfer_operator.api import Condition",
        "late.astimezone(UTC)",
        "getattr(before, 'ready')",
        "spec.resolve or spec.stat",
        "text.replace('a', 'b')",
        "def seen():\n    found = []\n    return found",
        "_ZERO = {'a': 0}\n_ALL = dict(a=0)",
    ],
)
def test_code_without_effects_is_allowed_in_a_pure_module(text: str) -> None:
    assert list(effects("heteroinfer_operator.reconcile.conditions", text)) == []
