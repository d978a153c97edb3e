"""The test node's NetworkPolicy enforcer: policies in, nftables rules out."""

from typing import Any

import pytest

from tests.cluster.policy_enforcer import build_ruleset, matches

NAMESPACES: list[dict[str, Any]] = [
    {"metadata": {"name": "ours", "labels": {"team": "a"}}},
    {"metadata": {"name": "theirs", "labels": {"team": "b"}}},
]


def build_pod(address: str, namespace: str = "ours", **labels: str) -> dict[str, Any]:
    ports = [{"name": "http", "containerPort": 8000}]
    return {
        "metadata": {"namespace": namespace, "labels": labels},
        "spec": {"containers": [{"ports": ports}]},
        "status": {"phase": "Running", "podIP": address},
    }


def build_policy(*rules: dict[str, Any], **selected: str) -> dict[str, Any]:
    spec = {"podSelector": {"matchLabels": selected}, "policyTypes": ["Ingress"], "ingress": list(rules)}
    return {"metadata": {"namespace": "ours", "name": "p"}, "spec": spec}


PODS = [
    build_pod("10.0.0.2", role="server"),
    build_pod("10.0.0.3", role="friend"),
    build_pod("10.0.0.4", namespace="theirs", role="friend"),
]


def rules_for(*rules: dict[str, Any]) -> list[str]:
    """Returns the rules of the one isolated pod, 10.0.0.2."""
    script = build_ruleset([build_policy(*rules, role="server")], PODS, NAMESPACES)
    assert "ip daddr vmap { 10.0.0.2 : goto to_10_0_0_2 }" in script
    chain = script.partition("chain to_10_0_0_2 {\n")[2].partition("}\n  chain")[0]
    return [line.strip() for line in chain.splitlines() if line.strip()]


def test_without_policies_nothing_is_dropped() -> None:
    assert "drop" not in build_ruleset([], PODS, NAMESPACES)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ({}, ["accept"]),
        ({"from": [{"podSelector": {"matchLabels": {"role": "friend"}}}]}, ["ip saddr { 10.0.0.3 } accept"]),
        ({"from": [{"namespaceSelector": {"matchLabels": {"team": "b"}}}]}, ["ip saddr { 10.0.0.4 } accept"]),
        ({"from": [{"namespaceSelector": {}}], "ports": [{"port": "http"}]}, None),
        ({"ports": [{"port": 1, "endPort": 9}]}, ["tcp dport 1-9 accept"]),
        ({"ports": [{"port": 53, "protocol": "UDP"}]}, ["udp dport 53 accept"]),
        (
            {"from": [{"ipBlock": {"cidr": "10.9.0.0/16", "except": ["10.9.1.0/24"]}}]},
            ["ip saddr 10.9.0.0/16 ip saddr != { 10.9.1.0/24 } accept"],
        ),
    ],
)
def test_a_rule_admits_exactly_the_named_peers(rule: dict[str, Any], expected: list[str] | None) -> None:
    everybody = ["ip saddr { 10.0.0.2, 10.0.0.3, 10.0.0.4 } tcp dport 8000 accept"]
    assert rules_for(rule) == [*(everybody if expected is None else expected), "drop"]


def test_a_policy_without_rules_blocks_all_connections() -> None:
    assert rules_for() == ["drop"]


@pytest.mark.parametrize("change", [{"phase": "Failed"}, {"podIP": ""}])
def test_a_pod_that_has_no_address_any_more_is_left_out(change: dict[str, str]) -> None:
    gone = {**PODS[1], "status": {**PODS[1]["status"], **change}}
    policy = build_policy({"from": [{"podSelector": {}}]}, role="server")
    assert "10.0.0.3" not in build_ruleset([policy], [PODS[0], gone], NAMESPACES)


def test_an_egress_policy_isolates_only_outgoing_traffic() -> None:
    policy = build_policy(role="server")
    policy["spec"] |= {
        "policyTypes": ["Egress"],
        "egress": [
            {"to": [{"podSelector": {"matchLabels": {"role": "friend"}}}]},
            {"ports": [{"port": 53, "protocol": "UDP"}]},
        ],
    }
    script = build_ruleset([policy], PODS, NAMESPACES)
    assert "ip daddr vmap" not in script
    assert script.count("ip saddr vmap { 10.0.0.2 : goto from_10_0_0_2 }") == 2  # to pods, and to the node
    chain = script.partition("chain from_10_0_0_2 {\n")[2].partition("}\n  chain")[0]
    rules = ["ip daddr { 10.0.0.3 } accept", "udp dport 53 accept", "drop"]
    assert [line.strip() for line in chain.splitlines() if line.strip()] == rules


@pytest.mark.parametrize(
    ("operator", "values", "met"),
    [
        ("In", ["x", "y"], True),
        ("In", ["y"], False),
        ("NotIn", ["y"], True),
        ("NotIn", ["x"], False),
        ("Exists", [], True),
        ("DoesNotExist", [], False),
    ],
)
def test_each_operator_of_a_selector_selects_the_right_pods(
    operator: str, values: list[str], met: bool
) -> None:
    term = {"key": "a", "operator": operator, "values": values}
    assert matches({"matchExpressions": [term]}, {"a": "x"}) is met
