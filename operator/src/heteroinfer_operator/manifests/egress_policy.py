"""NetworkPolicies that allow egress of pods that other policies of their namespace isolate. Pure.

An egress policy *isolates* the pods that it selects: these pods can reach only the destinations in the
policy, while a pod without a policy can reach everything. So the operator's policies select only pods that
another policy isolates already. Otherwise they would take connections away from the operator's pods.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from heteroinfer_contract import names
from heteroinfer_operator.api import HeteroInferenceSpec, PodTemplate
from heteroinfer_operator.cluster import Manifest
from heteroinfer_operator.manifests import identity
from heteroinfer_operator.manifests.fetch_egress import FetchEgress
from heteroinfer_operator.manifests.identity import GroupRef, Owner
from heteroinfer_operator.manifests.model_pods import model_template

POLICY_KIND: Final = "NetworkPolicy"
_API_VERSION: Final = "networking.k8s.io/v1"
_DNS_PORTS: Final = (53, 5353)
"""Ports of DNS resolvers; OpenShift's resolver pods listen on 5353, the port that policies see there.

These ports are open to any address, because a resolver's address may be link-local (NodeLocal DNSCache).
"""
_MAX_SELECTORS: Final = 32
"""Maximum number of policies for one group or one download. Selectors that certainly match the pods come
first."""


class Egress(StrEnum):
    """Whether the operator creates policies that allow egress of its pods."""

    AUTO = "Auto"
    """For pods that another NetworkPolicy of their namespace isolates."""
    ALWAYS = "Always"
    """For all pods. Needed if policies of other kinds (Cilium, Calico) restrict egress, because the operator
    does not read such policies."""
    NEVER = "Never"
    """For no pods."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Isolation:
    """The pods of a namespace that policies isolate.

    Attributes:
        selectors: label selectors that together select these pods.
    """

    selectors: tuple[Manifest, ...] = ()

    @classmethod
    def from_setting(cls, egress: Egress, selectors: Iterable[Manifest]) -> "Isolation":
        """Returns the isolated pods of a namespace.

        Args:
            egress: the installation's setting.
            selectors: label selectors of the policies of other users that restrict egress.
        """
        if egress is Egress.NEVER:
            return cls(selectors=())
        if egress is Egress.ALWAYS:
            return cls(selectors=({},))  # the selector of all pods
        by_text = {json.dumps(selector, sort_keys=True): selector for selector in selectors}
        distinct = [by_text[text] for text in sorted(by_text)]
        return cls(selectors=tuple(_merge_by_label(_drop_narrower(distinct))))


def build_group_egress(spec: HeteroInferenceSpec, group: GroupRef, isolation: Isolation) -> list[Manifest]:
    """Returns the policies that allow the pods of a group to reach each other and DNS.

    There is one policy for each selector of isolated pods that may match a pod of the group.
    """
    group_labels = identity.group_labels(group)
    labels_of_pods = [{**_template_labels(role.template), **group_labels} for role in spec.roles]
    rules = [{"to": [{"podSelector": {"matchLabels": group_labels}}]}, _build_dns_rule()]
    name = identity.group_service(group.owner, group.index)
    return [
        _build_egress_policy(
            identity.group_metadata(group, f"{name}-egress-{_hash(selector)}"),
            _narrow_selector(group_labels, selector),
            rules,
        )
        for selector in _find_matching_selectors(isolation, labels_of_pods)
    ]


def build_fetch_policies(
    spec: HeteroInferenceSpec, owner: Owner, isolation: Isolation, allowed: FetchEgress
) -> list[Manifest]:
    """Returns the ingress and egress policies of the pod that downloads a model.

    The installation alone decides which egress is open, because the author of the spec chooses the image that
    the pod runs.
    """
    own_labels = _own_fetch_labels(owner)
    name = f"{owner.key.name}-{names.COMPONENT_FETCH}"
    egress_rules = [_build_dns_rule(), *allowed.rules()]
    ingress_spec = {
        "podSelector": {"matchLabels": own_labels},
        "policyTypes": ["Ingress"],
        "ingress": [{"ports": [{"protocol": "TCP", "port": names.DEFAULT_HEALTH_PORT}]}],
    }
    egress_policies = [
        _build_egress_policy(
            identity.metadata(owner, f"{name}-egress-{_hash(selector)}", {}),
            _narrow_selector(own_labels, selector),
            egress_rules,
        )
        for selector in _find_matching_selectors(isolation, [_all_fetch_labels(spec, owner)])
    ]
    return [_build_policy(identity.metadata(owner, name, {}), ingress_spec), *egress_policies]


def describe_closed_ports(
    spec: HeteroInferenceSpec, owner: Owner, isolation: Isolation, allowed: FetchEgress
) -> str:
    """Describes URL variables of the spec whose port the policies of a download do not open, with the fix.

    Returns "" if there are no such variables, and if no policy isolates the pod that downloads the model.
    """
    is_isolated = bool(_find_matching_selectors(isolation, [_all_fetch_labels(spec, owner)]))
    return allowed.describe_closed(spec) if is_isolated else ""


def _own_fetch_labels(owner: Owner) -> Mapping[str, str]:
    """Returns the labels that the operator sets on pods that download a model."""
    return {names.LABEL_RESOURCE: owner.key.name, names.LABEL_COMPONENT: names.COMPONENT_FETCH}


