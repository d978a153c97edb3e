"""What a user may set on the pods of a role: an allow-list of the pod template.

Whatever isn't here belongs to the plan and to the manifests; unknown fields are refused. Pure.
"""

import re
from enum import StrEnum
from typing import Annotated, ClassVar

from pydantic import Field

from heteroinfer_contract import names
from heteroinfer_operator.api.base import ATOMIC, Model, ObjectName, Text, ValidationRule, cel_text, map_list
from heteroinfer_operator.api.label_selector import LabelSelector, values_rules
from heteroinfer_operator.api.pod_fields import (
    SUBDOMAIN,
    ClassName,
    LabelKey,
    LabelKeyOrNone,
    Labels,
    LabelValue,
    NamespaceName,
    annotation_keys_rule,
    label_keys_rule,
)
from heteroinfer_operator.api.pod_options import (
    DnsConfig,
    DnsPolicy,
    ResourceClaim,
    TemplateSecurityContext,
)
from heteroinfer_operator.api.pod_volumes import TemplateMount, TemplateVolume, unknown_mounts
from heteroinfer_operator.api.topology_spread import SPREAD_KEYS, TopologySpread


class NodeOperator(StrEnum):
    """Operators of a node selector."""

    IN = "In"
    NOT_IN = "NotIn"
    EXISTS = "Exists"
    DOES_NOT_EXIST = "DoesNotExist"
    GT = "Gt"
    LT = "Lt"


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

    rules: ClassVar[tuple[ValidationRule, ...]] = (
        ValidationRule(
            cel="(has(self.key) && self.key != '') || (has(self.operator) && self.operator == 'Exists')",
            message="a toleration without a key has operator Exists; set key, or operator",
            holds=lambda own: bool(own.key) or own.operator is TolerationOperator.EXISTS,
        ),
        ValidationRule(
            cel="!has(self.operator) || self.operator != 'Exists' || !has(self.value) || self.value == ''",
            message="a toleration with operator Exists has no value; remove value, or set operator Equal",
            holds=lambda own: own.operator is not TolerationOperator.EXISTS or not own.value,
        ),
        ValidationRule(
            cel="!has(self.tolerationSeconds) || (has(self.effect) && self.effect == 'NoExecute')",
            message="tolerationSeconds is for effect NoExecute; remove it, or set effect",
            holds=lambda own: own.toleration_seconds is None or own.effect is TaintEffect.NO_EXECUTE,
        ),
    )

    key: LabelKeyOrNone | None = None
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

    rules: ClassVar[tuple[ValidationRule, ...]] = (
        *values_rules("In", "NotIn", "Gt", "Lt"),
        ValidationRule(
            cel="!(self.operator in ['Gt', 'Lt']) || !has(self.values) || self.values.size() == 1",
            message="values: expected one for operator Gt or Lt; remove the others",
            holds=lambda own: (
                own.operator not in (NodeOperator.GT, NodeOperator.LT) or len(own.values or (0,)) == 1
            ),
        ),
    )

    key: LabelKey
    """Label or field."""
    operator: NodeOperator
    """How the values are compared."""
    values: Annotated[tuple[LabelValue, ...], Field(max_length=32)] | None = None
    """Values to compare with."""


NodeRequirements = Annotated[tuple[NodeRequirement, ...], Field(max_length=16, json_schema_extra=ATOMIC)]


def _is_node_field(asked: NodeRequirement) -> bool:
    return (
        asked.key == "metadata.name"
        and asked.operator in (NodeOperator.IN, NodeOperator.NOT_IN)
        and len(asked.values or ()) == 1
        and re.fullmatch(SUBDOMAIN, (asked.values or ("",))[0]) is not None
    )


