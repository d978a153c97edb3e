"""Formats of names, label values and map keys in pods, as Kubernetes validates them. Pure.

The API server checks these formats when a user applies a resource. So a value that Kubernetes would refuse in
a pod is refused before any pod is created. The patterns are those of
`k8s.io/apimachinery/pkg/util/validation` and `pkg/apis/core/validation`, and mean the same in RE2 (CEL),
Python and Rust (pydantic).
"""

import re
from typing import Annotated, Any, Final

from pydantic import AfterValidator, Field, ValidationInfo
from pydantic_core import PydanticCustomError

from heteroinfer_operator.api.base import AS_STORED, Model, ValidationRule, cel_text

_DNS_LABEL: Final = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
SUBDOMAIN: Final = f"{_DNS_LABEL}([.]{_DNS_LABEL})*"
_NAME: Final = "[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
"""Name part of a label key, without its prefix; also a label value."""
LABEL_KEY: Final = f"({SUBDOMAIN}/)?{_NAME}"
LABEL_VALUE: Final = f"({_NAME})?"
_ANNOTATION_KEY: Final = f"({SUBDOMAIN.replace('a-z', 'A-Za-z')}/)?{_NAME}"
RESOURCE_NAME: Final = f"cpu|memory|ephemeral-storage|hugepages-[0-9]+(k|M|G|Ki|Mi|Gi)|{SUBDOMAIN}/{_NAME}"
"""Name of a container's resource. Resources that are not Kubernetes' own have a prefix."""
MAX_KEY_LENGTH: Final = 317
"""Maximum number of characters of a label's key: an optional prefix of 253, a slash, and a name of 63."""
_MAX_PREFIX_LENGTH: Final = 253


def _pattern_settings(pattern: str, *, max_length: int) -> Any:
    """Returns the settings of a text field with a pattern, which stored resources need not match.

    Args:
        max_length: maximum number of characters of the text.
    """

    def check(value: str, info: ValidationInfo) -> str:
        """Raises an error if a new value does not match the pattern. Does not check a stored value."""
        if info.context != AS_STORED and re.fullmatch(pattern, value) is None:
            message = f"must match the pattern {pattern}, as in a Pod"
            raise PydanticCustomError("pattern", "{message}", {"message": message})
        return value

    extra: dict[str, Any] = {"pattern": f"^({pattern})$"}
    return Field(max_length=max_length, json_schema_extra=extra), AfterValidator(check)


LabelKey = Annotated[str, *_pattern_settings(LABEL_KEY, max_length=MAX_KEY_LENGTH)]
"""Key of a label, as the value of a field. `label_keys_rule` checks keys of maps."""
LabelKeyOrNone = Annotated[str, *_pattern_settings(f"({LABEL_KEY})?", max_length=MAX_KEY_LENGTH)]
LabelValue = Annotated[str, *_pattern_settings(LABEL_VALUE, max_length=63)]
Labels = Annotated[dict[str, LabelValue], Field(max_length=32)]
NamespaceName = Annotated[str, *_pattern_settings(_DNS_LABEL, max_length=63)]
ClassName = Annotated[str, *_pattern_settings(SUBDOMAIN, max_length=253)]
"""Name of a RuntimeClass or StorageClass."""
ClassNameOrNone = Annotated[str, *_pattern_settings(f"({SUBDOMAIN})?", max_length=253)]
"""Name of a PriorityClass, or ""."""
OperatorClass = NamespaceName
"""Class of the operator that serves a resource: a DNS label."""
QueueName = Annotated[str, *_pattern_settings(LABEL_VALUE, max_length=253)]
"""Name of a queue, which becomes a label value of the pods, or ""."""
KeyOfObject = Annotated[str, *_pattern_settings("[.]?[-_a-zA-Z0-9][-._a-zA-Z0-9]*", max_length=253)]
"""Key of a Secret or a ConfigMap."""
Image = Annotated[str, *_pattern_settings("[!-~]+", max_length=512)]
"""Reference of a container image, without spaces."""


def keys_rule(name: str, attribute: str, message: str, pattern: str) -> ValidationRule:
    """Returns the rule that all keys of a map match a pattern, which a structural schema cannot express.

    The message contains the first invalid key.

    Args:
        name: name of the field in the resource.
        attribute: name of the field in Python.
        message: requirement on the keys.
        pattern: pattern without anchors.
    """
    is_valid_cel = (
        f"k.size() <= {MAX_KEY_LENGTH} && k.indexOf('/') <= {_MAX_PREFIX_LENGTH} "
        f"&& k.matches({cel_text(f'^({pattern})$')})"
    )

    def invalid_keys(model: Model) -> list[str]:
        return [key for key in getattr(model, attribute) or () if not _is_valid_key(key, pattern)]

    return ValidationRule(
        field=name,
        cel=f"!has(self.{name}) || self.{name}.all(k, {is_valid_cel})",
        holds=lambda model: not invalid_keys(model),
        message=message,
        fix="Change or remove the key",
        got="%s",
        got_cel=(f"self.{name}.filter(k, !({is_valid_cel}))[0]",),
        got_values=lambda model: (invalid_keys(model)[0],),
    )


_KEY_MESSAGE: Final = (
    "each key must be NAME or PREFIX/NAME, with a NAME of at most 63 letters, digits, '-', '_' and '.'"
)


def label_keys_rule(name: str, attribute: str) -> ValidationRule:
    """Returns the rule that the keys of a map must be valid keys of labels."""
    return keys_rule(name, attribute, _KEY_MESSAGE, LABEL_KEY)


def annotation_keys_rule(name: str, attribute: str) -> ValidationRule:
    """Returns the rule that the keys of a map must be valid keys of annotations.

    The prefix of an annotation's key may have capitals, unlike the prefix of a label's key.
    """
    return keys_rule(name, attribute, _KEY_MESSAGE, _ANNOTATION_KEY)


def _is_valid_key(key: str, pattern: str) -> bool:
    """Reports whether a key matches a pattern and the limits of Kubernetes for lengths."""
    return (
        len(key) <= MAX_KEY_LENGTH
        and key.find("/") <= _MAX_PREFIX_LENGTH
        and re.fullmatch(pattern, key) is not None
    )
