"""The pages for users explain every reason of a condition, failure or event, and none that there is not."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from heteroinfer_contract.failure import FailureReason
from heteroinfer_operator.api import ConditionType, GroupPhase, StartupPhase
from heteroinfer_operator.errors import PlanReason, SpecError
from tests.unit.pages import guide

ROOT = Path(__file__).parents[2]
OPERATOR = ROOT / "operator" / "src" / "heteroinfer_operator"
SAYING = (
    "reconcile/*.py", "reconcile/*/*.py", "planning/*.py", "vllm_support/*.py", "manifests/addressing.py",
    "manifests/gang.py", "kube/adapter.py",
)  # fmt: skip
"""Where reasons of a resource are given; others are of commands, or of the operator's own process."""
OF_KUBERNETES = {"CreateContainerConfigError", "FailedMount", "ImagePullBackOff"}
"""Passed on as the kubelet says them; it has more, which are not listed."""
_WORD = re.compile(r"[A-Z][a-z]+(?:[A-Z]+[a-z]*)*|[A-Z]{2,}[A-Z][a-z]+")
_NAMES = re.compile(
    r"(?:\w*_)?reason|OBJECT_REFUSED|NAME_\w+|CHANGED_\w+|(?:DELETED|MADE|WRITTEN)_BY_OTHERS|NOT_ANSWERED|OOM_KILLED"
    r"|TOO_MANY_PODS|PODS_NEVER_SEEN|UNSCHEDULABLE|IMAGE_CHANGED|NODE_LOST|(?:_MODEL_)?POD_(?:DELETED|ENDED)|_PROFILE_READ|WAITING_\w+",
    re.I,
)


def constants(node: ast.AST) -> Iterator[str]:
    """Yields the CamelCase words in a piece of code."""
    for part in ast.walk(node):
        if isinstance(part, ast.Constant) and isinstance(part.value, str) and _WORD.fullmatch(part.value):
            yield part.value


def given(module: ast.Module) -> Iterator[str]:
    """Yields what is passed on, or kept, as a reason."""
    for node in ast.walk(module):
        if isinstance(node, ast.keyword) and node.arg == "reason":
            yield from constants(node.value)
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(target, ast.Name) and _NAMES.fullmatch(target.id) for target in targets):
                yield from constants(node.value)


def in_code() -> set[str]:
    found = {str(word) for kind in (FailureReason, GroupPhase, PlanReason, StartupPhase) for word in kind}
    found.add(SpecError.reason)
    for glob in SAYING:
        for file in OPERATOR.glob(glob):
            found |= set(given(ast.parse(file.read_text())))
    # Here reasons are arguments and results, not keywords.
    for name in ("conditions.py", "life.py"):
        found |= set(constants(ast.parse((OPERATOR / "reconcile" / name).read_text())))
    return found


def in_docs() -> tuple[set[str], set[str]]:
    """Returns all words in backticks, and those of the first columns of tables whose head says reason."""
    text = guide()
    said = set(re.findall(r"`(\w+)`", text))
    listed: set[str] = set()
    for table in re.findall(r"(?m)(?:^\|.*\n)+", text):
        head, _, *rows = table.splitlines()
        if "reason" in head.split("|")[1]:
            listed |= {word for row in rows for word in re.findall(r"`(\w+)`", row.split("|")[1])}
    return said, listed


def test_every_reason_is_explained() -> None:
    reasons = in_code()
    assert {"PodDisrupted", "NameTaken", "InsufficientMemory", "RolloutStuck", "EpochStarted"} <= reasons
    said, _ = in_docs()
    assert reasons - said == set()


def test_the_docs_explain_only_reasons_that_the_code_uses() -> None:
    _, listed = in_docs()
    assert {"PodLost", "ModelCacheFull", "Unschedulable", "UnsupportedModel"} <= listed
    assert listed - in_code() - OF_KUBERNETES == set()


def test_the_list_by_condition_has_the_reasons_of_the_list_a_to_z() -> None:
    page = (ROOT / "docs/user/reference/conditions-and-reasons.md").read_text()
    by_condition = defaultdict(list)
    for reason, places in re.findall(r'(?m)^\| <a id="(\w+)"></a>`\w+` \| ([^|]+) \|', page):
        for place in places.strip().split("; "):
            kind, _, name = place.partition(" ")
            if kind.startswith("condition"):
                conditions = [f"`{each}`" for each in name.partition(" (")[0].split(", ")]
            elif kind == "failure":
                does_not = "does not" in name
                conditions = [f"failures that {'do not count' if does_not else 'count'} as a restart"]
            else:
                conditions = ["events"]
            for condition in conditions:
                by_condition[condition].append(f"[{reason}](#{reason})")
    assert {"`Ready`", "`Stalled`", "events"} < by_condition.keys()
    rows = [f"| {condition} | {', '.join(reasons)} |" for condition, reasons in by_condition.items()]
    assert [row for row in rows if row not in page] == [], 'write these rows into "Reasons by condition"'


def test_every_condition_is_explained() -> None:
    said, _ = in_docs()
    assert {kind.value for kind in ConditionType} <= said
