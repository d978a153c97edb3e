"""Runs a group whose pods have their own network namespaces. Runs as a process in its own namespaces.

`python -m tests.integration.worker.pod_networks [--api-on-loopback] PLAN LOGS REFERENCE RANGE...` gives pod N
the N-th pair of addresses of each range, and host names as headless Services do. It sends requests from a
third namespace, as clients do, and prints what it saw as JSON. With --api-on-loopback, the leader's API
listens on loopback only. See `test_address_families.py`.
"""

import contextlib
import ipaddress
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from heteroinfer_contract import names
from heteroinfer_contract.plan import Plan
from heteroinfer_contract.pod_launch import PodAddress
from tests.integration.worker.answers import ONE_THREAD, answer_all
from tests.integration.worker.groups import READY_TIMEOUT_S, Group, fetch, start_group
from vllm_heteroinfer.pod.addresses import host_in_url

DOMAIN = "tiny-0-ranks.test.svc"
START_S = 10.0
API_ON_LOOPBACK = "--api-on-loopback"
WATCHED_S = 10.0
"""How long a leader is watched whose API listens on loopback only: twenty of its probes."""
LOOPBACK_CODE = f"""
import socket

bind = socket.socket.bind


def bind_on_loopback(self, address):
    if self.family in (socket.AF_INET, socket.AF_INET6) and address[1] == {names.DEFAULT_API_PORT}:
        host = "127.0.0.1" if self.family == socket.AF_INET else "::ffff:127.0.0.1"
        address = (host, *address[1:])
    return bind(self, address)


socket.socket.bind = bind_on_loopback
"""
"""Module `sitecustomize` of the leader: vLLM's API server listens on loopback instead of on every address."""


def run(*command: str) -> None:
    """Runs a short command. Raises if it fails."""
    subprocess.run(command, check=True, timeout=START_S, stdout=sys.stderr)


def pair(prefix: str, pod: int) -> tuple[str, str, int]:
    """Returns the router's and the pod's address of a link, and the length of their prefix."""
    network = ipaddress.ip_network(prefix)
    half = network.prefixlen + 8
    own = list(network.subnets(new_prefix=half))[pod] if network.version == 4 else _nth(network, half, pod)
    return str(own[1]), str(own[2]), half


def _nth(network: Any, half: int, pod: int) -> ipaddress.IPv6Network:
    first = int(network.network_address) + (pod << (128 - half))
    return ipaddress.IPv6Network((first, half))


@contextlib.contextmanager
def pod_namespace(pod: int, prefixes: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yields the words that start a command in a new network namespace, linked with this one."""
    holder = subprocess.Popen(["unshare", "--net", "sleep", "infinity"])
    try:
        deadline = time.monotonic() + START_S
        while Path(f"/proc/{holder.pid}/comm").read_text() != "sleep\n":
            assert time.monotonic() < deadline
            time.sleep(0.01)
        inside = ("nsenter", f"--target={holder.pid}", "--net", "--")
        run(
            "ip", "link", "add", f"pod{pod}", "type", "veth", "peer", "name", "eth0", "netns", str(holder.pid)
        )
        run("ip", "link", "set", f"pod{pod}", "up")
        run(*inside, "ip", "link", "set", "lo", "up")
        run(*inside, "ip", "link", "set", "eth0", "up")
        for prefix in prefixes:
            router, own, length = pair(prefix, pod)
            version = ipaddress.ip_address(own).version
            # Without the second in which the kernel looks for another holder of this address.
            nodad = ("nodad",) if version == 6 else ()
            run("ip", "address", "add", f"{router}/{length}", "dev", f"pod{pod}", *nodad)
            run(*inside, "ip", "address", "add", f"{own}/{length}", "dev", "eth0", *nodad)
            run(*inside, "ip", f"-{version}", "route", "add", "default", "via", router)
        yield inside
    finally:
        holder.kill()
        holder.wait()


def main(arguments: Sequence[str]) -> None:
    """Serves a plan's group, with each pod in its own namespace. Prints what its clients see."""
    on_loopback = arguments[0] == API_ON_LOOPBACK
    arguments = arguments[1:] if on_loopback else arguments
    plan = Plan.from_env({names.ENV_PLAN: Path(arguments[0]).read_text()})
    logs = Path(arguments[1])
    reference, prefixes = json.loads(Path(arguments[2]).read_text()), arguments[3:]
    run("ip", "link", "set", "lo", "up")
    run("sysctl", "-qw", "net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1")
    hosts = [f"tiny-0-1-{pod.index}.{DOMAIN}" for pod in plan.pods]
    table = [f"{pair(each, pod)[1]} {host}" for pod, host in enumerate(hosts) for each in prefixes]
    (logs / "hosts").write_text("\n".join(["127.0.0.1 localhost", "::1 localhost", *table, ""]))
    run("mount", "--bind", str(logs / "hosts"), "/etc/hosts")
    with contextlib.ExitStack() as stack:
        wrappers = {p.index: stack.enter_context(pod_namespace(p.index, prefixes)) for p in plan.pods}
        addresses = tuple(PodAddress(host=host) for host in hosts)
        group = stack.enter_context(
            start_group(
                plan,
                logs / "group",
                addresses=addresses,
                env=ONE_THREAD,
                pod_env={0: loopback_env(logs)} if on_loopback else {},
                wrappers=wrappers,
            )
        )
        if on_loopback:
            print(json.dumps(watch_leader(group, wrappers[0])))
            return
        group.wait_ready()
        answer_all(group, reference)
        print(json.dumps({"answers": answers_at(group, prefixes), "listening": listening(wrappers)}))


def loopback_env(logs: Path) -> dict[str, str]:
    """Returns variables that let the API server of a pod listen on loopback only."""
    folder = logs / "loopback"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(LOOPBACK_CODE)
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))}


