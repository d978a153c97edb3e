"""The network and mount namespaces that a node lives in, and its link to the machine.

Everything that a node would change on the machine - addresses, firewall, mounts, /var/lib, /run,
kernel settings - it changes in here, and it goes when the last process of the namespaces goes.
"""

import contextlib
import ctypes
import dataclasses
import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.cluster import processes
from tests.cluster.processes import ProcessIdentity
from tests.cluster.state import State

CLONE_NEWNET = 0x40000000
# kubelet insists on these kernel settings and would write them, for the whole machine. Files of
# ours are mounted over them in the node's namespace, so that it finds what it wants.
KERNEL_SETTINGS = {
    "vm/overcommit_memory": "1",
    "vm/panic_on_oom": "0",
    "kernel/panic": "10",
    "kernel/panic_on_oops": "1",
    "kernel/keys/root_maxkeys": "1000000",
    "kernel/keys/root_maxbytes": "25000000",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Addresses:
    """The ranges of node number `number`; apart from those of its siblings on the same machine.

    The machine has a blackhole route for the pods and the services, behind the real one: a
    request to a node that is gone ends here and never leaves the machine.
    """

    number: int

    @property
    def link(self) -> str:
        """The machine's end of the link, named after the node."""
        return f"heteroinfer{self.number}"

    @property
    def machine(self) -> str:
        return f"10.199.{self.number}.1"

    @property
    def node(self) -> str:
        return f"10.199.{self.number}.2"

    @property
    def link_range(self) -> str:
        return f"10.199.{self.number}.0/24"

    @property
    def pod_range(self) -> str:
        return f"10.244.{self.number}.0/24"

    @property
    def service_range(self) -> str:
        return f"10.96.{self.number}.0/24"

    @property
    def api_service(self) -> str:
        """The address of the Service `kubernetes`: the first of the range."""
        return f"10.96.{self.number}.1"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Namespaces:
    """Namespaces kept by one idle process, `holder`."""

    holder: ProcessIdentity

    @property
    def prefix(self) -> tuple[str, ...]:
        """The words that start a command line inside."""
        return ("nsenter", f"--target={self.holder.pid}", "--net", "--mount", "--")

    def run(self, *command: str, timeout_s: float = 60) -> str:
        """Returns what a short command printed inside.

        Raises:
            ClusterError: it failed.
        """
        return processes.run([*self.prefix, *command], timeout_s=timeout_s)

    def connect(self, address: str, port: int, timeout_s: float) -> socket.socket:
        """Returns a TCP connection that starts inside, as one of kubelet's own probes does.

        Only the calling thread steps in, for as long as the connection takes.
        """
        libc = ctypes.CDLL(None, use_errno=True)
        with contextlib.ExitStack() as opened:
            home = opened.enter_context(open("/proc/thread-self/ns/net"))
            inside = opened.enter_context(open(f"/proc/{self.holder.pid}/ns/net"))
            _enter(libc, inside.fileno())
            try:
                return socket.create_connection((address, port), timeout=timeout_s)
            finally:
                _enter(libc, home.fileno())


def _enter(libc: ctypes.CDLL, namespace: int) -> None:
    if libc.setns(namespace, CLONE_NEWNET):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def create_namespaces(state: State) -> Namespaces:
    """Returns new namespaces: private mounts, /run, /var/lib and /var/log of their own, no network yet."""
    holder = processes.spawn(
        ["unshare", "--net", "--mount", "--propagation", "private", "sleep", "infinity"],
        mark=state.folder,
        log=state.log("namespaces"),
    )
    ours = os.readlink("/proc/self/ns/mnt")

    def apart() -> bool:
        # sleep runs only once unshare is done with both namespaces and with the propagation.
        with contextlib.suppress(FileNotFoundError):
            return Path(f"/proc/{holder.pid}/comm").read_text() == "sleep\n"
        return False

    processes.wait_until(
        "the node's namespaces", apart, timeout_s=10, process=holder, log=state.log("namespaces")
    )
    if os.readlink(f"/proc/{holder.pid}/ns/mnt") == ours:
        raise AssertionError("the holder of the namespaces is in ours")
    namespaces = Namespaces(holder=holder)
    namespaces.run("sh", "-euc", _mount_script(state))
    return namespaces


def _mount_script(state: State) -> str:
    lines = ["mount --make-rshared /", "mount -t tmpfs -o mode=755 tmpfs /run", "mkdir /run/lock"]
    for folder in ("lib", "log"):
        mine = state.folder / "var" / folder
        mine.mkdir(parents=True)
        lines.append(f"mount --bind {mine} /var/{folder}")
    for setting, value in KERNEL_SETTINGS.items():
        file = state.folder / "kernel" / setting
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{value}\n")
        lines.append(f"mount --bind {file} /proc/sys/{setting}")
    return "\n".join(lines)


def connect_namespaces(state: State, namespaces: Namespaces, addresses: Addresses) -> None:
    """Links the namespaces with the machine, and routes the pods and services of the node into them."""
    destinations = (addresses.pod_range, addresses.service_range)
    end_here(state, (addresses.link_range, *destinations))
    state.will_change("link", addresses.link)
    link(_ip, namespaces, addresses, destinations)


def end_here(state: State, destinations: Sequence[str]) -> None:
    """Ends on this machine whatever has no nearer route to these ranges."""
    for destination in destinations:
        state.will_change("blackhole", destination)
        _ip("route", "add", "blackhole", destination, "metric", "4096")


def link(
    ip: Callable[..., object], namespaces: Namespaces, addresses: Addresses, destinations: Sequence[str]
) -> None:
    """Links the namespaces with the one that `ip` runs in, and routes these ranges from there into them."""
    peer = ("peer", "name", "eth0", "netns", str(namespaces.holder.pid))
    ip("link", "add", addresses.link, "type", "veth", *peer)
    ip("address", "add", f"{addresses.machine}/24", "dev", addresses.link)
    ip("link", "set", addresses.link, "up")
    for command in (
        ("ip", "link", "set", "lo", "up"),
        ("ip", "address", "add", f"{addresses.node}/24", "dev", "eth0"),
        ("ip", "link", "set", "eth0", "up"),
        ("ip", "route", "add", "default", "via", addresses.machine),
        ("sysctl", "-q", "-w", "net.ipv4.ip_forward=1"),
    ):
        namespaces.run(*command)
    for destination in destinations:
        ip("route", "add", destination, "via", addresses.node)


def _ip(*arguments: str) -> None:
    processes.run(["ip", *arguments])
