"""What Kubernetes takes in the fields of a pod that a user may set: names, values and keys of maps. Pure.

What it would refuse is refused with the resource, not once pods are to be made of it. The patterns are
those of `k8s.io/apimachinery/pkg/util/validation` and `pkg/apis/core/validation`; RE2, Python and Rust
understand them alike.
"""

import re
from typing import Annotated, Any, Final

from pydantic import AfterValidator, Field, ValidationInfo
from pydantic_core import PydanticCustomError

from heteroinfer_operator.api.base import AS_STORED, Model, ValidationRule, cel_text

_DNS_LABEL: Final = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
SUBDOMAIN: Final = f"{_DNS_LABEL}([.]{_DNS_LABEL})*"
_NAME: Final = "[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
"""Of a label, without its prefix; a label's value, too."""
LABEL_KEY: Final = f"({SUBDOMAIN}/)?{_NAME}"
LABEL_VALUE: Final = f"({_NAME})?"
_ANNOTATION_KEY: Final = f"({SUBDOMAIN.replace('a-z', 'A-Za-z')}/)?{_NAME}"
RESOURCE_NAME: Final = f"cpu|memory|ephemeral-storage|hugepages-[0-9]+(k|M|G|Ki|Mi|Gi)|{SUBDOMAIN}/{_NAME}"
"""Of a container: what is no resource of Kubernetes' own has a prefix."""
MAX_KEY_LENGTH: Final = 317
"""An optional prefix of 253 and a name of 63 characters."""
_MAX_PREFIX_LENGTH: Final = 253


def _text(pattern: str, *, most: int) -> Any:
    """Returns the settings of a text of this pattern, which is not asked of what is stored."""

    def check(value: str, info: ValidationInfo) -> str:
        if info.context != AS_STORED and re.fullmatch(pattern, value) is None:
            message = f"expected what pods have there, of the pattern {pattern}"
            raise PydanticCustomError("pattern", "{message}", {"message": message})
        return value

    extra: dict[str, Any] = {"pattern": f"^({pattern})$"}
    return Field(max_length=most, json_schema_extra=extra), AfterValidator(check)


LabelKey = Annotated[str, *_text(LABEL_KEY, most=MAX_KEY_LENGTH)]
"""A label's key, anywhere but in a map."""
LabelKeyOrNone = Annotated[str, *_text(f"({LABEL_KEY})?", most=MAX_KEY_LENGTH)]
LabelValue = Annotated[str, *_text(LABEL_VALUE, most=63)]
Labels = Annotated[dict[str, LabelValue], Field(max_length=32)]
NamespaceName = Annotated[str, *_text(_DNS_LABEL, most=63)]
ClassName = Annotated[str, *_text(SUBDOMAIN, most=253)]
"""Name of a RuntimeClass or StorageClass."""
ClassNameOrNone = Annotated[str, *_text(f"({SUBDOMAIN})?", most=253)]
"""Name of a PriorityClass, or ""."""
OperatorClass = NamespaceName
"""Which operator serves a resource: not of pods, but with the same characters."""
QueueName = Annotated[str, *_text(LABEL_VALUE, most=253)]
"""Name of a queue, which pods have as a label, or ""."""
KeyOfObject = Annotated[str, *_text("[.]?[-_a-zA-Z0-9][-._a-zA-Z0-9]*", most=253)]
"""Key of a Secret or a ConfigMap."""
Image = Annotated[str, *_text("[!-~]+", most=512)]
"""A container image: without blanks."""


def keys_rule(name: str, attribute: str, what: str, pattern: str) -> ValidationRule:
    """Returns the rule that a map has keys of this pattern only: a structural schema has no word for it.

    Args:
        what: a key is, for people.
        pattern: without anchors.
    """
    good = (
        f"k.size() <= {MAX_KEY_LENGTH} && k.indexOf('/') <= {_MAX_PREFIX_LENGTH} "
        f"&& k.matches({cel_text(f'^({pattern})$')})"
    )

    def bad_keys(model: Model) -> list[str]:
        return [key for key in getattr(model, attribute) or () if not _is_key(key, pattern)]

    return ValidationRule(
        cel=f"!has(self.{name}) || self.{name}.all(k, {good})",
        holds=lambda model: not bad_keys(model),
        message=f"{name}: expected {what}, as pods have it; change or remove the key",
        got="%s",
        got_cel=(f"self.{name}.filter(k, !({good}))[0]",),
        got_values=lambda model: (bad_keys(model)[0],),
    )


def label_keys_rule(name: str, attribute: str) -> ValidationRule:
    """Returns the rule that a map has labels for keys."""
    words = "each key to be a name of at most 63 letters, digits, '-', '_' and '.', or PREFIX/NAME"
    return keys_rule(name, attribute, words, LABEL_KEY)


def annotation_keys_rule(name: str, attribute: str) -> ValidationRule:
    """Returns the rule that a map has annotations for keys: as of labels, with capitals in the prefix."""
    words = "each key to be a name of at most 63 letters, digits, '-', '_' and '.', or PREFIX/NAME"
    return keys_rule(name, attribute, words, _ANNOTATION_KEY)


def _is_key(key: str, pattern: str) -> bool:
    return (
        len(key) <= MAX_KEY_LENGTH
        and key.find("/") <= _MAX_PREFIX_LENGTH
        and re.fullmatch(pattern, key) is not None
    )
