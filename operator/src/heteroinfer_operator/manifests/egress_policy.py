"""NetworkPolicies that let pods out where other policies of their namespace keep pods in. Pure.

Any policy for egress isolates the pods that it selects: a pod that reached everything would reach only what
the policy names. So these policies select exactly the pods that another policy isolates anyway: of ours those
that its selector names too. In a namespace without such a policy there are none, and nobody is cut off.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final
from urllib.parse import urlsplit

from heteroinfer_contract import names
from heteroinfer_operator.api import HeteroInferenceSpec, PodTemplate
from heteroinfer_operator.cluster import Manifest
from heteroinfer_operator.manifests import identity
from heteroinfer_operator.manifests.identity import GroupRef, Owner
from heteroinfer_operator.manifests.model_pods import model_template

POLICY_KIND: Final = "NetworkPolicy"
_API_VERSION: Final = "networking.k8s.io/v1"
_DNS_PORTS: Final = (53, 5353)
"""Of resolvers, and of OpenShift's resolvers' pods, at which a policy sees a request."""
_WEB_PORTS: Final = (80, 443)
_WAYS_OUT: Final = frozenset({names.ENV_HUB_ENDPOINT, "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"})
"""Variables, in upper case, that name where a fetch pod connects to."""
_SET_BY_OTHERS: Final = (f"{names.API_GROUP}/", "k8s.io/", "istio.io/", "volcano.sh/")
"""What is in labels that pods have and roles do not show: ours, and those of queues and gangs."""


class Egress(StrEnum):
    """Whether the operator makes policies that let its pods out."""

    AUTO = "Auto"
    """For pods that another NetworkPolicy of their namespace keeps in."""
    ALWAYS = "Always"
    """For all pods: where policies of another kind keep pods in, which the operator does not read."""
    NEVER = "Never"


@dataclass(frozen=True, slots=True, kw_only=True)
class Isolation:
    """Which pods of a namespace are kept in.

    Attributes:
        selectors: the `podSelector` of each policy that keeps pods in, each once.
    """

    selectors: tuple[Manifest, ...] = ()

    @classmethod
    def of(cls, egress: Egress, selectors: Iterable[Manifest]) -> "Isolation":
        """Returns what an installation takes as kept in, of what the policies of a namespace select."""
        if egress is not Egress.AUTO:
            return cls(selectors=({},) if egress is Egress.ALWAYS else ())
        by_text = {json.dumps(each, sort_keys=True): each for each in selectors}
        return cls(selectors=tuple(each for _, each in sorted(by_text.items())))


def build_group_egress(spec: HeteroInferenceSpec, group: GroupRef, isolation: Isolation) -> list[Manifest]:
    """Returns the policies that let the pods of a group reach each other and DNS."""
    ours = identity.group_labels(group)
    pods = [{**_template_labels(role.template), **ours} for role in spec.roles]
    rules = [{"to": [{"podSelector": {"matchLabels": ours}}]}, _dns()]
    name = identity.group_service(group.owner, group.index)
    return [
        _egress(identity.group_metadata(group, f"{name}-egress-{_hash(each)}"), _both(ours, each), rules)
        for each in isolation.selectors
        if any(_may_select(each, labels) for labels in pods)
    ]


def build_fetch_policies(spec: HeteroInferenceSpec, owner: Owner, isolation: Isolation) -> list[Manifest]:
    """Returns the policies of the pod that fetches a model: who asks it, and where it may go."""
    ours = {names.LABEL_RESOURCE: owner.key.name, names.LABEL_COMPONENT: names.COMPONENT_FETCH}
    labels = {**_template_labels(model_template(spec)), **ours}
    name = f"{owner.key.name}-{names.COMPONENT_FETCH}"
    rules = [_dns(), {"ports": _hub_ports(spec)}]
    asked = {
        "podSelector": {"matchLabels": ours},
        "policyTypes": ["Ingress"],
        "ingress": [{"ports": [{"protocol": "TCP", "port": names.DEFAULT_HEALTH_PORT}]}],
    }
    return [
        {
            "apiVersion": _API_VERSION,
            "kind": POLICY_KIND,
            "metadata": identity.metadata(owner, name, {}),
            "spec": asked,
        },
        *(
            _egress(identity.metadata(owner, f"{name}-egress-{_hash(each)}", {}), _both(ours, each), rules)
            for each in isolation.selectors
            if _may_select(each, labels)
        ),
    ]


def _template_labels(template: PodTemplate | None) -> Mapping[str, str]:
    return (template.labels if template is not None else None) or {}


def _egress(metadata: Mapping[str, Any], selector: Manifest, rules: Sequence[Manifest]) -> Manifest:
    return _policy(metadata, {"podSelector": selector, "policyTypes": ["Egress"], "egress": rules})


def _policy(metadata: Mapping[str, Any], spec: Manifest) -> Manifest:
    return {"apiVersion": _API_VERSION, "kind": POLICY_KIND, "metadata": metadata, "spec": spec}


def _dns() -> Manifest:
    return {"ports": [{"protocol": kind, "port": port} for port in _DNS_PORTS for kind in ("UDP", "TCP")]}


def _hub_ports(spec: HeteroInferenceSpec) -> list[Manifest]:
    """Returns the ports of the hub, mirror and proxies; all if one of them comes from a Secret."""
    given = [variable for variable in spec.engine.env if variable.name.upper() in _WAYS_OUT]
    if any(variable.value is None for variable in given):
        return [{"protocol": "TCP"}]
    ports = {*_WEB_PORTS, *(_port_of(variable.value or "") for variable in given)} - {None}
    return [{"protocol": "TCP", "port": port} for port in sorted(port for port in ports if port is not None)]


def _port_of(url: str) -> int | None:
    """Returns the port that a URL names, or None."""
    try:
        return urlsplit(url if "://" in url else f"//{url}").port
    except ValueError:
        return None


def _both(ours: Mapping[str, str], other: Manifest) -> Manifest:
    """Returns the selector of the pods of ours that another selector selects too."""
    expressions = other.get("matchExpressions") or ()
    labels = {**(other.get("matchLabels") or {}), **ours}
    return {"matchLabels": labels, **({"matchExpressions": list(expressions)} if expressions else {})}


def _may_select(selector: Manifest, labels: Mapping[str, str]) -> bool:
    """Returns whether a selector may select a pod with these labels and those that others give it."""
    terms = [(key, "In", [value]) for key, value in (selector.get("matchLabels") or {}).items()]
    terms += [
        (term.get("key", ""), term.get("operator", ""), term.get("values") or [])
        for term in selector.get("matchExpressions") or ()
    ]
    return all(_may_hold(key, operator, values, labels) for key, operator, values in terms)


def _may_hold(key: str, operator: str, values: Sequence[str], labels: Mapping[str, str]) -> bool:
    if key not in labels and any(word in key for word in _SET_BY_OTHERS):
        return True
    value = labels.get(key)
    holds = {
        "In": value in values,
        "NotIn": value not in values,
        "Exists": value is not None,
        "DoesNotExist": value is None,
    }
    return holds.get(operator, True)


def _hash(selector: Manifest) -> str:
    return hashlib.sha256(json.dumps(selector, sort_keys=True).encode()).hexdigest()[:8]
