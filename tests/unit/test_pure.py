"""A module whose docstring says Pure is one that import-linter holds to it."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = (ROOT / "operator" / "src", ROOT / "worker_image" / "src")
_PURE = re.compile(r'\A"""(?:(?!""").)*\b(Pure|PURE)[.:]', re.S)
CONTRACT = "what says that it is pure has no client, clock, file or chance"


def modules() -> dict[str, Path]:
    found = {}
    for source in SOURCES:
        for file in source.rglob("*.py"):
            parts = file.relative_to(source).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def test_the_linter_holds_every_module_that_says_pure() -> None:
    linter = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (held,) = (c["source_modules"] for c in linter["contracts"] if c["name"] == CONTRACT)
    pure = {name for name, file in modules().items() if _PURE.match(file.read_text())}
    assert len(pure) > 40
    free = {name for name in pure if not any(f"{name}.".startswith(f"{package}.") for package in held)}
    assert not free, f"add {sorted(free)} to the contract {CONTRACT!r} in pyproject.toml"
    idle = {package for package in held if not any(f"{name}.".startswith(f"{package}.") for name in pure)}
    assert not idle, f"{sorted(idle)} are in the contract and don't say so in their docstrings"
