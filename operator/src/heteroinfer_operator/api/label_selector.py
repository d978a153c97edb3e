"""Selectors of labels, as pods have them. Pure."""

from enum import StrEnum
from typing import Annotated, ClassVar

from pydantic import Field

from heteroinfer_operator.api.base import ATOMIC, Model, ValidationRule, cel_text
from heteroinfer_operator.api.pod_fields import LabelKey, Labels, LabelValue, label_keys_rule


class LabelOperator(StrEnum):
    """Operators of a label selector."""

    IN = "In"
    NOT_IN = "NotIn"
    EXISTS = "Exists"
    DOES_NOT_EXIST = "DoesNotExist"


def values_rules(*with_values: str) -> tuple[ValidationRule, ...]:
    """Returns the rules that operators have values exactly if they compare with some."""
    listed = f"[{', '.join(map(cel_text, with_values))}]"
    return (
        ValidationRule(
            cel=f"!(self.operator in {listed}) || (has(self.values) && self.values.size() > 0)",
            message=f"values: expected at least one for operator {' or '.join(with_values)}; add it",
            holds=lambda own: own.operator not in with_values or bool(own.values),
        ),
        ValidationRule(
            cel=f"self.operator in {listed} || !has(self.values) || self.values.size() == 0",
            message="values: expected none for operator Exists or DoesNotExist; remove them",
            holds=lambda own: own.operator in with_values or not own.values,
        ),
    )


class LabelRequirement(Model):
    """A requirement on an object's label."""

    rules: ClassVar[tuple[ValidationRule, ...]] = values_rules("In", "NotIn")

    key: LabelKey
    """Label."""
    operator: LabelOperator
    """How the values are compared."""
    values: Annotated[tuple[LabelValue, ...], Field(max_length=32)] | None = None
    """Values to compare with."""


LabelRequirements = Annotated[tuple[LabelRequirement, ...], Field(max_length=16, json_schema_extra=ATOMIC)]


class LabelSelector(Model):
    """Which objects are meant."""

    rules: ClassVar[tuple[ValidationRule, ...]] = (label_keys_rule("matchLabels", "match_labels"),)

    match_labels: Labels | None = None
    """Labels that must be equal."""
    match_expressions: LabelRequirements | None = None
    """Requirements that must hold."""
