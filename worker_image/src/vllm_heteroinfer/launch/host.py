"""What this pod's machine is: CPUs, quota, address and interface. Reads the kernel; Linux only."""

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
    """Returns this machine.

    `address` is its own IP address as the group sees it; it is used unless the launch
    names an interface.

    Raises:
        ContractError: the named interface is not there or has no address, or no
            interface has `address`.
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
    """Returns for how long the main thread could have run and got no CPU, since its start, in seconds.

    0 where the kernel does not count it (CONFIG_SCHED_INFO).
    """
    try:
        return int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9
    except OSError:
        return 0.0


def observe_cpus(ids: Sequence[int], system: Path) -> tuple[Cpu, ...]:
    """Returns the cores and NUMA nodes of these CPUs; each a core of node 0 where the kernel tells nothing.

    Args:
        system: where the kernel shows its devices, /sys/devices/system.
    """
    nodes = {
        cpu: int(node.name.removeprefix("node"))
        for node in (system / "node").glob("node[0-9]*")
        for cpu in parse_id_list((node / "cpulist").read_text())
    }
    return tuple(Cpu(id=cpu, core=_core(cpu, system), node=nodes.get(cpu, 0)) for cpu in ids)


def _core(cpu: int, system: Path) -> int:
    """Returns the number of a CPU's core: that of its first hyper-thread."""
    try:
        siblings = (system / f"cpu/cpu{cpu}/topology/thread_siblings_list").read_text()
    except OSError:
        return cpu
    return min(parse_id_list(siblings), default=cpu)


def parse_id_list(text: str) -> list[int]:
    """Returns the numbers of a kernel list such as `0-2,8`."""
    ids: list[int] = []
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            ids += range(int(first), int(last or first) + 1)
    return ids


def interface_of(address: str) -> str:
    """Returns the name of the interface that has `address`.

    Raises:
        ContractError: none has.
    """
    ip = ipaddress.ip_address(address)
    if ip.is_loopback:
        return LOOPBACK_INTERFACE
    for _, name in socket.if_nameindex():
        if ip in _addresses(name):
            return name
    raise ContractError(
        f"got {address} as own address, expected one of this pod's interfaces {_interfaces()}; "
        f"set network.interface ({names.ENV_NETWORK_INTERFACE})"
    )


def address_of(interface: str) -> str:
    """Returns the first address of an interface: IPv4, or IPv6 that is not of its link only.

    Raises:
        ContractError: there is no such interface, or it has no address.
    """
    if interface not in _interfaces():
        raise ContractError(
            f"got network interface {interface!r} ({names.ENV_NETWORK_INTERFACE}), expected one of "
            f"{', '.join(_interfaces())}, or auto"
        )
    address = first_routed(_addresses(interface))
    if address is None:
        raise ContractError(f"network interface {interface!r} has no address; choose another one, or auto")
    return str(address)


def first_routed(addresses: Iterable[IpAddress]) -> IpAddress | None:
    """Returns the first address that is not of its link only, None if there is none."""
    return next((address for address in addresses if not address.is_link_local), None)


def _interfaces() -> list[str]:
    return [name for _, name in socket.if_nameindex()]


def _addresses(interface: str) -> Iterator[IpAddress]:
    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            reply = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)
        except OSError:
            pass  # it has no IPv4 address
        else:
            yield ipaddress.IPv4Address(reply[20:24])
    table = Path("/proc/net/if_inet6")
    for line in table.read_text().splitlines() if table.exists() else []:
        fields = line.split()
        if fields[-1] == interface:
            yield ipaddress.IPv6Address(int(fields[0], 16))


async def find_leader_address(launch: PodLaunch) -> str:
    """Returns the leader's IP address, for the leader itself; the caller sets the deadline.

    A name in a cluster can take half a minute to appear.
    """
    while True:
        try:
            return await look_up(launch.leader.host, launch.leader.control_port)
        except OSError:
            await asyncio.sleep(RESOLVE_INTERVAL_S)
