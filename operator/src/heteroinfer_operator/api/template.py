"""What a user may set on the pods of a role: an allow-list of the pod template.

Whatever isn't here belongs to the plan and to the manifests; unknown fields are refused. Pure.
"""

from enum import StrEnum
from typing import Annotated, ClassVar

from pydantic import Field

from heteroinfer_contract import names
from heteroinfer_operator.api.base import ATOMIC, Model, ObjectName, Text, ValidationRule, cel_text, map_list

LabelKey = Annotated[str, Field(min_length=1, max_length=317)]
"""A label or annotation key: an optional prefix of 253 and a name of 63 characters."""
LabelValue = Annotated[str, Field(max_length=63)]
Labels = Annotated[dict[LabelKey, LabelValue], Field(max_length=32)]


class NodeOperator(StrEnum):
    """Operators of a node selector."""

    IN = "In"
    NOT_IN = "NotIn"
    EXISTS = "Exists"
    DOES_NOT_EXIST = "DoesNotExist"
    GT = "Gt"
    LT = "Lt"


class LabelOperator(StrEnum):
    """Operators of a label selector."""

    IN = "In"
    NOT_IN = "NotIn"
    EXISTS = "Exists"
    DOES_NOT_EXIST = "DoesNotExist"


class TolerationOperator(StrEnum):
    """How a toleration matches a taint's value."""

    EXISTS = "Exists"
    EQUAL = "Equal"


class TaintEffect(StrEnum):
    """What a taint does."""

    NO_SCHEDULE = "NoSchedule"
    PREFER_NO_SCHEDULE = "PreferNoSchedule"
    NO_EXECUTE = "NoExecute"


class Toleration(Model):
    """A taint that the role's pods tolerate, as in a Pod."""

    key: Annotated[str, Field(max_length=317)] | None = None
    """Taint key; none matches every key (operator Exists)."""
    operator: TolerationOperator | None = None
    """Equal if not given."""
    value: LabelValue | None = None
    """Taint value."""
    effect: TaintEffect | None = None
    """Taint effect; none matches every effect."""
    toleration_seconds: Annotated[int, Field(ge=0, le=2**31)] | None = None
    """For NoExecute: how long the pod stays, in seconds."""


class NodeRequirement(Model):
    """A requirement on a node's label or field."""

    key: LabelKey
    """Label or field."""
    operator: NodeOperator
    """How the values are compared."""
    values: Annotated[tuple[LabelValue, ...], Field(max_length=32)] | None = None
    """Values to compare with."""


NodeRequirements = Annotated[tuple[NodeRequirement, ...], Field(max_length=16, json_schema_extra=ATOMIC)]


class NodeSelectorTerm(Model):
    """A node matches if all of its requirements hold."""

    match_expressions: NodeRequirements | None = None
    """Requirements on labels."""
    match_fields: NodeRequirements | None = None
    """Requirements on fields."""


class NodeSelector(Model):
    """A node matches if any of its terms does."""

    node_selector_terms: Annotated[
        tuple[NodeSelectorTerm, ...], Field(min_length=1, max_length=16, json_schema_extra=ATOMIC)
    ]
    """Terms."""


class PreferredNodeTerm(Model):
    """A term that the scheduler prefers."""

    weight: Annotated[int, Field(ge=1, le=100)]
    """Of this preference."""
    preference: NodeSelectorTerm
    """Which nodes are preferred."""


class NodeAffinity(Model):
    """Which nodes the role's pods may or should run on."""

    required_during_scheduling_ignored_during_execution: NodeSelector | None = None
    """Nodes that are allowed."""
    preferred_during_scheduling_ignored_during_execution: (
        Annotated[tuple[PreferredNodeTerm, ...], Field(max_length=16, json_schema_extra=ATOMIC)] | None
    ) = None
    """Nodes that are preferred."""