class NodeSelectorTerm(Model):
    """A node matches if all of its requirements hold."""

    rules: ClassVar[tuple[ValidationRule, ...]] = (
        ValidationRule(
            cel="!has(self.matchFields) || self.matchFields.all(f, f.key == 'metadata.name' "
            "&& f.operator in ['In', 'NotIn'] && has(f.values) && f.values.size() == 1 "
            f"&& f.values[0].matches({cel_text(f'^{SUBDOMAIN}$')}))",
            message="matchFields: expected key metadata.name, operator In or NotIn, and one value, a node's "
            "name; use matchExpressions for labels",
            holds=lambda term: all(map(_is_node_field, term.match_fields or ())),
        ),
    )

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


class PodAffinityTerm(Model):
    """Pods to be near to, or away from."""

    topology_key: LabelKey
    """Node label that says what near means."""
    label_selector: LabelSelector | None = None
    """Which pods."""
    namespaces: Annotated[tuple[NamespaceName, ...], Field(max_length=16)] | None = None
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

    rules: ClassVar[tuple[ValidationRule, ...]] = (
        _reserved_keys("labels"),
        _reserved_keys("annotations"),
        label_keys_rule("labels", "labels"),
        annotation_keys_rule("annotations", "annotations"),
        label_keys_rule("nodeSelector", "node_selector"),
        ValidationRule(
            cel="!has(self.volumeMounts) || (has(self.volumes) && "
            "self.volumeMounts.all(m, self.volumes.exists(v, v.name == m.name))) "
            "|| self.volumeMounts.size() == 0",
            message="volumeMounts: each must name one of volumes; add the volume, or correct the name",
            holds=lambda template: not any(unknown_mounts(template.volume_mounts, template.volumes)),
        ),
        ValidationRule(
            cel="!has(self.dnsPolicy) || self.dnsPolicy != 'None' || (has(self.dnsConfig) && "
            "has(self.dnsConfig.nameservers) && self.dnsConfig.nameservers.size() > 0)",
            message="dnsPolicy None needs dnsConfig.nameservers that know the cluster's names; add them",
            holds=lambda template: (
                template.dns_policy is not DnsPolicy.NONE
                or bool(template.dns_config is not None and template.dns_config.nameservers)
            ),
        ),
    )

    labels: Labels | None = None
    """Added to the pods."""
    annotations: Annotated[dict[str, Text], Field(max_length=32)] | None = None
    """Added to the pods."""
    node_selector: Labels | None = None
    """Labels that a node must have."""
    tolerations: Annotated[tuple[Toleration, ...], Field(max_length=32, json_schema_extra=ATOMIC)] | None = (
        None
    )
    """Taints that the pods tolerate."""
    affinity: Affinity | None = None
    """Scheduling constraints."""
    runtime_class_name: ClassName | None = None
    """Runtime class of the pods."""
    image_pull_secrets: Annotated[
        tuple[ObjectReference, ...], Field(max_length=8, json_schema_extra=map_list("name"))
    ] = ()
    """Secrets to pull the image with."""
    service_account_name: ClassName | None = None
    """Service account of the pods, one of the chart's allowedServiceAccounts; they never get its token."""
    security_context: TemplateSecurityContext | None = None
    """User and groups of the pods."""
    topology_spread_constraints: Annotated[
        tuple[TopologySpread, ...], Field(max_length=4, json_schema_extra=map_list(*SPREAD_KEYS))
    ] = ()
    """How the scheduler spreads the role's pods."""
    resource_claims: Annotated[
        tuple[ResourceClaim, ...], Field(max_length=8, json_schema_extra=map_list("name"))
    ] = ()
    """Devices of dynamic resource allocation (DRA)."""
    volumes: Annotated[
        tuple[TemplateVolume, ...], Field(max_length=16, json_schema_extra=map_list("name"))
    ] = ()
    """Further volumes."""
    volume_mounts: Annotated[
        tuple[TemplateMount, ...], Field(max_length=16, json_schema_extra=map_list("mountPath"))
    ] = ()
    """Where they are mounted."""
    dns_policy: DnsPolicy | None = None
    """Which name servers pods ask; ClusterFirst if not given."""
    dns_config: DnsConfig | None = None
    """Further name servers and search domains."""
