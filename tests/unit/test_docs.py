"""What the documents name is there: links, fields and their values, reasons, labels, metrics, variables.

Targets of make, options, tests and markers that they name are in test_commands.py, files and modules in
test_names.py. That each reason is explained is in test_reasons.py; alerts, and metrics that must be
explained, in watching/test_boards.py.
"""

import ast
import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from heteroinfer_contract import metric_names, names
from heteroinfer_operator.api import HeteroInference
from tests.unit.pages import CODE, PAGES, ROOT, TODAY, name_of

OF_KUBERNETES = {"fsGroup", "minReplicas", "preemptionPolicy", "schedulingGroup", "workloadRef"} | {
    *("backendRequest", "timeoutSec"),  # of routes
    *("conditionWait", "responseHeader", "scaledownPeriod"),  # of KEDA's HTTPScaledObject
}
"""Fields that stand in the documents and in no resource or value of ours."""
NAMING_THE_WIRE = [*TODAY, ROOT / "CHANGELOG.md"]
"""Pages whose reasons, values and labels must be there: on the wire names stay."""
CORE_PATHS = (
    *(("spec", field) for field in ("containers", "initContainers", "nodeName", "template", "unschedulable")),
    *(("status", field) for field in ("allocatable", "capacity", "containerStatuses", "podIP")),
)
"""How paths of pods, nodes and workloads of Kubernetes begin; no field of ours begins so."""
WORDS_OF_OTHERS = {
    "Any": "typing",
    "GangScheduling": "feature gate of Kubernetes 1.35",
    "GenericWorkload": "feature gate of Kubernetes 1.35",
    "OutOfcpu": "reason of a pod that the kubelet refused",
    "Terminating": "column of kubectl get",
    "UnexpectedAdmissionError": "reason of a pod that the kubelet refused",
}
PACKAGES = {"heteroinfer_operator", "heteroinfer_contract"}
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_MENTIONED_ANCHOR = re.compile(r"\bdocs/([\w./-]+\.md)#([\w-]+)")
_PATH = re.compile(r"(?<![\w./-])[a-z]\w*(?:\[\])?(?:\.[a-z]\w*(?:\[\])?)+(?![\w/(.-])")
_WORD = re.compile(
    r"^[A-Z][a-z]\w*$|(?<![\w.:/-])[A-Z][a-z0-9]+(?:[A-Z]+[a-z0-9]*)+(?![\w-])|(?<==)[A-Z][a-z]\w+"
)
"""A CamelCase word in code, one that is alone, or one after an equals sign, as in `Planned=False`."""
_VALUE = re.compile(r"(?<![\w.-])([a-z]\w*(?:\[\])?(?:\.[a-z]\w*(?:\[\])?)*): ([A-Za-z]\w*)(?![\w(.-])")
_LABEL = re.compile(r"(?<![\w.])heteroinfer\.dev/[a-z][\w.-]*\w")
_EXPLAIN = re.compile(r"\bkubectl explain (?:hinf|heteroinferences?)((?:\.\w+)*)")
_FILES = {"json", "yaml", "py", "md", "txt", "safetensors"}


@cache
def anchors(page: Path) -> frozenset[str]:
    """Returns the anchors of a page: its headings as GitHub names them, and its `<a id="…">`."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    headings = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", line) for line in re.findall(r"^#+ (.*)", text, re.M))
    named = {re.sub(r"[^\w -]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}
    return frozenset(named.union(re.findall(r'<a id="([\w-]+)">', text)))


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


def test_every_anchor_that_a_file_mentions_exists() -> None:
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


def attached_lists(text: str) -> list[str]:
    """Returns the first items of lists that a Markdown site shows as part of the paragraph before."""
    found, before = [], "blank"  # kind of the line before: blank, item (with its further lines), or text
    for line in re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE).splitlines():
        if re.match(r"(?:[-*]|\d+\.) ", line):
            found += [line] if before == "text" else []
            before = "item"
        elif not line.strip() or line[0] in "#|":
            before = "blank"
        elif before == "blank" and line[0] != " ":
            before = "text"
    return found


def test_a_list_that_begins_inside_a_paragraph_is_found() -> None:
    assert attached_lists("text:\n- a\n- b") == ["- a"]
    assert attached_lists("text:\n\n- a\nlonger\n- b\n\n```\nx\n- y\n```\n# c\n1. d") == []


def test_lists_follow_a_blank_line() -> None:
    """Otherwise GitHub shows a list, but the site shows dashes."""
    found = {name_of(page): attached_lists(page.read_text()) for page in PAGES}
    assert {page: items for page, items in found.items() if items} == {}


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
def schema() -> Mapping[str, Any]:
    """Returns the schema of the resource."""
    crd = yaml.safe_load((ROOT / "crds/heteroinference.yaml").read_text())
    found: Mapping[str, Any] = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return found


@cache
def known_paths() -> frozenset[tuple[str, ...]]:
    """Returns the fields of the resource and the chart's values, by each end of their paths."""
    chart = yaml.safe_load((ROOT / "charts/heteroinfer/values.yaml").read_text())
    paths = (*fields(schema()), *values(chart), ("resources", "limits", "cpu"))
    return frozenset(path[i:] for path in paths for i in range(len(path)))


