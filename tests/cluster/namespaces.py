"""Creates the network and mount namespaces of a node, and its link to the machine.

The node's changes of the machine (addresses, firewall, mounts, /var/lib, /run, kernel settings) happen inside
these namespaces, and disappear with their last process.
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
# The kubelet requires these kernel settings, and would write them for the whole machine. Files of ours are
# mounted over them in the node's namespace, so that the kubelet finds the right values.
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
    """The address ranges of node `number`, different from those of other nodes on the machine.

    The machine has a blackhole route for the pods and the services, after the real one. So a request to a
    removed node fails here, and never leaves the machine.
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
    """Namespaces that an idle process, `holder`, keeps open."""

    holder: ProcessIdentity

    @property
    def prefix(self) -> tuple[str, ...]:
        """The words that start a command inside the namespaces."""
        return ("nsenter", f"--target={self.holder.pid}", "--net", "--mount", "--")

    def run(self, *command: str, timeout_s: float = 60) -> str:
        """Runs a short command inside, and returns its output.

        Raises:
            ClusterError: the command failed.
        """
        return processes.run([*self.prefix, *command], timeout_s=timeout_s)

    def connect(self, address: str, port: int, timeout_s: float) -> socket.socket:
        """Returns a TCP connection that starts inside, like the kubelet's own probes.

        Only the calling thread enters the namespaces, until it is connected.
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
    """Creates namespaces with their own mounts, /run, /var/lib and /var/log, and without a network."""
    holder = processes.spawn(
        ["unshare", "--net", "--mount", "--propagation", "private", "sleep", "infinity"],
        mark=state.folder,
        log=state.log("namespaces"),
    )
    ours = os.readlink("/proc/self/ns/mnt")

    def apart() -> bool:
        # sleep runs only after unshare has set up both namespaces and the propagation of mounts
        with contextlib.suppress(FileNotFoundError):
            return Path(f"/proc/{holder.pid}/comm").read_text() == "sleep\n"
        return False

    processes.wait_until(
        "the node's namespaces", apart, timeout_s=10, process=holder, log=state.log("namespaces")
    )
    if os.readlink(f"/proc/{holder.pid}/ns/mnt") == ours:
        raise AssertionError("the new process has left our namespaces")
    namespaces = Namespaces(holder=holder)
    namespaces.run("sh", "-euc", _mount_script(state))
    return namespaces


def _mount_script(state: State) -> str:
    """Returns the shell commands that set up the mounts of a node's namespaces."""
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
    """Links the namespaces with the machine, and routes the node's pods and services into them."""
    destinations = (addresses.pod_range, addresses.service_range)
    end_here(state, (addresses.link_range, *destinations))
    state.will_change("link", addresses.link)
    link(_ip, namespaces, addresses, destinations)


def end_here(state: State, destinations: Sequence[str]) -> None:
    """Makes this machine drop packets to these ranges that have no more specific route."""
    for destination in destinations:
        state.will_change("blackhole", destination)
        _ip("route", "add", "blackhole", destination, "metric", "4096")


def link(
    ip: Callable[..., object], namespaces: Namespaces, addresses: Addresses, destinations: Sequence[str]
) -> None:
    """Links the namespaces with those in which `ip` runs, and routes these ranges into them."""
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
