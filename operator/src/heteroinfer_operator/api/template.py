"""`spec.roles[].template`: the settings of pods that a user may choose.

The operator sets all other fields of a pod. A resource with another field is refused. Pure.
"""

import re
from enum import StrEnum
from typing import Annotated, ClassVar

from pydantic import Field

from heteroinfer_contract import names
from heteroinfer_operator.api.base import (
    ATOMIC,
    Model,
    ObjectName,
    RuleReason,
    Text,
    ValidationRule,
    cel_text,
    map_list,
)
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
    """Effect of a taint."""

    NO_SCHEDULE = "NoSchedule"
    PREFER_NO_SCHEDULE = "PreferNoSchedule"
    NO_EXECUTE = "NoExecute"


class Toleration(Model):
    """A toleration of taints, as in a Pod."""

    rules: ClassVar[tuple[ValidationRule, ...]] = (
        ValidationRule(
            field="key",
            reason=RuleReason.REQUIRED,
            cel="(has(self.key) && self.key != '') || (has(self.operator) && self.operator == 'Exists')",
            message="must be set unless operator is Exists",
            holds=lambda toleration: bool(toleration.key) or toleration.operator is TolerationOperator.EXISTS,
        ),
        ValidationRule(
            field="value",
            reason=RuleReason.FORBIDDEN,
            cel="!has(self.operator) || self.operator != 'Exists' || !has(self.value) || self.value == ''",
            message="must be unset for operator Exists",
            holds=lambda toleration: (
                toleration.operator is not TolerationOperator.EXISTS or not toleration.value
            ),
        ),
        ValidationRule(
            field="tolerationSeconds",
            reason=RuleReason.FORBIDDEN,
            cel="!has(self.tolerationSeconds) || (has(self.effect) && self.effect == 'NoExecute')",
            message="must be unset unless effect is NoExecute",
            holds=lambda toleration: (
                toleration.toleration_seconds is None or toleration.effect is TaintEffect.NO_EXECUTE
            ),
        ),
    )

    key: LabelKeyOrNone | None = None
    """Key of the taints. Default: every key, with operator Exists."""
    operator: TolerationOperator | None = None
    """How the toleration matches the value of a taint. Equal: the taint must have this value. Exists: the
    taint may have any value. Default: Equal."""
    value: LabelValue | None = None
    """Value of the taints, for operator Equal. Default: empty."""
    effect: TaintEffect | None = None
    """Effect of the taints. NoSchedule: the scheduler places no pods on the node that do not tolerate the
    taint. PreferNoSchedule: the scheduler avoids the node for such pods. NoExecute: such pods are also
    evicted. Default: every effect."""
    toleration_seconds: Annotated[int, Field(ge=0, le=2**31)] | None = None
    """Seconds that a pod stays on a node with such a taint, for effect NoExecute. Default: no limit."""


class NodeRequirement(Model):
    """A requirement on a label or field of a node."""

    rules: ClassVar[tuple[ValidationRule, ...]] = (
        *values_rules("In", "NotIn", "Gt", "Lt"),
        ValidationRule(
            field="values",
            cel="!(self.operator in ['Gt', 'Lt']) || !has(self.values) || self.values.size() == 1",
            message="must have exactly one entry for operator Gt or Lt",
            holds=lambda term: (
                term.operator not in (NodeOperator.GT, NodeOperator.LT)
                or not term.values
                or len(term.values) == 1
            ),
        ),
    )

    key: LabelKey
    """Key of the node's label; in matchFields, name of the node's field."""
    operator: NodeOperator
    """Relation between the label and values. In: the label has one of the values. NotIn: the label has none
    of the values. Exists: the node has the label. DoesNotExist: the node lacks the label. Gt or Lt: the label
    is a whole number greater or less than the value."""
    values: Annotated[tuple[LabelValue, ...], Field(max_length=32)] | None = None
    """Values for operator In or NotIn; one whole number for Gt or Lt. Default: none."""


NodeRequirements = Annotated[tuple[NodeRequirement, ...], Field(max_length=16, json_schema_extra=ATOMIC)]


def _selects_one_node(requirement: NodeRequirement) -> bool:
    """Reports whether a requirement on a field includes or excludes one node by its name."""
    return (
        requirement.key == "metadata.name"
        and requirement.operator in (NodeOperator.IN, NodeOperator.NOT_IN)
        and len(requirement.values or ()) == 1
        and re.fullmatch(SUBDOMAIN, (requirement.values or ("",))[0]) is not None
    )


