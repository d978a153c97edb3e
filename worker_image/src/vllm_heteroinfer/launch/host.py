"""Observes this pod's machine: CPUs, quota, address and interface. Reads the kernel; Linux only."""

import asyncio
import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

from heteroinfer_contract import names
from heteroinfer_contract.cgroups import cpu_quota
from heteroinfer_contract.errors import ContractError
from heteroinfer_contract.pod_launch import PodLaunch
from vllm_heteroinfer.launch.cpu_allocation import Cpu
from vllm_heteroinfer.launch.environment import Host
from vllm_heteroinfer.pod.addresses import look_up

IpAddress: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address

RESOLVE_INTERVAL_S = 0.5
LOOPBACK_INTERFACE = "lo"
SIOCGIFADDR = 0x8915
"""linux/sockios.h: the IPv4 address of an interface."""


def observe_host(launch: PodLaunch, address: str) -> Host:
    """Observes this machine.

    Args:
        address: this pod's IP address in the group; used if the launch names no interface.

    Raises:
        ContractError: the named interface does not exist or has no address, or no interface has `address`.
    """
    if launch.network_interface == "auto":
        interface = interface_of(address)
    else:
        interface = launch.network_interface
        address = address_of(interface)
    return Host(
        cpus=observe_cpus(sorted(os.sched_getaffinity(0)), Path("/sys/devices/system")),
        cpu_quota=cpu_quota(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup").read_text()),
        machine_cpus=os.cpu_count() or 1,
        address=address,
        interface=interface,
    )


def waited_for_cpu_s() -> float:
    """Returns how long the main thread has waited for a CPU since its start, in seconds.

    Returns 0 if the kernel does not count this time (CONFIG_SCHED_INFO).
    """
    try:
        return int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9
    except OSError:
        return 0.0


def observe_cpus(ids: Sequence[int], system: Path) -> tuple[Cpu, ...]:
    """Observes the cores and NUMA nodes of CPUs. Without data from the kernel, each CPU is a core of node 0.

    Args:
        system: the kernel's directory /sys/devices/system.
    """
    nodes = {
        cpu: int(node.name.removeprefix("node"))
        for node in (system / "node").glob("node[0-9]*")
        for cpu in parse_id_list((node / "cpulist").read_text())
    }
    return tuple(Cpu(id=cpu, core=_core_of(cpu, system), node=nodes.get(cpu, 0)) for cpu in ids)


def _core_of(cpu: int, system: Path) -> int:
    """Returns the number of a CPU's core, which is the lowest number of its hyper-threads."""
    try:
        siblings = (system / f"cpu/cpu{cpu}/topology/thread_siblings_list").read_text()
    except OSError:
        return cpu
    return min(parse_id_list(siblings), default=cpu)


def parse_id_list(text: str) -> list[int]:
    """Parses a list of the kernel, such as `0-2,8`."""
    ids: list[int] = []
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            ids += range(int(first), int(last or first) + 1)
    return ids


def interface_of(address: str) -> str:
    """Returns the name of the interface that has `address`.

    Raises:
        ContractError: no interface has this address.
    """
    ip = ipaddress.ip_address(address)
    if ip.is_loopback:
        return LOOPBACK_INTERFACE
    for _, name in socket.if_nameindex():
        if ip in _addresses_of(name):
            return name
    raise ContractError(
        f"no network interface of this pod has the pod's address {address} (interfaces: "
        f"{', '.join(_interface_names())}). Set network.interface ({names.ENV_NETWORK_INTERFACE}) to one of "
        "these interfaces"
    )


def address_of(interface: str) -> str:
    """Returns the first address of an interface that is not link-local (IPv4 first).

    Raises:
        ContractError: the interface does not exist, or has no such address.
    """
    if interface not in _interface_names():
        raise ContractError(
            f"network.interface ({names.ENV_NETWORK_INTERFACE}) must be auto or one of "
            f"{', '.join(_interface_names())} (got {interface!r})"
        )
    address = first_not_link_local(_addresses_of(interface))
    if address is None:
        raise ContractError(
            f"network interface {interface!r} has no address that other hosts reach. Set network.interface "
            "to another name or auto"
        )
    return str(address)


def first_not_link_local(addresses: Iterable[IpAddress]) -> IpAddress | None:
    """Returns the first address that is not link-local, or None."""
    return next((address for address in addresses if not address.is_link_local), None)


def _interface_names() -> list[str]:
    """Returns the names of all network interfaces."""
    return [name for _, name in socket.if_nameindex()]


def _addresses_of(interface: str) -> Iterator[IpAddress]:
    """Yields the IPv4 address and then the IPv6 addresses of an interface."""
    request = struct.pack("256s", interface.encode()[:15])  # the kernel's limit of a name
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            reply = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)
        except OSError:
            pass  # the interface has no IPv4 address
        else:
            yield ipaddress.IPv4Address(reply[20:24])  # struct ifreq: the name, then a sockaddr_in
    table = Path("/proc/net/if_inet6")
    for line in table.read_text().splitlines() if table.exists() else []:
        fields = line.split()  # the address in hex, four numbers, the interface
        if fields[-1] == interface:
            yield ipaddress.IPv6Address(int(fields[0], 16))


async def wait_for_leader_address(launch: PodLaunch) -> str:
    """Waits until DNS has the leader's IP address, and returns it. The caller must set a time-out.

    A new name in a cluster can take half a minute to appear.
    """
    while True:
        try:
            return await look_up(launch.leader.host, launch.leader.control_port)
        except OSError:
            await asyncio.sleep(RESOLVE_INTERVAL_S)
