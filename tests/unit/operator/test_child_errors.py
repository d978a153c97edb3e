"""What is said of a name that another object holds."""

from typing import Any

import pytest

from heteroinfer_operator.kube.child_errors import name_held


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({}, "Service tiny belongs to an earlier HeteroInference of this name, and is not gone yet; "),
        ({"finalizers": ["a/b"]}, "belongs to an earlier HeteroInference of this name"),
        ({"deletionTimestamp": "2026-01-01T00:00:00Z"}, "Service tiny is being deleted; "),
        (
            {"deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": ["a/b", "c/d"]},
            "is being deleted, and held by a/b, c/d: whoever set that must let go of it; ",
        ),
    ],
)
def test_a_refusal_says_who_holds_the_name(metadata: dict[str, Any], said: str) -> None:
    error = name_held("Service tiny", {"metadata": metadata})
    assert said in str(error)
    assert str(error).endswith("its name is needed")
