"""Egress policies: they select only pods that other policies isolate, and open no more than needed."""

import json
from ipaddress import ip_network
from typing import Any

import pytest
import yaml

from heteroinfer_contract import names
from heteroinfer_operator.api import HeteroInferenceSpec, parse_spec
from heteroinfer_operator.cluster import Manifest, ResourceKey
from heteroinfer_operator.errors import HeteroInferError
from heteroinfer_operator.kube.isolating_policies import read_isolating_policy
from heteroinfer_operator.manifests.egress_policy import (
    Egress,
    Isolation,
    build_fetch_policies,
    build_group_egress,
    describe_closed_ports,
)
from heteroinfer_operator.manifests.fetch_egress import FetchEgress
from heteroinfer_operator.manifests.identity import GroupRef, Owner
from heteroinfer_operator.stored_fields import UnreadableError
from tests.cluster.folders import REPOSITORY
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
    return build_group_egress(asked(), GROUP, Isolation.from_setting(egress, selectors))


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
        # Webhooks may give pods any label that the spec does not have.
        *(
            ({"matchLabels": {key: "x"}}, {"matchLabels": {key: "x", **LABELS}})
            for key in ("app", "capsule.clastix.io/tenant", "kuma.io/sidecar-injection")
        ),
        (
            {"matchExpressions": [{"key": "app", "operator": "Exists"}]},
            {"matchLabels": LABELS, "matchExpressions": [{"key": "app", "operator": "Exists"}]},
        ),
        ({"matchExpressions": [{"key": "team", "operator": "NotIn", "values": ["search"]}]}, None),
        ({"matchExpressions": [{"key": "team", "operator": "DoesNotExist"}]}, None),
        ({"matchLabels": {"app": "x", "team": "billing"}}, None),
        ({"matchLabels": {names.LABEL_GROUP: "1"}}, None),
    ],
)
def test_egress_policies_apply_to_exactly_the_pods_that_other_policies_isolate(
    other: Manifest, selected: Manifest | None
) -> None:
    found = group_policies(other)
    assert [policy["spec"]["podSelector"] for policy in found] == ([] if selected is None else [selected])


def test_pods_reach_only_their_group_and_dns() -> None:
    [policy] = group_policies({}, {})
    assert policy["spec"]["policyTypes"] == ["Egress"]
    group, dns = policy["spec"]["egress"]
    assert group == {"to": [{"podSelector": {"matchLabels": LABELS}}]}
    assert {(port["protocol"], port["port"]) for port in dns["ports"]} == {
        (protocol, port) for protocol in ("TCP", "UDP") for port in (53, 5353)
    }
    assert policy["metadata"]["labels"][names.LABEL_GROUP] == "0"


def test_the_installation_decides_which_pods_get_policies() -> None:
    assert group_policies({}, egress=Egress.NEVER) == []
    assert group_policies() == []
    [always] = group_policies(egress=Egress.ALWAYS)
    assert always["spec"]["podSelector"] == {"matchLabels": LABELS}


def test_one_policy_suffices_if_all_pods_of_the_namespace_are_isolated() -> None:
    others = [{"matchLabels": {"app": str(number)}} for number in range(100)]
    [policy] = group_policies({}, *others, {"matchExpressions": [{"key": "a", "operator": "Exists"}]})
    assert policy["spec"]["podSelector"] == {"matchLabels": LABELS}


def test_selectors_of_one_label_become_one_policy() -> None:
    others = [{"matchLabels": {"app": str(number)}} for number in range(100)]
    part_of_one = {"matchLabels": {"app": "7", "tier": "web"}}
    [policy] = group_policies(*others, part_of_one)
    one_of = {"key": "app", "operator": "In", "values": sorted(str(number) for number in range(100))}
    assert policy["spec"]["podSelector"] == {"matchLabels": LABELS, "matchExpressions": [one_of]}


def test_a_group_has_at_most_32_policies_and_selectors_that_surely_match_come_first() -> None:
    others = [{"matchLabels": {"app": str(number), "part": "a"}} for number in range(100)]
    found = group_policies(*others, {"matchLabels": {"team": "search"}})
    assert len(found) == 32
    assert found[0]["spec"]["podSelector"] == {"matchLabels": {"team": "search", **LABELS}}


def rules_of_fetch(spec: HeteroInferenceSpec, allowed: FetchEgress = FetchEgress()) -> list[Any]:  # noqa: B008 - frozen
    ingress, egress = build_fetch_policies(spec, OWNER, Isolation.from_setting(Egress.AUTO, [{}]), allowed)
    assert ingress["spec"]["ingress"] == [{"ports": [{"protocol": "TCP", "port": 8081}]}]
    assert ingress["spec"]["policyTypes"] == ["Ingress"]
    rules: list[Any] = egress["spec"]["egress"]
    assert "to" not in rules[0], "a resolver of the node has a link-local address"
    return rules[1:]


