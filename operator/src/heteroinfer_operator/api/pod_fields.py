"""Formats of names, label values and map keys in pods, as Kubernetes validates them. Pure.

A value that Kubernetes would refuse in a pod is refused in the resource, before any pod is created. The
patterns are those of `k8s.io/apimachinery/pkg/util/validation` and `pkg/apis/core/validation`. They mean the
same in RE2, Python and Rust.
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
"""An optional prefix of 253 and a name of 63 characters."""
_MAX_PREFIX_LENGTH: Final = 253


def _text(pattern: str, *, most: int) -> Any:
    """Returns the settings of a text with this pattern. The pattern is not checked in stored resources."""

    def check(value: str, info: ValidationInfo) -> str:
        if info.context != AS_STORED and re.fullmatch(pattern, value) is None:
            message = f"must match the pattern {pattern}, as in a Pod"
            raise PydanticCustomError("pattern", "{message}", {"message": message})
        return value

    extra: dict[str, Any] = {"pattern": f"^({pattern})$"}
    return Field(max_length=most, json_schema_extra=extra), AfterValidator(check)


LabelKey = Annotated[str, *_text(LABEL_KEY, most=MAX_KEY_LENGTH)]
"""Key of a label in a field of its own. For keys of maps see `label_keys_rule`."""
LabelKeyOrNone = Annotated[str, *_text(f"({LABEL_KEY})?", most=MAX_KEY_LENGTH)]
LabelValue = Annotated[str, *_text(LABEL_VALUE, most=63)]
Labels = Annotated[dict[str, LabelValue], Field(max_length=32)]
NamespaceName = Annotated[str, *_text(_DNS_LABEL, most=63)]
ClassName = Annotated[str, *_text(SUBDOMAIN, most=253)]
"""Name of a RuntimeClass or StorageClass."""
ClassNameOrNone = Annotated[str, *_text(f"({SUBDOMAIN})?", most=253)]
"""Name of a PriorityClass, or ""."""
OperatorClass = NamespaceName
"""Class of the operator that serves a resource: a DNS label."""
QueueName = Annotated[str, *_text(LABEL_VALUE, most=253)]
"""Name of a queue, which becomes a label value of the pods, or ""."""
KeyOfObject = Annotated[str, *_text("[.]?[-_a-zA-Z0-9][-._a-zA-Z0-9]*", most=253)]
"""Key of a Secret or a ConfigMap."""
Image = Annotated[str, *_text("[!-~]+", most=512)]
"""Reference of a container image, without spaces."""


def keys_rule(name: str, attribute: str, message: str, pattern: str) -> ValidationRule:
    """Returns the rule that all keys of a map match a pattern, which a structural schema cannot express.

    Args:
        message: requirement on the keys.
        pattern: without anchors.
    """
    good = (
        f"k.size() <= {MAX_KEY_LENGTH} && k.indexOf('/') <= {_MAX_PREFIX_LENGTH} "
        f"&& k.matches({cel_text(f'^({pattern})$')})"
    )

    def bad_keys(model: Model) -> list[str]:
        return [key for key in getattr(model, attribute) or () if not _is_key(key, pattern)]

    return ValidationRule(
        field=name,
        cel=f"!has(self.{name}) || self.{name}.all(k, {good})",
        holds=lambda model: not bad_keys(model),
        message=message,
        fix="Change or remove the key",
        got="%s",
        got_cel=(f"self.{name}.filter(k, !({good}))[0]",),
        got_values=lambda model: (bad_keys(model)[0],),
    )


_KEY_MESSAGE: Final = (
    "each key must be NAME or PREFIX/NAME, with a NAME of at most 63 letters, digits, '-', '_' and '.'"
)


def label_keys_rule(name: str, attribute: str) -> ValidationRule:
    """Returns the rule that the keys of a map are label keys."""
    return keys_rule(name, attribute, _KEY_MESSAGE, LABEL_KEY)


def annotation_keys_rule(name: str, attribute: str) -> ValidationRule:
    """Returns the rule that the keys of a map are annotation keys, whose prefix may have capitals."""
    return keys_rule(name, attribute, _KEY_MESSAGE, _ANNOTATION_KEY)


def _is_key(key: str, pattern: str) -> bool:
    return (
        len(key) <= MAX_KEY_LENGTH
        and key.find("/") <= _MAX_PREFIX_LENGTH
        and re.fullmatch(pattern, key) is not None
    )
