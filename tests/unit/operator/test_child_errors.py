"""The message about the name of a child that another object still has."""

from typing import Any

import pytest

from heteroinfer_operator.kube.child_errors import name_held


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({}, "Service tiny belongs to an earlier HeteroInference of this name and still exists. "),
        ({"finalizers": ["a/b"]}, "belongs to an earlier HeteroInference of this name"),
        ({"deletionTimestamp": "2026-01-01T00:00:00Z"}, "Service tiny is being deleted. "),
        (
            {"deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": ["a/b", "c/d"]},
            "is being deleted, but finalizer a/b, c/d blocks it. The controller that owns the finalizer",
        ),
    ],
)
def test_the_message_about_a_name_in_use_has_the_reason(metadata: dict[str, Any], said: str) -> None:
    error = name_held("Service tiny", {"metadata": metadata})
    assert said in str(error)
    assert str(error).endswith("The operator needs this name and waits")