def watch_leader(group: Group, inside: Sequence[str]) -> dict[str, Any]:
    """Returns what a leader answers for some seconds after its API answers on loopback."""
    port, path = names.DEFAULT_API_PORT, names.PATH_API_HEALTH
    ask = f"import urllib.request as r; r.urlopen('http://127.0.0.1:{port}{path}', timeout=5)"
    deadline = time.monotonic() + READY_TIMEOUT_S
    command = [*inside, sys.executable, "-c", ask]
    while subprocess.run(command, check=False, stderr=subprocess.DEVNULL).returncode:
        assert time.monotonic() < deadline, group.logs()
        assert not any(child.ended() for child in group.children), group.logs()
        time.sleep(0.5)
    seen: list[int] = []
    deadline = time.monotonic() + WATCHED_S
    while time.monotonic() < deadline:
        seen.append(answer_code(group.health_url(names.PATH_READYZ)))
        time.sleep(0.25)
    leader = group.addresses[0].host
    return {
        "readyz": sorted({*seen}),
        "ready": group.status().ready,
        "api": fetch(f"http://{leader}:{port}{path}") is not None,
        "ended": [child.name for child in group.children if child.ended()],
    }


def answer_code(url: str) -> int:
    """Returns the status code of an answer; 0 without an answer."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def answers_at(group: Group, prefixes: Sequence[str]) -> dict[str, bool]:
    """Returns whether each port of each pod answers, by address and port."""
    found = {}
    for prefix in prefixes:
        for pod in group.plan.pods:
            host = pair(prefix, pod.index)[1]
            paths = {names.DEFAULT_HEALTH_PORT: names.PATH_READYZ, names.DEFAULT_METRICS_PORT: "/metrics"}
            if pod.index == 0:
                paths[names.DEFAULT_API_PORT] = names.PATH_API_HEALTH
            for port, path in paths.items():
                url = f"http://{host_in_url(host)}:{port}{path}"
                found[f"{host} {port}"] = fetch(url) is not None
    return found


def listening(wrappers: dict[int, tuple[str, ...]]) -> list[str]:
    """Returns the local addresses of the connections between pods, each with its address family."""
    found = set()
    for inside in wrappers.values():
        table = subprocess.run(
            [*inside, "ss", "-Htn", "state", "established"], check=True, stdout=subprocess.PIPE, text=True
        )
        for line in table.stdout.splitlines():
            host = line.split()[2].rpartition(":")[0].strip("[]").removeprefix("::ffff:")
            if not ipaddress.ip_address(host.partition("%")[0]).is_loopback:
                found.add(host)
    return sorted(found)


if __name__ == "__main__":
    main(sys.argv[1:])
