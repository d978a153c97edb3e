"""Removes secrets from objects and logs, so that a user can send these to others. Pure."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

LEFT_OUT: Final = "(left out)"

_WORDS: Final = (
    r"(?:api[-_]?key|access[-_]?key|private[-_]?key|group[-_]?key|token|secret|passw(?:or)?d|passphrase"
    r"|credentials?)"
)
"""Pattern of words that mean a secret."""
_PUBLIC_VARIABLE: Final = re.compile(
    r"(?:HETEROINFER|VLLM|NCCL|GLOO|TORCH|OMP|KMP|MKL|CUDA|NVIDIA|TRITON|HF_HUB|TRANSFORMERS|PYTHON)_\w+"
    r"|HF_HOME|HF_ENDPOINT|HOME|PATH|TZ|LANG|TMPDIR|[A-Za-z_]*_PROXY|[a-z]+_proxy"
)
"""Names of environment variables with public values. The values of all other variables are removed."""
_SECRET_NAME: Final = re.compile(rf"{_WORDS}(?:[-_]?\d+)?$|{_WORDS}_", re.IGNORECASE)
"""Part of a variable's name that means that the value is a secret, even if _PUBLIC_VARIABLE matches."""
_SECRET_OPTION: Final = re.compile(rf"--(?:[\w-]*[-_])?{_WORDS}", re.IGNORECASE)
"""Command-line option whose value is a secret, such as --api-key."""
_OPTION_IN_TEXT: Final = re.compile(
    rf"({_SECRET_OPTION.pattern})([=\s\"',\\]+)((?:(?!--)[^\s\"',\\\]]+[ \t\"',\\]*)+)", re.IGNORECASE
)
"""A secret option in a text: the option, the separator, and its values up to the next option."""
_VALUE_IN_TEXT: Final = re.compile(
    rf"(\b(?:\w+[-_])?{_WORDS}(?:_\d+)?\b[\"']?\s*[=:]\s*)"
    r"(\[[^\]]{0,500}\]|\"[^\"]{0,500}\"|'[^']{0,500}'|[^\s\"',;&)}\]]+)",
    re.IGNORECASE,
)
"""A name that means a secret, followed by its value, such as `password: x` or `HUB_TOKEN=x`."""
_HEADER_IN_TEXT: Final = re.compile(
    r"(\bauthorization[\"']?\s*[=:]\s*[\"']?)(?:[a-z]+\s+)?[^\s\"',]+|(\bbearer\s+)[A-Za-z0-9._~+/=-]{8,}",
    re.IGNORECASE,
)
"""An Authorization header, or the word Bearer with a token."""
_TOKEN_IN_TEXT: Final = re.compile(
    r"\bhf_[A-Za-z0-9]{16,}|\bsk-[A-Za-z0-9_-]{16,}|\bgh[a-z]_[A-Za-z0-9]{16,}|\bAKIA[A-Z0-9]{12,}"
    r"|X-Amz-(?:Signature|Credential|Security-Token)=[^&\s\"']+"
)
"""Tokens that are recognizable without a name: of Hugging Face, OpenAI, GitHub and AWS."""
_URL_USER: Final = re.compile(
    r"(\b[a-z][a-z0-9+.-]{0,20}://)(?:[^\s/:@\"']{0,200}:[^\s\"']{0,500}|[^\s/:@\"']{1,500})@(?=[^\s/\"'@])",
    re.IGNORECASE,
)
"""User and password in a URL.

The length of each part is limited; otherwise a search in a long line takes quadratic time.
"""
_LAST_APPLIED: Final = "kubectl.kubernetes.io/last-applied-configuration"


def redact_object(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a Kubernetes object without secrets, managedFields and kubectl's copy of the object.

    Removes the values of environment variables that are not known to be public, the values of options and
    fields with the name of a secret, and tokens in texts.
    """
    value = _redact(manifest)
    metadata = value.get("metadata", {})
    metadata.pop("managedFields", None)
    if metadata.get("annotations"):
        metadata["annotations"].pop(_LAST_APPLIED, None)
    return dict(value)


def redact_text(text: str) -> str:
    """Returns a text, such as a log, without secrets.

    Removes the values of options and names that mean a secret, tokens, and users and passwords in URLs.
    """
    text = _OPTION_IN_TEXT.sub(rf"\1\2{LEFT_OUT} ", text)
    text = _HEADER_IN_TEXT.sub(lambda found: f"{found[1] or found[2]}{LEFT_OUT}", text)
    text = _VALUE_IN_TEXT.sub(rf"\1{LEFT_OUT}", text)
    text = _TOKEN_IN_TEXT.sub(LEFT_OUT, text)
    return _URL_USER.sub(rf"\1{LEFT_OUT}@", text)


def _redact(value: Any) -> Any:
    """Returns a JSON value without secrets, including the values in it."""
    if isinstance(value, Mapping):
        redacted = {key: _redact_field(str(key), each) for key, each in value.items()}
        name = redacted.get("name")  # an environment variable has its name and its value in two fields
        if isinstance(redacted.get("value"), str) and isinstance(name, str) and not _is_public(name):
            redacted["value"] = LEFT_OUT
        return redacted
    if isinstance(value, Sequence) and not isinstance(value, str):
        return _redact_list(value)
    return redact_text(value) if isinstance(value, str) else value


def _is_public(variable: str) -> bool:
    return _PUBLIC_VARIABLE.fullmatch(variable) is not None and _SECRET_NAME.search(variable) is None


def _redact_field(key: str, value: Any) -> Any:
    """Returns LEFT_OUT for a text whose key means a secret; otherwise the value without its secrets."""
    is_secret = isinstance(value, str) and re.fullmatch(rf"(?:\w+[-_])?{_WORDS}", key, re.IGNORECASE)
    return LEFT_OUT if is_secret else _redact(value)


def _redact_list(items: Sequence[Any]) -> list[Any]:
    """Returns a list without secrets. All texts between a secret option and the next option are secrets."""
    redacted: list[Any] = []
    follows_secret_option = False
    for item in items:
        is_text = isinstance(item, str)
        if is_text and item.startswith("--"):
            follows_secret_option = _SECRET_OPTION.fullmatch(item) is not None
            redacted.append(_redact(item))
        else:
            redacted.append(LEFT_OUT if is_text and follows_secret_option else _redact(item))
    return redacted
