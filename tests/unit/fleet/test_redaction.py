"""A support bundle has no secrets in variables, options, texts or URLs."""

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


def test_redaction_keeps_all_other_text() -> None:
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


@pytest.mark.parametrize(
    "text",
    [
        "--api_key hidden",
        "--hf_token=hidden",
        "--api-key one hidden",
        '--api-key="my hidden"',
        "{'api_key': ['hidden']}",
        "Namespace(api_key='hidden', hf_token='hidden')",
        "HF_TOKEN=hidden VLLM_API_KEY='hidden'",
        '"hf_token": "hidden"',
        "Authorization: Basic hidden",
        "BEARER hiddenhidden",
        "Bearer \thiddenhidden",
        "https://host/file?X-Amz-Signature=hidden&token=hidden",
        "https://hidden@host/path",
        "HTTPS://user:hidden@host",
        "https://user:hid/den@host",
        "https://user:p@hidden@host",
    ],
)
def test_texts_lose_secrets_in_every_spelling(text: str) -> None:
    assert "hidden" not in redact_text(text)
    assert "hid/den" not in redact_text(text)


@pytest.mark.parametrize("name", ["HF_TOKEN_2", "DB_PWD", "S3_KEY", "NGC_AUTH", "CONNECTION_STRING"])
def test_values_of_variables_that_may_be_secret_are_removed(name: str) -> None:
    env, args = [{"name": name, "value": "hidden"}], ["--api-key", "a", "hidden"]
    redacted = redact_object({"env": env, "args": args})
    assert "hidden" not in json.dumps(redacted)


@pytest.mark.parametrize(
    "text",
    [
        "max_tokens=16, tokenizer='AutoTokenizer', num_tokens: 5, --max-num-batched-tokens 8192",
        "hf://org/model@main file:///models/a http://[fd00::1]:8000/v1 registry:5000/image@sha256:0123",
    ],
)
def test_words_that_only_resemble_secrets_stay(text: str) -> None:
    assert redact_text(text) == text


def test_redaction_keeps_lines_after_a_secret_option() -> None:
    assert redact_text("args --api-key hidden\nnext line") == f"args --api-key {LEFT_OUT} \nnext line"