def from_config_map(name: str) -> HeteroInferenceSpec:
    hidden = asked().dump()
    hidden["engine"]["env"] = [{"name": name, "valueFrom": {"configMapKeyRef": {"name": "p", "key": "url"}}}]
    return parse_spec(hidden)


WEB = [{"protocol": "TCP", "port": 80}, {"protocol": "TCP", "port": 443}]


@pytest.mark.parametrize(
    "spec",
    [
        asked(),
        asked(HF_ENDPOINT="https://h:6443", ALL_PROXY="socks5://10.0.0.1:5432"),
        from_config_map("https_proxy"),
    ],
)
def test_a_resource_opens_no_more_egress_than_the_installation_allows(spec: HeteroInferenceSpec) -> None:
    [rule] = rules_of_fetch(spec)
    assert rule["ports"] == WEB
    v4, v6 = (block["ipBlock"] for block in rule["to"])
    assert v4["cidr"] == "0.0.0.0/0"
    assert "169.254.0.0/16" in v4["except"]
    assert v6["cidr"] == "::/0"
    assert {"fe80::/10", "fd00:ec2::/32"} <= set(v6["except"])
    for block in (v4, v6):
        whole = ip_network(block["cidr"])
        for each in map(ip_network, block["except"]):
            # The API server refuses all else.
            assert each != whole
            assert each.subnet_of(whole)  # type: ignore[arg-type]  # raises TypeError for another family


def test_the_installation_decides_where_downloads_may_connect() -> None:
    text = '{"ports": [3128], "cidrs": ["10.0.0.0/8", "10.1.0.0/17"], "except": ["10.1.0.0/16", "fe80::/10"]}'
    [rule] = rules_of_fetch(asked(), FetchEgress.from_json(text))
    assert rule == {
        "ports": [{"protocol": "TCP", "port": 3128}],
        "to": [{"ipBlock": {"cidr": "10.0.0.0/8", "except": ["10.1.0.0/16"]}}],
    }
    for text in ('{"ports": []}', '{"cidrs": []}', '{"except": ["0.0.0.0/0", "::/0"]}'):
        assert rules_of_fetch(asked(), FetchEgress.from_json(text)) == [], "an empty list would open all"


def test_the_chart_has_the_same_defaults_of_fetch_egress() -> None:
    values = yaml.safe_load((REPOSITORY / "charts/heteroinfer/values.yaml").read_text())
    assert (
        FetchEgress.from_json(json.dumps(values["fetchEgress"])) == FetchEgress() == FetchEgress.from_json("")
    )


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "x",
        '{"port": [1]}',
        '{"ports": 1}',
        '{"cidrs": "10.0.0.0/8"}',
        '{"ports": ["443"]}',
        '{"ports": [0]}',
        '{"ports": [true]}',
        '{"cidrs": ["10.0.0.1/33"]}',
        '{"cidrs": ["10.0.0.1"]}',
        '{"except": [7]}',
    ],
)
def test_a_fetch_egress_without_valid_addresses_is_refused(text: str) -> None:
    with pytest.raises(HeteroInferError, match=r"fetchEgress of the chart.*Correct fetchEgress"):
        FetchEgress.from_json(text)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (asked(), ""),
        (asked(HF_ENDPOINT="https://mirror/x", HTTP_PROXY="proxy", NO_PROXY="a:7", HTTPS_PROXY=""), ""),
        (asked(HTTPS_PROXY="proxy:3128"), "HTTPS_PROXY (engine.env) needs port 3128"),
        (asked(all_proxy="socks5h://p"), "all_proxy (engine.env) needs port 1080"),
        (from_config_map("https_proxy"), "set the URL as a plain value"),
    ],
)
def test_a_closed_port_is_reported_with_the_charts_value(spec: HeteroInferenceSpec, words: str) -> None:
    restricted_selectors = Isolation.from_setting(Egress.AUTO, [{}])
    said = describe_closed_ports(spec, OWNER, restricted_selectors, FetchEgress())
    assert words in said
    assert bool(words) is bool(said) is ("fetchEgress.ports" in said)
    assert describe_closed_ports(spec, OWNER, Isolation(), FetchEgress()) == ""


def stored(**of_spec: object) -> dict[str, Any]:
    return {"metadata": {"namespace": "default", "name": "p"}, "spec": of_spec}


def test_a_foreign_policy_counts_if_it_restricts_egress() -> None:
    restricted_selectors = read_isolating_policy(stored(podSelector={}, policyTypes=["Ingress", "Egress"]))
    assert restricted_selectors is not None
    assert restricted_selectors.selector == {}
    assert read_isolating_policy(stored(podSelector={}, policyTypes=["Ingress"])) is None
    with pytest.raises(UnreadableError, match="matchExpressions"):
        read_isolating_policy(stored(podSelector={"matchExpressions": [7]}, policyTypes=["Egress"]))
