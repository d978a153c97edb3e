"""Removes secrets from objects and logs that a user hands to others. Pure."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

LEFT_OUT: Final = "(left out)"

_SECRET_NAME: Final = re.compile(
    r"TOKEN$|API_?KEY|SECRET|PASSW|CREDENTIAL|PRIVATE_KEY|ACCESS_KEY|GROUP_KEY", re.IGNORECASE
)
"""Names of environment variables whose value may be a secret."""
_SECRET_OPTION: Final = re.compile(r"--(?:api-key|hf-token|[\w-]*password|[\w-]*secret)")
_OPTION_IN_TEXT: Final = re.compile(rf"({_SECRET_OPTION.pattern})([=\s\"',\\]+)([^\s\"',\\]+)")
_TOKEN_IN_TEXT: Final = re.compile(
    r"\bhf_[A-Za-z0-9]{16,}|\b[Bb]earer [A-Za-z0-9._~+/=-]{8,}|\bsk-[A-Za-z0-9_-]{16,}"
)
_URL_PASSWORD: Final = re.compile(r"(\b[a-z][a-z0-9+.-]*://[^\s/:@]*):[^\s/@]+@")
_LAST_APPLIED: Final = "kubectl.kubernetes.io/last-applied-configuration"


def redact_object(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a Kubernetes object without secrets, and without the copies that the API server keeps of it.

    Removes the values of variables with a secret's name, of options with a secret, and of tokens in texts.
    """
    value = _redact(manifest)
    metadata = value.get("metadata", {})
    metadata.pop("managedFields", None)
    if metadata.get("annotations"):
        metadata["annotations"].pop(_LAST_APPLIED, None)
    return dict(value)


def redact_text(text: str) -> str:
    """Returns a log or another text without the values of secret options, tokens and passwords of URLs."""
    text = _OPTION_IN_TEXT.sub(rf"\1\2{LEFT_OUT}", text)
    text = _TOKEN_IN_TEXT.sub(LEFT_OUT, text)
    return _URL_PASSWORD.sub(rf"\1:{LEFT_OUT}@", text)


def _redact(value: Any) -> Any:
    if isinstance(value, Mapping):
        found = {key: _redact(each) for key, each in value.items()}
        if isinstance(found.get("value"), str) and _SECRET_NAME.search(str(found.get("name", ""))):
            found["value"] = LEFT_OUT
        return found
    if isinstance(value, Sequence) and not isinstance(value, str):
        return _redact_list(value)
    return redact_text(value) if isinstance(value, str) else value


def _redact_list(items: Sequence[Any]) -> list[Any]:
    """Redacts an item that follows a secret option: arguments are often separate items."""
    found: list[Any] = []
    follows = False
    for item in items:
        found.append(LEFT_OUT if follows and isinstance(item, str) else _redact(item))
        follows = isinstance(item, str) and _SECRET_OPTION.fullmatch(item) is not None
    return found
