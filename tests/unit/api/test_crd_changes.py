"""The CRD against the last released one: a change that is not an addition is listed, or it is a mistake."""

import copy
import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from heteroinfer_operator.api.crd import build_crd
from tests.unit.api.crd_changes import find_changes

RELEASED = Path(__file__).parents[2] / "integration/upgrade/versions/0.1.0/heteroinfer-0.1.0.tgz"
LISTED = Path(__file__).parent / "crd_changes_since_0.1.0.txt"
"""One line for each change. v1alpha1 may have them; from v1beta1 on the list stays empty."""


def released_crd() -> dict[str, Any]:
    with tarfile.open(RELEASED) as archive:
        file = archive.extractfile("heteroinfer/files/heteroinference.yaml")
        assert file is not None
        crd: dict[str, Any] = yaml.load(file.read(), Loader=yaml.CSafeLoader)
        return crd


def test_every_change_since_the_last_release_is_listed() -> None:
    assert "\n".join(find_changes(released_crd(), build_crd())) + "\n" == LISTED.read_text()


def test_an_equal_crd_has_no_changes() -> None:
    assert find_changes(build_crd(), build_crd()) == []


def _spec(crd: dict[str, Any]) -> dict[str, Any]:
    schema: dict[str, Any] = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    fields: dict[str, Any] = schema["properties"]["spec"]["properties"]
    return fields


@pytest.mark.parametrize(
    ("field", "change", "found"),
    [
        ("replicas", {"maximum": 8}, ".spec.replicas: maximum tightened"),
        ("replicas", {"minimum": 1}, ".spec.replicas: minimum tightened"),
        ("replicas", {"type": "string"}, ".spec.replicas: type"),
        ("replicas", {"default": 2}, ".spec.replicas: default"),
        ("drainTimeout", {"pattern": "^5m$"}, ".spec.drainTimeout: pattern"),
        ("roles", {"x-kubernetes-list-type": "atomic"}, ".spec.roles: x-kubernetes-list-type"),
        ("roles", {"maxItems": 1}, ".spec.roles: maxItems tightened"),
        ("network", {"required": ["interface"]}, ".spec.network.interface: required"),
        ("network", {"properties": {}}, ".spec.network.interface: removed"),
    ],
)
def test_finds_a_change_of_a_field(field: str, change: dict[str, Any], found: str) -> None:
    new = copy.deepcopy(build_crd())
    _spec(new)[field] |= change
    assert found in find_changes(build_crd(), new)


def test_finds_a_removed_enum_value_and_accepts_a_new_one() -> None:
    old, more = build_crd(), copy.deepcopy(build_crd())
    _spec(more)["parallelism"]["properties"]["mode"]["enum"].append("Another")
    assert find_changes(old, more) == []
    assert find_changes(more, old) == [".spec.parallelism.mode: enum value removed"]


def test_a_new_optional_field_and_new_descriptions_are_compatible() -> None:
    new = copy.deepcopy(build_crd())
    _spec(new)["another"] = {"type": "string", "maxLength": 1, "description": "A field."}
    _spec(new)["replicas"]["description"] = "Other words."
    assert find_changes(build_crd(), new) == []
