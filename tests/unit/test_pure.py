"""A module that says Pure imports and calls nothing but what is pure, and so does all that it imports.

Its docstring says so (`Pure.`, `pure: ...`). A package that says so has pure modules alone.
"""

import ast
import re
import sys
from collections.abc import Iterable, Iterator, Set

import pytest

from tests.unit.product import SOURCES, above, modules_below

_SAYS_PURE = re.compile(r'\A"""(?:(?!""").)*\bpure[.:;]', re.S | re.I)
VALUES = frozenset(
    {
        "base64", "bisect", "collections", "collections.abc", "dataclasses", "decimal", "enum", "fractions",
        "functools", "hashlib", "hmac", "itertools", "json", "math", "re", "struct", "types", "typing",
        "urllib.parse", "zlib",
        "datetime.UTC", "datetime.datetime", "datetime.timedelta", "pathlib.PurePosixPath", "signal.Signals",
    }
)  # fmt: skip
"""Of the standard library, all that pure modules may import: modules, and names of some with effects, too."""
LIBRARIES = {
    "heteroinfer_operator.api": frozenset(
        {"pydantic", "pydantic.alias_generators", "pydantic.json_schema", "pydantic_core"}
    ),
    "heteroinfer_operator.crd": frozenset({"yaml"}),
    "heteroinfer_operator.fleet.lines": frozenset({"pydantic.alias_generators"}),
}
"""Of others, what a module may import, or each of a package."""
BUILTINS = frozenset(
    {"__builtins__", "__import__", "breakpoint", "compile", "eval", "exec", "hash", "input", "open", "print"}
)
"""That no pure module names; the `hash` of a text is another in each process."""
METHODS = frozenset(
    {
        "exists", "glob", "is_dir", "is_file", "iterdir", "mkdir", "open", "read_bytes", "read_text", "rglob",
        "stat", "today", "touch", "unlink", "utcnow", "write_bytes", "write_text",
    }
)  # fmt: skip
"""Of paths and clocks, which an argument may be."""


MODULES = {name: file.read_text() for name, file in modules_below(SOURCES).items()}
PURE = frozenset(name for name, text in MODULES.items() if _SAYS_PURE.match(text))


def effects(module: str, text: str) -> Iterator[str]:
    """Yields what a module imports or calls that a pure one may not."""
    allowed = VALUES | PURE | frozenset().union(*(LIBRARIES.get(name, ()) for name in above(module)))
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Import(names=names):
                yield from {_said(name) for name in names} - allowed
            case ast.ImportFrom(module=origin, names=names, level=level):
                imported = {f"{'.' * level}{origin or ''}.{_said(name)}" for name in names}
                is_whole = level == 0 and origin in allowed
                yield from filter(_is_another, imported) if is_whole else imported - allowed
            case ast.Name(id=name, ctx=ast.Load()) if name in BUILTINS:
                yield name
            case ast.Attribute(value=ast.Name(id="datetime"), attr="now" as name):
                yield name
            case ast.Call(func=ast.Attribute(attr="now" as name)):
                yield name
            case ast.Attribute(attr=name) if name in METHODS:
                yield name
            case ast.Attribute(value=ast.Name(id=owner), attr=name) if owner in VALUES:
                yield from (each for each in (f"{owner}.{name}",) if _is_another(each))
            case ast.Global(names=names):
                yield from names


def _said(name: ast.alias) -> str:
    """Returns what is imported; by another name it is no module of VALUES, and none of its names."""
    return f"{name.name} as {name.asname}" if name.asname not in (None, name.name) else name.name


def _is_another(name: str) -> bool:
    """Returns whether this is another module that a pure one happens to have, as `json.codecs`."""
    return name not in VALUES and name.split(maxsplit=1)[0].rpartition(".")[2] in sys.stdlib_module_names


def impure_in_pure_packages(modules: Iterable[str], pure: Set[str]) -> set[str]:
    """Returns the modules that don't say that they are pure, of packages that do."""
    return {name for name in modules if name not in pure and above(name) & pure}


def test_what_says_pure_is_pure() -> None:
    assert {f"heteroinfer_operator.{name}" for name in ("api", "manifests", "planning", "reconcile")} <= PURE
    found = {name: sorted(set(effects(name, MODULES[name]))) for name in sorted(PURE)}
    assert {name: each for name, each in found.items() if each} == {}, (
        "only VALUES, and what says Pure itself"
    )


def test_a_pure_package_has_pure_modules_alone() -> None:
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
def test_a_docstring_says_it(text: str, pure: bool) -> None:
    assert bool(_SAYS_PURE.match(text)) is pure


@pytest.mark.parametrize(
    "text",
    [
        "import time",
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
        "import heteroinfer_contract.fresh_keys",
        "from heteroinfer_operator.kube.server import Server",
        "def late():\n    import socket",
        "if TYPE_CHECKING:\n    import asyncio",
        "now = datetime.now(UTC)",
        "clock = datetime.now",
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
def test_what_a_pure_module_may_not_do(text: str) -> None:
    assert "heteroinfer_operator.reconcile.conditions" in PURE
    assert list(effects("heteroinfer_operator.reconcile.conditions", text)) != []


@pytest.mark.parametrize(
    "text",
    [
        "import collections.abc\nimport json\njson.loads('1')",
        "from datetime import UTC, datetime, timedelta\ndatetime.fromisoformat('')\nlate = context.now - due",
        "from heteroinfer_contract import names",
        "from heteroinfer_operator.api import Condition",
    ],
)
def test_what_a_pure_module_may_do(text: str) -> None:
    assert list(effects("heteroinfer_operator.reconcile.conditions", text)) == []
