"""Lists what a cluster could leave on the machine, as values that tests compare."""

import re
from pathlib import Path

from tests.cluster import cluster_cgroup, processes


def observe_traces() -> set[str]:
    """Returns every link, route, mount, network namespace, cgroup and firewall table, each as a line."""
    routes = processes.run(["ip", "route", "show", "table", "all"]).splitlines()
    links = [folder.name for folder in Path("/sys/class/net").iterdir()]
    mounts = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    groups = [str(f) for root in cluster_cgroup.hierarchies() for f in root.glob("*") if f.is_dir()]
    settings = [f"{name} = {Path('/proc/sys', name).read_text().strip()}" for name in _SETTINGS]
    return {
        *(f"route {re.sub(r' +', ' ', line).strip()}" for line in routes),
        *(f"link {name}" for name in links),
        *(f"mount {target}" for target in mounts),
        *(f"cgroup {name}" for name in groups),
        *(f"namespace {name}" for name in _network_namespaces()),
        *(f"setting {words}" for words in settings),
    }


_SETTINGS = ("net/ipv4/ip_forward", "vm/overcommit_memory", "kernel/panic", "kernel/panic_on_oops")


def _network_namespaces() -> set[str]:
    found = set()
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                found.add(str((process / "ns" / "net").readlink()))
            except OSError:  # it ended in the meantime
                continue
    return found