class LabelRequirement(Model):
    """A requirement on an object's label."""

    key: LabelKey
    """Label."""
    operator: LabelOperator
    """How the values are compared."""
    values: Annotated[tuple[LabelValue, ...], Field(max_length=32)] | None = None
    """Values to compare with."""


LabelRequirements = Annotated[tuple[LabelRequirement, ...], Field(max_length=16, json_schema_extra=ATOMIC)]


class LabelSelector(Model):
    """Which objects are meant."""

    match_labels: Labels | None = None
    """Labels that must be equal."""
    match_expressions: LabelRequirements | None = None
    """Requirements that must hold."""


class PodAffinityTerm(Model):
    """Pods to be near to, or away from."""

    topology_key: Annotated[str, Field(min_length=1, max_length=317)]
    """Node label that says what near means."""
    label_selector: LabelSelector | None = None
    """Which pods."""
    namespaces: Annotated[tuple[ObjectName, ...], Field(max_length=16)] | None = None
    """Their namespaces; the resource's own if none is given."""
    namespace_selector: LabelSelector | None = None
    """Their namespaces, by label."""


class WeightedPodAffinityTerm(Model):
    """A pod affinity that the scheduler prefers."""

    weight: Annotated[int, Field(ge=1, le=100)]
    """Of this preference."""
    pod_affinity_term: PodAffinityTerm
    """What is preferred."""


class PodAffinity(Model):
    """Which pods the role's pods must or should be near to, or away from."""

    required_during_scheduling_ignored_during_execution: (
        Annotated[tuple[PodAffinityTerm, ...], Field(max_length=16, json_schema_extra=ATOMIC)] | None
    ) = None
    """Terms that must hold."""
    preferred_during_scheduling_ignored_during_execution: (
        Annotated[tuple[WeightedPodAffinityTerm, ...], Field(max_length=16, json_schema_extra=ATOMIC)] | None
    ) = None
    """Terms that are preferred."""


class Affinity(Model):
    """Scheduling constraints, as in a Pod."""

    node_affinity: NodeAffinity | None = None
    """To nodes."""
    pod_affinity: PodAffinity | None = None
    """To pods."""
    pod_anti_affinity: PodAffinity | None = None
    """Away from pods."""


class ObjectReference(Model):
    """An object of the same namespace."""

    name: ObjectName
    """Its name."""


def _is_reserved(key: str) -> bool:
    return key.startswith(f"{names.API_GROUP}/") or key == names.LABEL_MANAGED_BY


def _reserved_keys(field: str) -> ValidationRule:
    return ValidationRule(
        cel=f"!has(self.{field}) || self.{field}.all(k, !k.startsWith({cel_text(names.API_GROUP + '/')}) "
        f"&& k != {cel_text(names.LABEL_MANAGED_BY)})",
        holds=lambda template: not any(map(_is_reserved, getattr(template, field) or ())),
        message=f"{field}: {names.API_GROUP}/* and {names.LABEL_MANAGED_BY} are set by the operator; "
        "remove them",
    )


class PodTemplate(Model):
    """What may be set on the pods of a role; the plan's own settings win over it."""

    rules: ClassVar[tuple[ValidationRule, ...]] = (_reserved_keys("labels"), _reserved_keys("annotations"))

    labels: Labels | None = None
    """Added to the pods."""
    annotations: Annotated[dict[LabelKey, Text], Field(max_length=32)] | None = None
    """Added to the pods."""
    node_selector: Labels | None = None
    """Labels that a node must have."""
    tolerations: Annotated[tuple[Toleration, ...], Field(max_length=32, json_schema_extra=ATOMIC)] | None = (
        None
    )
    """Taints that the pods tolerate."""
    affinity: Affinity | None = None
    """Scheduling constraints."""
    runtime_class_name: ObjectName | None = None
    """Runtime class of the pods."""
    image_pull_secrets: Annotated[
        tuple[ObjectReference, ...], Field(max_length=8, json_schema_extra=map_list("name"))
    ] = ()
    """Secrets to pull the image with."""