def _all_fetch_labels(spec: HeteroInferenceSpec, owner: Owner) -> Mapping[str, str]:
    """Returns the labels of the pod that downloads a model, with those of its template."""
    return {**_template_labels(model_template(spec)), **_own_fetch_labels(owner)}


def _template_labels(template: PodTemplate | None) -> Mapping[str, str]:
    return (template.labels if template is not None else None) or {}


def _build_egress_policy(
    metadata: Mapping[str, Any], selector: Manifest, rules: Sequence[Manifest]
) -> Manifest:
    return _build_policy(metadata, {"podSelector": selector, "policyTypes": ["Egress"], "egress": rules})


def _build_policy(metadata: Mapping[str, Any], spec: Manifest) -> Manifest:
    return {"apiVersion": _API_VERSION, "kind": POLICY_KIND, "metadata": metadata, "spec": spec}


def _build_dns_rule() -> Manifest:
    return {"ports": [{"protocol": kind, "port": port} for port in _DNS_PORTS for kind in ("UDP", "TCP")]}


def _narrow_selector(own_labels: Mapping[str, str], other: Manifest) -> Manifest:
    """Returns the selector of pods that have these labels and also match another selector."""
    expressions = other.get("matchExpressions") or ()
    labels = {**(other.get("matchLabels") or {}), **own_labels}
    return {"matchLabels": labels, **({"matchExpressions": list(expressions)} if expressions else {})}


def _find_matching_selectors(
    isolation: Isolation, labels_of_pods: Sequence[Mapping[str, str]]
) -> list[Manifest]:
    """Returns the selectors that may match one of these pods, at most _MAX_SELECTORS.

    Selectors that certainly match come first.

    Args:
        labels_of_pods: known labels of each pod. Webhooks may add further labels.
    """

    def may_match(selector: Manifest) -> bool:
        return any(_may_select(selector, labels) for labels in labels_of_pods)

    def is_uncertain(selector: Manifest) -> bool:
        return any(_has_unknown_label(selector, labels) for labels in labels_of_pods)

    matching = filter(may_match, isolation.selectors)
    return sorted(matching, key=is_uncertain)[:_MAX_SELECTORS]


def _drop_narrower(selectors: Sequence[Manifest]) -> list[Manifest]:
    """Removes selectors whose pods another selector in the list selects, too.

    A selector without terms selects all pods. A selector with several terms is narrower than a selector whose
    only term is among these terms.
    """
    terms_of_selectors = [{json.dumps(term) for term in _terms_of(selector)} for selector in selectors]
    if set() in terms_of_selectors:
        return [{}]
    only_terms = {term for terms in terms_of_selectors if len(terms) == 1 for term in terms}

    def is_narrower(terms: set[str]) -> bool:
        """Reports whether several terms include the only term of another selector."""
        return len(terms) > 1 and bool(terms & only_terms)

    return [
        selector
        for selector, terms in zip(selectors, terms_of_selectors, strict=True)
        if not is_narrower(terms)
    ]


def _merge_by_label(selectors: Sequence[Manifest]) -> list[Manifest]:
    """Merges selectors that require one value of the same label into one selector with all these values.

    So a label with many values needs only one policy. Other selectors stay as they are.
    """
    values_by_label: dict[str, list[str]] = {}
    other_selectors = []
    for selector in selectors:
        labels = selector.get("matchLabels") or {}
        requires_one_value = len(labels) == 1 and not selector.get("matchExpressions")
        if requires_one_value:
            [(label, value)] = labels.items()
            values_by_label.setdefault(label, []).append(value)
        else:
            other_selectors.append(selector)
    merged: list[Manifest] = []
    for label, values in values_by_label.items():
        if len(values) == 1:
            merged.append({"matchLabels": {label: values[0]}})
        else:
            one_of_values = {"key": label, "operator": "In", "values": sorted(values)}
            merged.append({"matchExpressions": [one_of_values]})
    return other_selectors + merged


def _terms_of(selector: Manifest) -> list[tuple[str, str, list[str]]]:
    """Returns the terms of a selector, each as key, operator and values."""
    terms = [(key, "In", [value]) for key, value in (selector.get("matchLabels") or {}).items()]
    return terms + [
        (term.get("key", ""), term.get("operator", ""), term.get("values") or [])
        for term in selector.get("matchExpressions") or ()
    ]


def _has_unknown_label(selector: Manifest, labels: Mapping[str, str]) -> bool:
    """Reports whether a selector uses a label that is not among these labels."""
    return any(key not in labels for key, _, _ in _terms_of(selector))


def _may_select(selector: Manifest, labels: Mapping[str, str]) -> bool:
    """Reports whether a selector may match a pod that has at least these labels.

    The pod may have more labels, because webhooks (of meshes, for example) add labels.
    """
    return all(
        key not in labels or _is_term_met(operator, values, labels[key])
        for key, operator, values in _terms_of(selector)
    )


def _is_term_met(operator: str, values: Sequence[str], value: str) -> bool:
    """Reports whether a label with this value satisfies a term of a selector.

    Returns True for Exists, and for an operator that this version does not know.
    """
    results = {
        "In": value in values,
        "NotIn": value not in values,
        "DoesNotExist": False,  # the label exists
    }
    return results.get(operator, True)


def _hash(selector: Manifest) -> str:
    """Returns a short hash that distinguishes policies by their selector."""
    return hashlib.sha256(json.dumps(selector, sort_keys=True).encode()).hexdigest()[:8]
