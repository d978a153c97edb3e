"""Enforces the cluster's NetworkPolicies on the test node, by nftables rules.

CNI's reference plugins enforce no policy, and the usual enforcers need kernel modules or images that a test
machine may lack. This enforcer supports the features that the tests' policies use: `podSelector`, ingress and
egress by pod, namespace and IP block, by port, port range and (ingress) named port. Traffic from the node
itself (the kubelet's probes) always passes, as on any node. Traffic from a pod to the node is egress, too.
The enforcer reads policies and pods twice a second, so a change takes up to half a second.
"""

import http.client
import ipaddress
import json
import ssl
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.cluster.pki import Pki

TABLE = "heteroinfer_network_policy"
INTERVAL_S = 0.5
Object = Mapping[str, Any]


def matches(selector: Object, labels: Mapping[str, str]) -> bool:
    """Returns whether a label selector of the Kubernetes API selects these labels. An empty one does."""
    if any(labels.get(key) != value for key, value in selector.get("matchLabels", {}).items()):
        return False
    for term in selector.get("matchExpressions", []):
        value, values = labels.get(term["key"]), term.get("values", [])
        met = {
            "In": value in values,
            "NotIn": value not in values,
            "Exists": value is not None,
            "DoesNotExist": value is None,
        }
        if not met[term["operator"]]:
            return False
    return True


def build_ruleset(policies: Sequence[Object], pods: Sequence[Object], namespaces: Sequence[Object]) -> str:
    """Returns the nftables script that replaces all rules by those of these policies.

    A pod that a policy selects for ingress accepts only traffic that one of its policies allows. Every other
    pod accepts all traffic. The same holds for sent traffic and egress.
    """
    labels = {each["metadata"]["name"]: each["metadata"].get("labels", {}) for each in namespaces}
    living = sorted((pod for pod in pods if _address(pod)), key=_address)
    chains: list[str] = []
    verdicts: dict[str, list[str]] = {"Ingress": [], "Egress": []}
    for pod in living:
        for direction, found in verdicts.items():
            own = [policy for policy in policies if _isolates(policy, pod, direction)]
            if own:
                name = f"{'to' if direction == 'Ingress' else 'from'}_{_address(pod).replace('.', '_')}"
                lines = {
                    f"    {rule}" for each in own for rule in _rules(each, pod, living, labels, direction)
                }
                chains.append("\n".join([f"  chain {name} {{", *sorted(lines), "    drop", "  }"]))
                found.append(f"{_address(pod)} : goto {name}")
    # A packet that one base chain accepts goes on to the next chain, so sent packets must pass both.
    hooks = [
        _hook("leaving", "forward", "filter - 1", "saddr", verdicts["Egress"]),
        _hook("to_node", "input", "filter - 1", "saddr", verdicts["Egress"]),
        _hook("forward", "forward", "filter", "daddr", verdicts["Ingress"]),
    ]
    body = "\n".join([*chains, *hooks])
    return f"table inet {TABLE}\ndelete table inet {TABLE}\ntable inet {TABLE} {{\n{body}\n}}\n"


def _hook(name: str, hook: str, priority: str, address: str, verdicts: Sequence[str]) -> str:
    lines = [f"  chain {name} {{", f"    type filter hook {hook} priority {priority}; policy accept;"]
    lines.append("    ct state established,related accept")
    if verdicts:
        lines.append(f"    ip {address} vmap {{ {', '.join(verdicts)} }}")
    return "\n".join([*lines, "  }"])


def _address(pod: Object) -> str:
    """Returns a pod's IPv4 address, or "" if the pod has none of its own, or has released it."""
    done = pod.get("status", {}).get("phase") in ("Succeeded", "Failed")
    if done or pod["spec"].get("hostNetwork"):
        return ""
    return str(pod.get("status", {}).get("podIP", ""))


def _isolates(policy: Object, pod: Object, direction: str) -> bool:
    if policy["metadata"]["namespace"] != pod["metadata"]["namespace"]:
        return False
    if direction not in policy["spec"].get("policyTypes", ["Ingress"]):
        return False
    return matches(policy["spec"].get("podSelector", {}), pod["metadata"].get("labels", {}))