class NodeSelectorTerm(Model):
    """Requirements on a node. All requirements must hold."""

    rules: ClassVar[tuple[ValidationRule, ...]] = (
        ValidationRule(
            field="matchFields",
            cel="!has(self.matchFields) || self.matchFields.all(f, f.key == 'metadata.name' "
            "&& f.operator in ['In', 'NotIn'] && has(f.values) && f.values.size() == 1 "
            f"&& f.values[0].matches({cel_text(f'^{SUBDOMAIN}$')}))",
            message="each entry must have key metadata.name, operator In or NotIn, and the name of one node",
            fix="Use matchExpressions for labels",
            holds=lambda term: all(map(_selects_one_node, term.match_fields or ())),
        ),
    )

    match_expressions: NodeRequirements | None = None
    """Requirements on labels. Default: none."""
    match_fields: NodeRequirements | None = None
    """Requirements on fields. Default: none."""


class NodeSelector(Model):
    """A selection of nodes."""

    node_selector_terms: Annotated[
        tuple[NodeSelectorTerm, ...], Field(min_length=1, max_length=16, json_schema_extra=ATOMIC)
    ]
    """Terms of the selection. A node must match at least one term."""


class PreferredNodeTerm(Model):
    """Nodes that the scheduler prefers."""

    weight: Annotated[int, Field(ge=1, le=100)]
    """Weight of this preference, from 1 to 100."""
    preference: NodeSelectorTerm
    """Preferred nodes."""


class NodeAffinity(Model):
    """Nodes on which the role's pods must or should run."""

    required_during_scheduling_ignored_during_execution: NodeSelector | None = None
    """Nodes on which the pods may run. Default: all nodes."""
    preferred_during_scheduling_ignored_during_execution: (
        Annotated[tuple[PreferredNodeTerm, ...], Field(max_length=16, json_schema_extra=ATOMIC)] | None
    ) = None
    """Nodes that the scheduler prefers. Default: none."""


class PodAffinityTerm(Model):
    """Other pods, and a node label. Nodes with the same value of this label count as near to each other."""

    topology_key: LabelKey
    """Key of the node label. Nodes with the same value count as near to each other."""
    label_selector: LabelSelector | None = None
    """Labels of the other pods. Default: no pods."""
    namespaces: Annotated[tuple[NamespaceName, ...], Field(max_length=16)] | None = None
    """Namespaces of the other pods. Default: the resource's namespace."""
    namespace_selector: LabelSelector | None = None
    """Labels of further namespaces: pods in a namespace with these labels count, too. Default: none."""


class WeightedPodAffinityTerm(Model):
    """Other pods near which, or away from which, the scheduler prefers to place the role's pods."""

    weight: Annotated[int, Field(ge=1, le=100)]
    """Weight of this preference, from 1 to 100."""
    pod_affinity_term: PodAffinityTerm
    """The other pods, and the meaning of near."""


class PodAffinity(Model):
    """Other pods near which, or away from which, the role's pods must or should run."""

    required_during_scheduling_ignored_during_execution: (
        Annotated[tuple[PodAffinityTerm, ...], Field(max_length=16, json_schema_extra=ATOMIC)] | None
    ) = None
    """Terms that must hold. Default: none."""
    preferred_during_scheduling_ignored_during_execution: (
        Annotated[tuple[WeightedPodAffinityTerm, ...], Field(max_length=16, json_schema_extra=ATOMIC)] | None
    ) = None
    """Terms that the scheduler prefers. Default: none."""


class Affinity(Model):
    """Scheduling constraints, as in a Pod."""

    node_affinity: NodeAffinity | None = None
    """Nodes on which the pods must or should run. Default: all nodes."""
    pod_affinity: PodAffinity | None = None
    """Other pods near which the role's pods must or should run. Default: none."""
    pod_anti_affinity: PodAffinity | None = None
    """Other pods near which the role's pods must not or should not run. Default: none."""


class ObjectReference(Model):
    """A Secret of the same namespace."""

    name: ObjectName
    """Name of the Secret."""


def _is_reserved_key(key: str) -> bool:
    """Reports whether only the operator may set a label or annotation with this key."""
    return key.startswith(f"{names.API_GROUP}/") or key == names.LABEL_MANAGED_BY


