"""The test node's own NetworkPolicy enforcer: ingress rules of the cluster -> nftables of the node.

CNI's reference plugins enforce no policy, and the usual enforcers want kernel modules or images
that a test machine may lack. This one covers what its users' policies say: `podSelector`, and
ingress by pod, namespace and IP block, by port, port range and named port. What the node itself
sends (kubelet's probes) always passes, as on any node. Egress rules are not enforced; the log
says so. Policies and pods are read twice a second, so that a change takes that long.
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
    """Returns whether a label selector of the Kubernetes API selects these labels; an empty one does."""
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
    """Returns the nftables script that makes these policies so, instead of those before.

    A pod that some policy selects for ingress takes only what one of its policies lets in; every
    other pod takes everything.
    """
    labels = {each["metadata"]["name"]: each["metadata"].get("labels", {}) for each in namespaces}
    living = [pod for pod in pods if _address(pod)]
    verdicts, chains = [], []
    for pod in sorted(living, key=_address):
        own = [policy for policy in policies if _isolates(policy, pod)]
        if own:
            name = f"to_{_address(pod).replace('.', '_')}"
            rules = [f"    {rule}" for policy in own for rule in _rules(policy, pod, living, labels)]
            chains.append("\n".join([f"  chain {name} {{", *sorted(set(rules)), "    drop", "  }"]))
            verdicts.append(f"{_address(pod)} : goto {name}")
    hook = ["  chain forward {", "    type filter hook forward priority filter; policy accept;"]
    hook.append("    ct state established,related accept")
    if verdicts:
        hook.append(f"    ip daddr vmap {{ {', '.join(verdicts)} }}")
    body = "\n".join([*chains, *hook, "  }"])
    return f"table inet {TABLE}\ndelete table inet {TABLE}\ntable inet {TABLE} {{\n{body}\n}}\n"


def _address(pod: Object) -> str:
    """Returns a pod's IPv4 address; empty for one that has none of its own, or gave it back."""
    done = pod.get("status", {}).get("phase") in ("Succeeded", "Failed")
    if done or pod["spec"].get("hostNetwork"):
        return ""
    return str(pod.get("status", {}).get("podIP", ""))


def _isolates(policy: Object, pod: Object) -> bool:
    if policy["metadata"]["namespace"] != pod["metadata"]["namespace"]:
        return False
    if "Ingress" not in policy["spec"].get("policyTypes", ["Ingress"]):
        return False
    return matches(policy["spec"].get("podSelector", {}), pod["metadata"].get("labels", {}))


def _rules(
    policy: Object, pod: Object, pods: Sequence[Object], labels: Mapping[str, Mapping[str, str]]
) -> Iterator[str]:
    for rule in policy["spec"].get("ingress", []):
        sources = list(_sources(rule.get("from", []), policy, pods, labels))
        for port in _ports(rule.get("ports", []), pod):
            for source in sources:
                yield " ".join(word for word in (source, port, "accept") if word)


def _sources(
    peers: Iterable[Object],
    policy: Object,
    pods: Sequence[Object],
    labels: Mapping[str, Mapping[str, str]],
) -> Iterator[str]:
    """Yields matches of the sender; one empty match for a rule that lets everybody in."""
    peers = list(peers)
    if not peers:
        yield ""
    for peer in peers:
        if "ipBlock" in peer:
            block = peer["ipBlock"]
            if ipaddress.ip_network(block["cidr"]).version == 4:
                but = f" ip saddr != {{ {', '.join(block['except'])} }}" if block.get("except") else ""
                yield f"ip saddr {block['cidr']}{but}"
            continue
        sent_by = [_address(pod) for pod in pods if _is_peer(peer, policy, pod, labels)]
        if sent_by:
            yield f"ip saddr {{ {', '.join(sorted(sent_by))} }}"


def _is_peer(peer: Object, policy: Object, pod: Object, labels: Mapping[str, Mapping[str, str]]) -> bool:
    namespace = pod["metadata"]["namespace"]
    if "namespaceSelector" in peer:
        if not matches(peer["namespaceSelector"], labels.get(namespace, {})):
            return False
    elif namespace != policy["metadata"]["namespace"]:
        return False
    return matches(peer.get("podSelector", {}), pod["metadata"].get("labels", {}))


def _ports(ports: Iterable[Object], pod: Object) -> Iterator[str]:
    """Yields matches of the port at `pod`; one empty match for a rule that opens all of them."""
    ports = list(ports)
    if not ports:
        yield ""
    named = {
        port["name"]: port["containerPort"]
        for container in pod["spec"]["containers"]
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
    connection = http.client.HTTPSConnection(address, port, context=context, timeout=5)
    try:

        def items(path: str) -> list[Object]:
            connection.request("GET", path)
            answer = connection.getresponse()
            text = answer.read()
            if answer.status != http.client.OK:
                raise http.client.HTTPException(f"GET {path}: {answer.status} {text.decode()}")
            return list(json.loads(text)["items"])

        policies = items("/apis/networking.k8s.io/v1/networkpolicies")
        return policies, items("/api/v1/pods"), items("/api/v1/namespaces")
    finally:
        connection.close()


def _tell_unenforced(policies: Sequence[Object], reported: set[str]) -> None:
    """Says once for each policy with egress rules that they are not enforced; adds its uid to `reported`."""
    for policy in policies:
        if "Egress" in policy["spec"].get("policyTypes", []) and policy["metadata"]["uid"] not in reported:
            reported.add(policy["metadata"]["uid"])
            print(f"egress of NetworkPolicy {policy['metadata']['name']} is not enforced here", flush=True)


def main(arguments: Sequence[str]) -> None:
    """Keeps the node's table as the API server has the policies; never returns.

    `arguments`: the folder of the keys, and the address and port of the API server.
    """
    folder, address, port = arguments
    context = Pki(folder=Path(folder)).client_context("network-policy")
    made = ""
    reported: set[str] = set()
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
            _tell_unenforced(policies, reported)
        time.sleep(INTERVAL_S)


if __name__ == "__main__":
    main(sys.argv[1:])