def _rules(
    policy: Object,
    pod: Object,
    pods: Sequence[Object],
    labels: Mapping[str, Mapping[str, str]],
    direction: str,
) -> Iterator[str]:
    """Yields the nftables rules that accept what a policy allows for a pod in one direction."""
    into = direction == "Ingress"
    for rule in policy["spec"].get(direction.lower(), []):
        peers = list(
            _peers(rule.get("from" if into else "to", []), policy, pods, labels, "saddr" if into else "daddr")
        )
        for port in _ports(rule.get("ports", []), pod if into else None):
            for peer in peers:
                yield " ".join(word for word in (peer, port, "accept") if word)


def _peers(
    peers: Iterable[Object],
    policy: Object,
    pods: Sequence[Object],
    labels: Mapping[str, Mapping[str, str]],
    address: str,
) -> Iterator[str]:
    """Yields the matches of the peers, or one empty match for a rule without peers, which allows all."""
    peers = list(peers)
    if not peers:
        yield ""
    for peer in peers:
        if "ipBlock" in peer:
            block = peer["ipBlock"]
            if ipaddress.ip_network(block["cidr"]).version == 4:
                but = f" ip {address} != {{ {', '.join(block['except'])} }}" if block.get("except") else ""
                yield f"ip {address} {block['cidr']}{but}"
            continue
        named = [_address(pod) for pod in pods if _is_peer(peer, policy, pod, labels)]
        if named:
            yield f"ip {address} {{ {', '.join(sorted(named))} }}"


def _is_peer(peer: Object, policy: Object, pod: Object, labels: Mapping[str, Mapping[str, str]]) -> bool:
    namespace = pod["metadata"]["namespace"]
    if "namespaceSelector" in peer:
        if not matches(peer["namespaceSelector"], labels.get(namespace, {})):
            return False
    elif namespace != policy["metadata"]["namespace"]:
        return False
    return matches(peer.get("podSelector", {}), pod["metadata"].get("labels", {}))


def _ports(ports: Iterable[Object], pod: Object | None) -> Iterator[str]:
    """Yields the matches of the ports of `pod`, or one empty match for a rule that opens all ports.

    Without a pod, no port has a name.
    """
    ports = list(ports)
    if not ports:
        yield ""
    named = {
        port["name"]: port["containerPort"]
        for container in (pod["spec"]["containers"] if pod is not None else ())
        for port in container.get("ports", [])
        if "name" in port
    }
    for each in ports:
        protocol = each.get("protocol", "TCP").lower()
        if "port" not in each:
            yield f"meta l4proto {protocol}"
            continue
        number = named.get(each["port"]) if isinstance(each["port"], str) else each["port"]
        if number is not None:
            yield f"{protocol} dport {number}" + (f"-{each['endPort']}" if "endPort" in each else "")


def _read(
    address: str, port: int, context: ssl.SSLContext
) -> tuple[list[Object], list[Object], list[Object]]:
    """Returns the stored policies, pods and namespaces."""
    connection = http.client.HTTPSConnection(address, port, context=context, timeout=5)
    try:

        def items(path: str) -> list[Object]:
            connection.request("GET", path)
            answer = connection.getresponse()
            text = answer.read()
            if answer.status != http.client.OK:
                raise http.client.HTTPException(
                    f"GET {path}: got status {answer.status}, expected 200. {text.decode()}"
                )
            return list(json.loads(text)["items"])

        policies = items("/apis/networking.k8s.io/v1/networkpolicies")
        return policies, items("/api/v1/pods"), items("/api/v1/namespaces")
    finally:
        connection.close()


def main(arguments: Sequence[str]) -> None:
    """Updates the node's rules from the API server's policies again and again. Never returns.

    `arguments`: the folder of the keys, and the address and port of the API server.
    """
    folder, address, port = arguments
    context = Pki(folder=Path(folder)).client_context("network-policy")
    made = ""
    while True:
        try:
            policies, pods, namespaces = _read(address, int(port), context)
        except (OSError, http.client.HTTPException) as error:
            print(f"the API server did not answer: {error}", flush=True)
        else:
            ruleset = build_ruleset(policies, pods, namespaces)
            if ruleset != made:
                subprocess.run(["nft", "-f", "-"], input=ruleset, text=True, check=True)
                made = ruleset
        time.sleep(INTERVAL_S)


if __name__ == "__main__":
    main(sys.argv[1:])
