"""Security contexts of pods as the chart sets them."""

import pytest

from heteroinfer_operator.errors import HeteroInferError
from heteroinfer_operator.manifests.pod_security import PodSecurity


def test_an_omitted_security_context_is_restricted() -> None:
    assert PodSecurity.from_json("") == PodSecurity.from_json("{}") == PodSecurity()
    assert PodSecurity().pod["runAsNonRoot"] is True
    own = PodSecurity.from_json('{"pod": {"runAsNonRoot": true}}')
    assert (own.pod, own.container) == ({"runAsNonRoot": True}, PodSecurity().container)


@pytest.mark.parametrize("text", ["{", "[]", "null", '{"pods": {}}', '{"pod": []}', "[" * 100_000])
def test_an_unreadable_security_context_is_refused(text: str) -> None:
    with pytest.raises(HeteroInferError, match=r"HETEROINFER_POD_SECURITY .*must be a JSON object"):
        PodSecurity.from_json(text)
