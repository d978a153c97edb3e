"""Classifies answers of the API server or of a proxy in front of it."""

import json
from pathlib import Path

import pytest
import yaml
from kubernetes.aio import config

from heteroinfer_operator.kube.server import NAMESPACE_ENDS, ApiError, load_configuration, parse_answer

DENIED = 'admission webhook "w" denied the request: not this image'
QUOTA = "exceeded quota: q, requested: pods=1, used: pods=2, limited: pods=2"
UNSIGNED = "its team has exceeded quota of unsigned images"


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (400, "Pod in version v1 cannot be handled as a Pod"),
        (422, "denied by ValidatingAdmissionPolicy"),
        (413, "Request entity too large: limit is 3145728"),
        (403, 'pods "x" is forbidden: violates PodSecurity "restricted:latest": hostPath volumes'),
        (403, 'pods "x" is forbidden: maximum memory usage per Container is 2Gi, but limit is 24Gi'),
        (403, 'pods "x" is forbidden: no PriorityClass with name nope was found'),
        (403, 'pods "x" is forbidden: pod rejected: RuntimeClass "nope" not found'),
        (403, 'pods "x" is forbidden: failed quota: q: must specify limits.cpu for: worker'),
        (403, f"pods \"x\" is forbidden: ValidatingAdmissionPolicy 'p' denied request: {UNSIGNED}"),
        (403, f'admission webhook "w" denied the request: {UNSIGNED}'),
        (403, f'admission webhook "w" denied the request: pods "x" is forbidden: {QUOTA}'),
        (403, f"pods \"x\" is forbidden: ValidatingAdmissionPolicy 'p' denied request: {QUOTA}"),
        *((status, DENIED) for status in (403, 429, 500, 503)),
    ],
)
def test_errors_about_an_objects_content_are_refusals(status: int, said: str) -> None:
    """Once, status 403 did not count as a refusal. So the errors in these cases ended a group."""
    error = ApiError("POST /pods", status=status, answer_message=said)
    assert error.blames_object
    assert error.is_refusal


@pytest.mark.parametrize(
    ("status", "said", "causes"),
    [
        (
            403,
            f'pods "x" is forbidden: {QUOTA}',
            (),
        ),
        (403, 'pods "x" is forbidden: unable to create new content in namespace n', (NAMESPACE_ENDS,)),
        (400, "admission webhook w does not support dry run", ()),
        (500, 'failed calling webhook "w": connection refused', ()),
    ],
)
def test_refusals_for_other_reasons_than_the_content_do_not_blame_the_object(
    status: int, said: str, causes: tuple[str, ...]
) -> None:
    error = ApiError("POST /pods", status=status, answer_message=said, causes=frozenset(causes))
    assert not error.blames_object
    assert error.is_refusal


@pytest.mark.parametrize("status", [0, 401, 409, 429, 500, 502, 503, 504])
def test_errors_of_an_unavailable_api_server_do_not_count_as_refusals(status: int) -> None:
    error = ApiError("POST /pods", status=status, answer_message="try again")
    assert not error.blames_object
    assert not error.is_refusal


@pytest.mark.parametrize(
    "text",
    [
        "<html>maintenance</html>",
        "",
        "[]",
        "{}",
        '{"kind": "Status", "apiVersion": "v1"}',
        "[" * 100_000 + "]" * 100_000,
        b'{"kind": "\xff"}',
    ],
)
def test_invalid_answers_raise_api_error(text: str | bytes) -> None:
    """Once, such an answer raised another error, which ended the watch and so the operator's process."""
    with pytest.raises(ApiError, match=r"GET /pods: the answer must be .* \(got ") as caught:
        parse_answer("GET /pods", text, required_keys=("kind", "metadata"))
    assert not caught.value.is_refusal
    assert len(caught.value.message) < 600


def test_a_valid_answer_is_parsed() -> None:
    answer = {"kind": "Pod", "metadata": {"name": "p"}}
    assert parse_answer("GET /pods", json.dumps(answer), required_keys=("kind", "metadata")) == answer


async def test_a_pod_uses_no_proxy_to_the_api_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "kubeconfig"
    cluster = {"name": "c", "cluster": {"server": "https://10.96.0.1"}}
    context = {"name": "c", "context": {"cluster": "c", "user": "u"}}
    user = {"name": "u", "user": {"token": "t"}}
    file.write_text(
        yaml.safe_dump(
            {"clusters": [cluster], "contexts": [context], "users": [user], "current-context": "c"}
        )
    )
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
    monkeypatch.setenv("NO_PROXY", "10.96.0.0/12")
    outside = await load_configuration(str(file))
    assert outside.client_session_kwargs == {"trust_env": True}
    monkeypatch.setattr(config, "load_incluster_config", lambda client_configuration: None)
    inside = await load_configuration()
    assert inside.client_session_kwargs == {"trust_env": False}