def wrong_paths(text: str) -> tuple[list[str], int]:
    """Returns what reads like a field or a value and is none, and how many there are in all."""
    known = {path[0] for path in known_paths()} - {"metadata"}
    found: list[tuple[str, ...]] = []
    for dotted in _PATH.findall(text):
        path = tuple(dotted.replace("[]", "").split("."))
        if path[0] in known and path[-1] not in _FILES and path[:2] != ("prometheusRule", "alerts"):
            found.append(path)
    odd = [path for path in found if path not in known_paths() and path[:2] not in CORE_PATHS]
    return [".".join(path) for path in odd], len(found)


@pytest.mark.parametrize(
    ("text", "odd"),
    [
        ("spec.engine.maxLen", ["spec.engine.maxLen"]),
        ("set spec.roles[].deviceMem of it", ["spec.roles.deviceMem"]),
        ("roles[].image", ["roles.image"]),
        ("spec.containers[].image, spec.template.spec.nodeName, status.capacity", []),
        ("spec.container[].image, status.capacities", ["spec.container.image", "status.capacities"]),
    ],
)
def test_a_field_that_does_not_exist_is_reported(text: str, odd: list[str]) -> None:
    assert wrong_paths(text)[0] == odd


def test_no_path_of_kubernetes_is_a_path_of_the_repository() -> None:
    assert not [path for path in CORE_PATHS if path in known_paths()]


def test_every_field_and_value_exists() -> None:
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


def spans(text: str) -> Iterator[str]:
    """Yields the code in a page's sentences."""
    yield from (span for _, span in CODE.findall(text) if span)


@cache
def known_words() -> frozenset[str]:
    """Returns the CamelCase words of the product as it says them, in its CRD and chart, and all classes."""
    found: set[str] = set()
    for folder in ("operator/src", "worker_image/src", "tests"):
        for file in (ROOT / folder).rglob("*.py"):
            found |= set(re.findall(r"^ *class (\w+)", file.read_text(), re.M))
            if folder != "tests":
                found |= set(re.findall(r"[\"']([A-Z][a-z]\w*)[\"']", file.read_text()))
    for file in (*(ROOT / "crds").iterdir(), *(ROOT / "charts/heteroinfer").rglob("*.yaml")):
        found |= set(re.findall(r"(?m)(?:^ *-|\b(?:kind|alert):) ([A-Z]\w*)$", file.read_text()))
    return frozenset(found)


def wrong_words(text: str) -> list[str]:
    """Returns the CamelCase words in a page's code that neither the product nor Kubernetes has."""
    words = [word for span in spans(text) for word in _WORD.findall(span)]
    return [word for word in words if word not in known_words() and word not in WORDS_OF_OTHERS]


def test_every_reason_and_alert_in_the_docs_exists() -> None:
    said = {
        word for page in NAMING_THE_WIRE for span in spans(page.read_text()) for word in _WORD.findall(span)
    }
    assert {"PodLost", "FeedForward"} <= said
    assert len(said) > 120
    assert said >= WORDS_OF_OTHERS.keys(), "words that no page says need no entry"
    assert not [(name_of(page), odd) for page in NAMING_THE_WIRE for odd in wrong_words(page.read_text())]


@pytest.mark.parametrize(
    ("text", "odd"),
    [
        ("the reason `PodGone`", ["PodGone"]),
        ("`Degraded=True`, reason `RanksExited`", ["RanksExited"]),
        ("`kubectl wait --for=condition=Avail`", ["Avail"]),
        ("the alert `HeteroInferGroupAway` fires", ["HeteroInferGroupAway"]),
        ("`phase: Ready`, `PodLost`, `RankExited`, `OutOfcpu`; a PodGone outside of code", []),
    ],
)
def test_a_reason_that_does_not_exist_is_reported(text: str, odd: list[str]) -> None:
    assert wrong_words(text) == odd


