"""A support bundle has no secrets: values of variables, options, tokens, passwords of URLs."""

import json

import pytest

from heteroinfer_operator.fleet.redaction import LEFT_OUT, redact_object, redact_text


def test_variables_with_a_secrets_name_lose_their_value() -> None:
    env = [
        {"name": "HF_TOKEN", "value": "hidden"},
        {"name": "VLLM_API_KEY", "value": "hidden"},
        {"name": "DB_PASSWORD", "value": "hidden"},
        {"name": "OMP_NUM_THREADS", "value": "8"},
        {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "team", "key": "token"}}},
    ]
    redacted = redact_object({"spec": {"containers": [{"env": env}]}})
    (container,) = redacted["spec"]["containers"]
    assert [each.get("value") for each in container["env"]] == [LEFT_OUT] * 3 + ["8", None]
    assert container["env"][4] == env[4], "a reference to a Secret is not a secret"


@pytest.mark.parametrize(
    "args",
    [
        ["--api-key", "hidden"],
        ["--api-key=hidden"],
        ["--max-num-seqs", "8", "--ssl-keyfile-password", "hidden"],
    ],
)
def test_options_lose_their_secret_in_lists_and_texts(args: list[str]) -> None:
    redacted = redact_object({"spec": {"args": args}, "data": {"plan.json": json.dumps({"args": args})}})
    assert "hidden" not in json.dumps(redacted)
    assert "hidden" not in redact_text(" ".join(args))


@pytest.mark.parametrize(
    "text",
    [
        "Authorization: Bearer hidden.hidden",
        "token hf_hiddenhiddenhidden",
        "proxy http://user:hidden@proxy:3128",
        "key sk-hiddenhiddenhidden",
    ],
)
def test_texts_lose_tokens_and_passwords(text: str) -> None:
    assert "hidden" not in redact_text(text)
    assert LEFT_OUT in redact_text(text)


def test_everything_else_stays() -> None:
    text = "--max-num-batched-tokens 8192 of hf://org/model at http://127.0.0.1:8000/v1, hf_hub"
    assert redact_text(text) == text
    manifest = {
        "metadata": {"name": "a", "labels": {"k": "v"}},
        "spec": {"replicas": 2, "list": [1, None, True]},
    }
    assert redact_object(manifest) == manifest


def test_copies_of_the_object_in_its_metadata_are_removed() -> None:
    annotations = {"kubectl.kubernetes.io/last-applied-configuration": "{}", "own": "kept"}
    manifest = {"metadata": {"managedFields": [{}], "annotations": annotations}}
    assert redact_object(manifest) == {"metadata": {"annotations": {"own": "kept"}}}