def _no_reserved_keys_rule(field: str) -> ValidationRule:
    """Returns the rule that labels or annotations must not have keys that only the operator may set."""
    return ValidationRule(
        field=field,
        reason=RuleReason.FORBIDDEN,
        cel=f"!has(self.{field}) || self.{field}.all(k, !k.startsWith({cel_text(names.API_GROUP + '/')}) "
        f"&& k != {cel_text(names.LABEL_MANAGED_BY)})",
        holds=lambda template: not any(map(_is_reserved_key, getattr(template, field) or ())),
        message=f"must not have {names.API_GROUP}/* or {names.LABEL_MANAGED_BY}, which the operator sets",
        fix="Remove these keys",
    )


class PodTemplate(Model):
    """Settings of a role's pods. The plan's own settings override them."""

    rules: ClassVar[tuple[ValidationRule, ...]] = (
        _no_reserved_keys_rule("labels"),
        _no_reserved_keys_rule("annotations"),
        label_keys_rule("labels", "labels"),
        annotation_keys_rule("annotations", "annotations"),
        label_keys_rule("nodeSelector", "node_selector"),
        ValidationRule(
            field="volumeMounts",
            cel="!has(self.volumeMounts) || (has(self.volumes) && "
            "self.volumeMounts.all(m, self.volumes.exists(v, v.name == m.name))) "
            "|| self.volumeMounts.size() == 0",
            message="the name of each entry must be the name of an entry of volumes",
            fix="Add the volume, or correct the name",
            holds=lambda template: not any(unknown_mounts(template.volume_mounts, template.volumes)),
        ),
        ValidationRule(
            field="dnsPolicy",
            cel="!has(self.dnsPolicy) || self.dnsPolicy != 'None' || (has(self.dnsConfig) && "
            "has(self.dnsConfig.nameservers) && self.dnsConfig.nameservers.size() > 0)",
            message="must not be None unless dnsConfig.nameservers lists servers that resolve the cluster's "
            "names",
            fix="Add the name servers, or use dnsPolicy ClusterFirst",
            holds=lambda template: (
                template.dns_policy is not DnsPolicy.NONE
                or bool(template.dns_config is not None and template.dns_config.nameservers)
            ),
        ),
    )

    labels: Labels | None = None
    """Labels that are added to the pods. Default: none."""
    annotations: Annotated[dict[str, Text], Field(max_length=32)] | None = None
    """Annotations that are added to the pods. The chart's allowedAnnotations must allow them. Default:
    none."""
    node_selector: Labels | None = None
    """Labels that a node must have. The operator adds kubernetes.io/os and kubernetes.io/arch of its images,
    unless you set them. Default: none."""
    tolerations: Annotated[tuple[Toleration, ...], Field(max_length=32, json_schema_extra=ATOMIC)] | None = (
        None
    )
    """Taints that the pods tolerate. Default: none."""
    affinity: Affinity | None = None
    """Scheduling constraints of the pods. Default: none."""
    runtime_class_name: ClassName | None = None
    """Name of the RuntimeClass of the pods. Default: the cluster's default runtime."""
    image_pull_secrets: Annotated[
        tuple[ObjectReference, ...], Field(max_length=8, json_schema_extra=map_list("name"))
    ] = ()
    """Secrets of the same namespace with which nodes pull the image, in addition to the chart's
    workerImages.pullSecrets. Default: none."""
    service_account_name: ClassName | None = None
    """Service account of the pods: an entry of the chart's allowedServiceAccounts. The pods never get its
    token. Default: the namespace's default account."""
    security_context: TemplateSecurityContext | None = None
    """User and groups of the pods. Default: the chart's workerPods.podSecurityContext."""
    topology_spread_constraints: Annotated[
        tuple[TopologySpread, ...], Field(max_length=4, json_schema_extra=map_list(*SPREAD_KEYS))
    ] = ()
    """Rules by which the scheduler spreads the role's pods. Default: none."""
    resource_claims: Annotated[
        tuple[ResourceClaim, ...], Field(max_length=8, json_schema_extra=map_list("name"))
    ] = ()
    """Devices by dynamic resource allocation (DRA). Default: none."""
    volumes: Annotated[
        tuple[TemplateVolume, ...], Field(max_length=16, json_schema_extra=map_list("name"))
    ] = ()
    """Volumes of the pods, in addition to the operator's own. Default: none."""
    volume_mounts: Annotated[
        tuple[TemplateMount, ...], Field(max_length=16, json_schema_extra=map_list("mountPath"))
    ] = ()
    """Mounts of these volumes in the worker container. Default: none."""
    dns_policy: DnsPolicy | None = None
    """Name servers of the pods. ClusterFirst: the cluster's. None: only those of dnsConfig. Default:
    ClusterFirst."""
    dns_config: DnsConfig | None = None
    """Further name servers and search domains. Default: none."""
