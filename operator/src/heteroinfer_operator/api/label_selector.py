"""Label selectors, as in a Pod. Pure."""

from enum import StrEnum
from typing import Annotated, ClassVar

from pydantic import Field

from heteroinfer_operator.api.base import ATOMIC, Model, RuleReason, ValidationRule, cel_text
from heteroinfer_operator.api.pod_fields import LabelKey, Labels, LabelValue, label_keys_rule


class LabelOperator(StrEnum):
    """Operators of a label selector."""

    IN = "In"
    NOT_IN = "NotIn"
    EXISTS = "Exists"
    DOES_NOT_EXIST = "DoesNotExist"


def values_rules(*with_values: str) -> tuple[ValidationRule, ...]:
    """Returns the rules that `values` is set for the operators `with_values`, and empty for the others."""
    with_values_cel = f"[{', '.join(map(cel_text, with_values))}]"
    return (
        ValidationRule(
            field="values",
            reason=RuleReason.REQUIRED,
            cel=f"!(self.operator in {with_values_cel}) || (has(self.values) && self.values.size() > 0)",
            message=f"must have at least one entry for operator {' or '.join(with_values)}",
            holds=lambda term: term.operator not in with_values or bool(term.values),
        ),
        ValidationRule(
            field="values",
            reason=RuleReason.FORBIDDEN,
            cel=f"self.operator in {with_values_cel} || !has(self.values) || self.values.size() == 0",
            message="must be empty for operator Exists or DoesNotExist",
            holds=lambda term: term.operator in with_values or not term.values,
        ),
    )


class LabelRequirement(Model):
    """A requirement on a label of an object."""

    rules: ClassVar[tuple[ValidationRule, ...]] = values_rules("In", "NotIn")

    key: LabelKey
    """Key of the label."""
    operator: LabelOperator
    """Relation between the label and values. In: the label has one of the values. NotIn: the label has none
    of the values. Exists: the object has the label. DoesNotExist: the object lacks the label."""
    values: Annotated[tuple[LabelValue, ...], Field(max_length=32)] | None = None
    """Values for operator In or NotIn. Default: none."""


LabelRequirements = Annotated[tuple[LabelRequirement, ...], Field(max_length=16, json_schema_extra=ATOMIC)]


class LabelSelector(Model):
    """Selection of objects by their labels. All requirements must hold."""

    rules: ClassVar[tuple[ValidationRule, ...]] = (label_keys_rule("matchLabels", "match_labels"),)

    match_labels: Labels | None = None
    """Labels that an object must have with the same values. Default: none."""
    match_expressions: LabelRequirements | None = None
    """Requirements on labels that an object must meet. Default: none."""
