"""Policies that let pods out: of those alone that others keep in, and no further than they need."""

from typing import Any

import pytest

from heteroinfer_contract import names
from heteroinfer_operator.api import HeteroInferenceSpec, parse_spec
from heteroinfer_operator.cluster import Manifest, ResourceKey
from heteroinfer_operator.kube.isolating_policies import isolating_policy
from heteroinfer_operator.manifests.egress_policy import (
    Egress,
    Isolation,
    build_fetch_policies,
    build_group_egress,
)
from heteroinfer_operator.manifests.identity import GroupRef, Owner
from heteroinfer_operator.stored_fields import UnreadableError
from tests.unit.planning.planned_models import cpu, spec

OWNER = Owner(key=ResourceKey(namespace="default", name="llama"), uid="uid-1")
GROUP = GroupRef(owner=OWNER, index=0)
LABELS = {
    names.LABEL_RESOURCE: "llama",
    names.LABEL_COMPONENT: names.COMPONENT_WORKER,
    names.LABEL_GROUP: "0",
}


def asked(**env: str) -> HeteroInferenceSpec:
    role = cpu(template={"labels": {"team": "search"}})
    engine = {"env": [{"name": name, "value": value} for name, value in env.items()]}
    return parse_spec(
        {**spec(role).dump(), "model": {"uri": "hf://a/b", "cache": {"size": "1Gi"}}, "engine": engine}
    )


def group_policies(*selectors: Manifest, egress: Egress = Egress.AUTO) -> list[Any]:
    return build_group_egress(asked(), GROUP, Isolation.of(egress, selectors))


@pytest.mark.parametrize(
    ("other", "selected"),
    [
        ({}, {"matchLabels": LABELS}),
        ({"matchLabels": {"team": "search"}}, {"matchLabels": {"team": "search", **LABELS}}),
        (
            {"matchExpressions": [{"key": "public", "operator": "DoesNotExist"}]},
            {
                "matchLabels": LABELS,
                "matchExpressions": [{"key": "public", "operator": "DoesNotExist"}],
            },
        ),
        # Of some pods of the group: those alone may be kept in, so those alone are let out.
        (
            {"matchLabels": {names.LABEL_LEADER: "true"}},
            {"matchLabels": {names.LABEL_LEADER: "true", **LABELS}},
        ),
        ({"matchLabels": {"team": "billing"}}, None),
        ({"matchLabels": {"app": "db"}}, None),
        ({"matchExpressions": [{"key": "team", "operator": "NotIn", "values": ["search"]}]}, None),
        ({"matchExpressions": [{"key": "app", "operator": "Exists"}]}, None),
        ({"matchLabels": {names.LABEL_GROUP: "1"}}, None),
    ],
)
def test_exactly_the_pods_that_others_keep_in_are_let_out(other: Manifest, selected: Manifest | None) -> None:
    found = group_policies(other)
    assert [policy["spec"]["podSelector"] for policy in found] == ([] if selected is None else [selected])


def test_pods_reach_their_group_and_dns_and_nothing_else() -> None:
    [policy] = group_policies({}, {})
    assert policy["spec"]["policyTypes"] == ["Egress"]
    group, dns = policy["spec"]["egress"]
    assert group == {"to": [{"podSelector": {"matchLabels": LABELS}}]}
    assert {(port["protocol"], port["port"]) for port in dns["ports"]} == {
        (protocol, port) for protocol in ("TCP", "UDP") for port in (53, 5353)
    }
    assert policy["metadata"]["labels"][names.LABEL_GROUP] == "0"


def test_an_installation_decides() -> None:
    assert group_policies({}, egress=Egress.NEVER) == []
    assert group_policies() == []
    [always] = group_policies(egress=Egress.ALWAYS)
    assert always["spec"]["podSelector"] == {"matchLabels": LABELS}


def ports_of_fetch(spec: HeteroInferenceSpec) -> list[Any]:
    ingress, egress = build_fetch_policies(spec, OWNER, Isolation.of(Egress.AUTO, [{}]))
    assert ingress["spec"]["ingress"] == [{"ports": [{"protocol": "TCP", "port": 8081}]}]
    assert ingress["spec"]["policyTypes"] == ["Ingress"]
    found: list[Any] = egress["spec"]["egress"][1]["ports"]
    return found


def test_a_fetch_reaches_its_hub_its_mirror_and_its_proxy() -> None:
    web = [{"protocol": "TCP", "port": 80}, {"protocol": "TCP", "port": 443}]
    assert ports_of_fetch(asked()) == web
    assert ports_of_fetch(asked(HF_ENDPOINT="https://mirror/x", HTTPS_PROXY="proxy:3128")) == [
        *web,
        {"protocol": "TCP", "port": 3128},
    ]
    # Where the address is not in the spec, no port is known.
    hidden = asked().dump()
    key = {"name": "proxy", "key": "url"}
    hidden["engine"]["env"] = [{"name": "https_proxy", "valueFrom": {"configMapKeyRef": key}}]
    assert ports_of_fetch(parse_spec(hidden)) == [{"protocol": "TCP"}]


def stored(**of_spec: object) -> dict[str, Any]:
    return {"metadata": {"namespace": "default", "name": "p"}, "spec": of_spec}


def test_a_policy_of_others_counts_if_it_is_about_egress() -> None:
    kept_in = isolating_policy(stored(podSelector={}, policyTypes=["Ingress", "Egress"]))
    assert kept_in is not None
    assert kept_in.selector == {}
    assert isolating_policy(stored(podSelector={}, policyTypes=["Ingress"])) is None
    with pytest.raises(UnreadableError, match="matchExpressions"):
        isolating_policy(stored(podSelector={"matchExpressions": [7]}, policyTypes=["Egress"]))
