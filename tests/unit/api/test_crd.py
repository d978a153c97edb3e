"""The generated CRD: equal to its copies, structural, and bounded everywhere."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from heteroinfer_operator.api.base import RuleReason
from heteroinfer_operator.api.crd import build_crd, build_schema, render_crd
from heteroinfer_operator.api.reference_page import PAGE, render_page
from heteroinfer_operator.commands.crd_command import COPIES

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("copy", COPIES)
def test_the_crd_files_equal_the_generated_crd(copy: str) -> None:
    assert (ROOT / copy).read_text() == render_crd(), f"{copy} is stale: run `heteroinfer crd --write`"


def test_the_reference_page_is_current() -> None:
    assert (ROOT / PAGE).read_text() == render_page(), f"{PAGE} is stale: run `heteroinfer crd --write`"


def test_the_reference_page_has_every_field_once_for_each_type() -> None:
    page = render_page()
    fields = {
        path.rpartition(".")[2].rstrip("[]{}") for path, _ in NODES if path.startswith((".spec.", ".status."))
    }
    assert [name for name in fields if f"| `{name}` |" not in page] == []


def test_the_yaml_of_the_crd_equals_its_value() -> None:
    # The C loader: the same values in a tenth of the time.
    assert yaml.load(render_crd(), Loader=yaml.CSafeLoader) == build_crd()


def nodes(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from nodes(child, f"{path}.{name}")
    for key, suffix in (("items", "[]"), ("additionalProperties", "{}")):
        if key in schema:
            yield from nodes(schema[key], path + suffix)


NODES = [
    (path, node) for path, node in nodes(build_schema()) if path not in {".apiVersion", ".kind", ".metadata"}
]


def test_every_text_list_and_map_has_a_bound() -> None:
    unbounded = [
        path
        for path, node in NODES
        if (
            node.get("type") == "string"
            and not {"maxLength", "enum"} & node.keys()
            and node.get("format") != "date-time"
        )
        or (node.get("type") == "array" and "maxItems" not in node)
        or ("additionalProperties" in node and "maxProperties" not in node)
        or (node.get("type") in {"integer", "number"} and not {"minimum", "maximum"} <= node.keys())
    ]
    assert unbounded == []


def test_every_list_has_a_list_type() -> None:
    lists = [(path, node) for path, node in NODES if node.get("type") == "array"]
    assert [path for path, node in lists if "x-kubernetes-list-type" not in node] == []


def test_every_number_has_a_format_that_holds_it() -> None:
    integers = [(path, node) for path, node in NODES if node.get("type") == "integer"]
    assert {node["format"] for _, node in integers} == {"int32", "int64"}
    small = [path for path, node in integers if node["format"] == "int32" and node["maximum"] >= 2**31]
    assert small == []
    assert [path for path, node in NODES if node.get("type") == "number" and node["format"] != "double"] == []


def test_a_count_of_at_least_one_has_that_minimum() -> None:
    """IDEs and kubeconform read the schema, and no rules in CEL."""
    schema = dict(NODES)
    for name in ("pods", "ranksPerPod", "feedForward.ranks", "feedForward.layers", "layers[]"):
        assert schema[f".spec.roles[].{name}"]["minimum"] == 1, name


def test_map_keys_are_required_fields() -> None:
    for path, node in NODES:
        for key in node.get("x-kubernetes-list-map-keys", ()):
            assert key in node["items"]["required"], path


def test_every_field_has_a_description() -> None:
    silent = [path for path, node in NODES if path and path[-1] not in "]}" and not node.get("description")]
    assert silent == []


# Fields that must be set, or of which exactly one is set: they have no default.
_NO_DEFAULT = re.compile(
    r"[.](claimName|size|value|valueFrom|secretKeyRef|configMapKeyRef|resourceClaim(Template)?Name|configMap"
    r"|secret|projected|emptyDir|image|persistentVolumeClaim|cache)$"
)


def test_every_optional_field_of_the_spec_describes_its_default() -> None:
    """`kubectl explain` shows no default but those in descriptions."""
    silent = []
    for path, node in NODES:
        if not path.startswith(".spec"):
            continue
        for name, field in node.get("properties", {}).items():
            own = f"{path}.{name}"
            optional = name not in node.get("required", ()) and field.get("default") != {}
            if optional and not _NO_DEFAULT.search(own) and "Default: " not in field["description"]:
                silent.append(own)
    assert silent == []


def test_every_description_is_one_line_that_ends_like_a_sentence() -> None:
    odd = [path for path, node in NODES if not re.fullmatch(r"[A-Z].*[.]", node.get("description", "A."))]
    assert odd == []


def test_the_crd_has_no_keyword_that_structural_schemas_lack() -> None:
    lacking = {"$ref", "$defs", "title", "const", "propertyNames", "nullable"}
    assert [path for path, node in NODES if lacking & node.keys()] == []
    assert [path for path, node in NODES if node.get("additionalProperties") is False] == []


def test_every_rule_has_a_message() -> None:
    rules = [rule for _, node in NODES for rule in node.get("x-kubernetes-validations", ())]
    assert len(rules) > 15
    assert all(rule["message"] and "\n" not in rule["message"] for rule in rules)
    assert [
        rule["message"] for rule in rules if not re.search("must|does not support", rule["message"])
    ] == []


def test_every_rule_has_a_reason_and_names_its_field() -> None:
    """The path of a rule about several fields is the object that contains the fields."""
    for path, node in NODES:
        for rule in node.get("x-kubernetes-validations", ()):
            assert rule["reason"] in {*RuleReason}, (path, rule)
            of_object = re.match("must (set (exactly one|either)|come from a Secret)", rule["message"])
            assert ("fieldPath" in rule) != bool(of_object), (path, rule)


def test_columns_show_the_fields_of_the_status() -> None:
    (version,) = build_crd()["spec"]["versions"]
    columns = version["additionalPrinterColumns"]
    assert [c["name"] for c in columns if not c.get("priority")] == [
        "Available",
        "Ready",
        "Reason",
        "Groups",
        "Mode",
        "GPU",
        "CPU",
        "StepMs",
        "SlowestRank",
        "Age",
    ]
    assert [c["name"] for c in columns if c.get("priority")] == [
        "PredictedMs",
        "Model",
        "Restarts",
        "Plan",
    ]
    fields = {path for path, _ in NODES}
    for column in columns:
        path = column["jsonPath"].split("[?")[0]
        assert path in fields or path == ".metadata.creationTimestamp", column


def test_scale_paths_exist() -> None:
    (version,) = build_crd()["spec"]["versions"]
    assert set(version["subresources"]["scale"].values()) <= {path for path, _ in NODES}