def enums(own: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yields each value of each field that has a list of them, with the field's path."""
    yield from ((path, str(value)) for value in own.get("enum", ()))
    for name, inner in own.get("properties", {}).items():
        yield from enums(inner, (*path, name))
    if isinstance(own.get("items"), Mapping):
        yield from enums(own["items"], path)


@cache
def known_values() -> Mapping[tuple[str, ...], frozenset[str]]:
    """Returns the values of fields and of the chart's that are listed, by each end of their paths."""
    chart = json.loads((ROOT / "charts/heteroinfer/values.schema.json").read_text())
    found: dict[tuple[str, ...], frozenset[str]] = {}
    for path, value in (*enums(schema()), *enums(chart)):
        for i in range(len(path)):
            found[path[i:]] = found.get(path[i:], frozenset()) | {value}
    return found


def wrong_values(text: str) -> tuple[list[str], int]:
    """Returns each `field: Value` that the field does not accept, and the number of compared values."""
    said = [
        (path, tuple(path.replace("[]", "").split(".")), value)
        for fence, span in CODE.findall(text)
        for path, value in _VALUE.findall(span or fence)
    ]
    listed = [each for each in said if each[1] in known_values()]
    return [f"{path}: {value}" for path, ends, value in listed if value not in known_values()[ends]], len(
        listed
    )


def test_pages_name_only_values_that_a_field_accepts() -> None:
    found = [(page, *wrong_values(page.read_text())) for page in NAMING_THE_WIRE]
    assert sum(count for _, _, count in found) > 15
    assert not [(name_of(page), odd) for page, odd, _ in found if odd]


@pytest.mark.parametrize(
    ("text", "odd"),
    [
        ("`parallelism.mode: Feedforward`", ["parallelism.mode: Feedforward"]),
        ("`groups[].phase: Asleep`, `phase: Asleep`", ["groups[].phase: Asleep", "phase: Asleep"]),
        ("```yaml\nscheduling: {gang: auto}\n```", ["gang: auto"]),
        ("`scope: Namespace`", ["scope: Namespace"]),
        ("`scheduling.gang: Auto`, `phase: Downloading`, `model.uri: hf`; gang: of pods", []),
    ],
)
def test_a_value_that_a_field_does_not_accept_is_found(text: str, odd: list[str]) -> None:
    assert wrong_values(text)[0] == odd


def wrong_labels(text: str) -> list[str]:
    ours = {value for value in vars(names).values() if isinstance(value, str)}
    ours.add(HeteroInference.model_fields["api_version"].default)
    return [label for label in _LABEL.findall(text) if label not in ours]


def test_every_label_and_annotation_in_the_docs_exists() -> None:
    files = [
        *PAGES,
        *(
            file
            for folder in ("examples", "charts", "tests")
            for file in (ROOT / folder).rglob("*")
            if file.suffix in {".yaml", ".txt", ".tpl"} and "versions" not in file.parts
        ),
    ]
    assert sum(len(_LABEL.findall(file.read_text())) for file in files) > 20
    assert not [(name_of(file), odd) for file in files for odd in wrong_labels(file.read_text())]


@pytest.mark.parametrize(
    ("text", "odd"),
    [
        ("kubectl get pods -l heteroinfer.dev/name=llama", ["heteroinfer.dev/name"]),
        ("`heteroinfer.dev/v1`", ["heteroinfer.dev/v1"]),
        ("-l heteroinfer.dev/resource=llama,heteroinfer.dev/leader; heteroinfer.dev/*", []),
    ],
)
def test_a_label_that_does_not_exist_is_reported(text: str, odd: list[str]) -> None:
    assert wrong_labels(text) == odd


def wrong_explained(text: str) -> list[str]:
    ours = {(), ("spec",), ("status",), *fields(schema())}
    return [path for path in _EXPLAIN.findall(text) if tuple(path.split(".")[1:]) not in ours]


def test_every_path_in_a_kubectl_explain_command_exists() -> None:
    assert any(_EXPLAIN.search(page.read_text()) for page in TODAY)
    assert not [(name_of(page), odd) for page in TODAY for odd in wrong_explained(page.read_text())]


@pytest.mark.parametrize(
    ("text", "odd"),
    [
        ("`kubectl explain hinf.spec.role`", [".spec.role"]),
        ("kubectl explain heteroinference.roles", [".roles"]),
        ("`kubectl explain hinf.spec --recursive`, kubectl explain hinf.spec.roles.device", []),
        ("kubectl explain pod.spec.role", []),
    ],
)
def test_a_path_that_kubectl_cannot_explain_is_found(text: str, odd: list[str]) -> None:
    assert wrong_explained(text) == odd


def sentences(module: ast.Module) -> Iterator[str]:
    """Yields the texts of a module that are more than a word, without its docstrings."""
    texts = {id(node.value) for node in ast.walk(module) if isinstance(node, ast.Expr)}
    for node in ast.walk(module):
        if isinstance(node, ast.Constant) and id(node) not in texts and " " in str(node.value):
            yield str(node.value)


def test_every_field_that_a_message_names_exists() -> None:
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


def test_every_field_that_a_comment_of_the_chart_or_an_example_names_exists() -> None:
    files = [*(ROOT / "examples").rglob("*.yaml"), *(ROOT / "charts/heteroinfer").rglob("*.[yt]*")]
    comments = {
        name_of(file): "\n".join(re.findall(r"#.*" if file.suffix != ".txt" else r".+", file.read_text()))
        for file in files
    }
    assert sum(wrong_paths(text)[1] for text in comments.values()) > 5
    assert not {name: odd for name, text in comments.items() if (odd := wrong_paths(text)[0])}


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


def test_the_index_lists_each_decision_with_its_title() -> None:
    folder = ROOT / "docs/decisions"
    index = (folder / "README.md").read_text()
    decisions = sorted(page for page in folder.iterdir() if page.name != "README.md")
    assert len(decisions) > 20
    for page in decisions:
        title, _, dated, *_ = page.read_text().split("\n")
        assert f"| {page.name[:10]} | [{title.removeprefix('# ')}]({page.name}) |" in index
        assert dated.startswith(f"**Date.** {page.name[:10]}. **Status.** "), page.name
