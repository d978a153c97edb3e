"""What the documents name is there: links, fields, values, metrics, variables.

Targets of make, options, tests and markers that they name are in test_commands.py, files and modules in
test_names.py, reasons in test_reasons.py, alerts, and metrics that must be
explained, in watching/test_boards.py.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from heteroinfer_contract import metric_names
from tests.unit.pages import CODE, PAGES, ROOT, TODAY, name_of

OF_KUBERNETES = {"fsGroup", "minReplicas", "workloadRef"}
"""Fields that stand in the documents and in no resource or value of ours."""
PACKAGES = {"heteroinfer_operator", "heteroinfer_contract"}
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_MENTIONED_ANCHOR = re.compile(r"\bdocs/([\w.-]+\.md)#([\w-]+)")
_PATH = re.compile(r"(?<![\w./-])[a-z]\w*(?:\[\])?(?:\.[a-z]\w*(?:\[\])?)+(?![\w/(.-])")
_FILES = {"json", "yaml", "py", "md", "txt", "safetensors"}


@cache
def anchors(page: Path) -> frozenset[str]:
    """Returns what GitHub names the headings of a page."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    headings = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", line) for line in re.findall(r"^#+ (.*)", text, re.M))
    return frozenset(
        re.sub(r"[^\w -]", "", heading.strip().lower()).replace(" ", "-") for heading in headings
    )


def test_every_link_leads_somewhere() -> None:
    links = [(page, link) for page in PAGES for link in _LINK.findall(page.read_text()) if "://" not in link]
    assert len(links) > 100
    wrong = []
    for page, link in links:
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            wrong.append(f"{name_of(page)}: {link}")
    assert wrong == []


def test_every_anchor_that_a_file_mentions_is_there() -> None:
    folders = ("charts", "examples", "operator", "worker_image", "crds")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.*") if path.is_file()]
    found = [
        (file, page, anchor)
        for file in files
        if file.suffix in {".py", ".yaml", ".tpl", ".txt"}
        for page, anchor in _MENTIONED_ANCHOR.findall(file.read_text())
    ]
    assert found
    assert not [(name_of(f), p, a) for f, p, a in found if a not in anchors(ROOT / "docs" / p)]


def fields(schema: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yields the path of each field of a schema; entries of lists have that of the list."""
    for name, own in schema.get("properties", {}).items():
        yield (*path, name)
        yield from fields(own, (*path, name))
    if isinstance(schema.get("items"), Mapping):
        yield from fields(schema["items"], path)


def values(own: object, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if isinstance(own, Mapping):
        for name, inner in own.items():
            yield (*path, name)
            yield from values(inner, (*path, name))


@cache
def known_paths() -> frozenset[tuple[str, ...]]:
    """Returns the fields of the resource and the chart's values, by each end of their paths."""
    crd = yaml.safe_load((ROOT / "crds/heteroinference.yaml").read_text())
    chart = yaml.safe_load((ROOT / "charts/heteroinfer/values.yaml").read_text())
    schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    paths = (*fields(schema), *values(chart), ("resources", "limits", "cpu"))
    return frozenset(path[i:] for path in paths for i in range(len(path)))


def wrong_paths(text: str) -> tuple[list[str], int]:
    """Returns what reads like a field or a value and is none, and how many there are in all."""
    known = {path[0] for path in known_paths()} - {"metadata"}
    found: list[tuple[str, ...]] = []
    for dotted in _PATH.findall(text):
        path = tuple(dotted.replace("[]", "").split("."))
        if path[0] in known and path[-1] not in _FILES and path[:2] != ("prometheusRule", "alerts"):
            found.append(path)
    return [".".join(path) for path in found if path not in known_paths()], len(found)


def test_every_field_and_value_is_there() -> None:
    known = {path[0] for path in known_paths()}
    wrong: list[tuple[str, str]] = []
    words: list[tuple[str, str]] = []
    count = 0
    for page in TODAY:
        for _, span in CODE.findall(page.read_text()):
            odd, more = wrong_paths(span)
            wrong += [(name_of(page), path) for path in odd]
            count += more
            words += [(name_of(page), word) for word in re.findall(r"(?<![\w-])[a-z]+[A-Z]\w*", span)]
    assert count > 100
    assert len(words) > 100
    assert wrong == []
    assert not [(page, word) for page, word in words if word not in known | OF_KUBERNETES]


def sentences(module: ast.Module) -> Iterator[str]:
    """Yields the texts of a module that are more than a word, without its docstrings."""
    texts = {id(node.value) for node in ast.walk(module) if isinstance(node, ast.Expr)}
    for node in ast.walk(module):
        if isinstance(node, ast.Constant) and id(node) not in texts and " " in str(node.value):
            yield str(node.value)


def test_every_field_that_a_message_names_is_there() -> None:
    wrong: list[tuple[str, str]] = []
    count = 0
    for source in (ROOT / "operator/src", ROOT / "worker_image/src/heteroinfer_contract"):
        for file in source.rglob("*.py"):
            for text in sentences(ast.parse(file.read_text())):
                odd, more = wrong_paths(text)
                wrong += [(name_of(file), path) for path in odd]
                count += more
    assert count > 80
    assert wrong == []


def test_every_metric_is_exported() -> None:
    exported = {v for k, v in vars(metric_names).items() if k.isupper() and isinstance(v, str)}
    adapter = yaml.safe_load((ROOT / "examples/autoscaling/prometheus-adapter.yaml").read_text())
    exported |= {rule["name"]["as"] for rule in adapter["rules"]["custom"]} | PACKAGES
    files = [
        *TODAY,
        *(ROOT / "charts/heteroinfer").rglob("*.json"),
        *(ROOT / "charts/heteroinfer/rules").iterdir(),
        *(ROOT / "examples/autoscaling").iterdir(),
    ]
    named = {
        (name_of(file), re.sub(r"_(bucket|sum|count)$", "", word))
        for file in files
        for word in re.findall(r"(?<![\w:])heteroinfer_[a-z_]+", file.read_text())
    }
    assert len(named) > 80
    assert not {(file, word) for file, word in named if word not in exported}


def test_every_variable_is_read() -> None:
    named = {
        (name_of(page), name)
        for page in TODAY
        for name in re.findall(r"\bHETEROINFER_[A-Z_]+", page.read_text())
    }
    sources = [
        path for folder in ("operator", "worker_image", "tests") for path in (ROOT / folder).rglob("*.py")
    ]
    text = "".join(path.read_text() for path in sources if path != Path(__file__))
    read = set(re.findall(r"HETEROINFER_[A-Z_]+", text))
    read |= {f"HETEROINFER_{name}" for name in re.findall(r'read\.\w+\("([A-Z_]+)"', text)}
    assert len(named) > 8
    assert not {(page, name) for page, name in named if name not in read}
