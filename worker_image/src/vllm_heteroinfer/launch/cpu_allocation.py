"""Which CPUs each rank of a machine gets: whole cores, one NUMA node a rank where that is possible. PURE."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

WORTH_ONE_NODE = 0.75
"""A rank on one NUMA node may have so few of the threads that it would have over several: remote
memory is read at about two thirds of the speed of a node's own, and only a part of it is remote."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cpu:
    """One CPU that this pod may run on.

    Attributes:
        core: its physical core; CPUs of one core are hyper-threads of each other.
    """

    id: int
    core: int
    node: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuSet:
    """What one rank computes on.

    Attributes:
        cpus: ids, ascending; a thread on each.
        nodes: NUMA nodes of these, ascending.
    """

    cpus: tuple[int, ...]
    nodes: tuple[int, ...]


def allocate(cpus: Sequence[Cpu], *, ranks: int, reserved: int) -> tuple[CpuSet, ...] | None:
    """Returns the CPUs of each rank: equally many threads, no CPU twice.

    A core's hyper-threads share its units, so a rank takes one of each core, and the second
    ones only where there are fewer cores than ranks. A rank has one NUMA node, unless that
    would cost it more than a quarter of its threads; then it has its share of several.

    Args:
        reserved: CPUs to leave to others; the first ones of the nodes that have the most.

    Returns:
        None if there are fewer CPUs than ranks and reserved ones.
    """
    for units in (_cores(cpus), [[cpu] for cpu in sorted(cpus, key=lambda cpu: cpu.id)]):
        left = _without_reserved(units, reserved)
        count = sum(len(node) for node in left.values())
        if count >= ranks:
            return _share_out(left, ranks, count // ranks)
    return None


def _cores(cpus: Sequence[Cpu]) -> list[list[Cpu]]:
    """Returns the CPUs of each core, cores in the order of their first CPU."""
    cores: dict[int, list[Cpu]] = defaultdict(list)
    for cpu in sorted(cpus, key=lambda cpu: cpu.id):
        cores[cpu.core].append(cpu)
    return list(cores.values())


def _without_reserved(units: Sequence[Sequence[Cpu]], reserved: int) -> dict[int, list[Cpu]]:
    """Returns the first CPU of each unit by node, less whole units that hold the reserved CPUs."""
    nodes: dict[int, list[Sequence[Cpu]]] = defaultdict(list)
    for unit in units:
        nodes[unit[0].node].append(unit)
    while reserved > 0 and any(nodes.values()):
        fullest = max(nodes.values(), key=len)
        reserved -= len(fullest.pop(0))
    return {node: [unit[0] for unit in own] for node, own in sorted(nodes.items()) if own}


def _share_out(left: dict[int, list[Cpu]], ranks: int, threads: int) -> tuple[CpuSet, ...]:
    on_one_node = _most_on_one_node([len(cpus) for cpus in left.values()], ranks)
    if on_one_node >= WORTH_ONE_NODE * threads:
        threads = on_one_node
        takes = (_take_from_one(left, threads) for _ in range(ranks))
    else:
        takes = (_take_evenly(left, threads) for _ in range(ranks))
    return tuple(
        CpuSet(
            cpus=tuple(sorted(cpu.id for cpu in taken)),
            nodes=tuple(sorted({cpu.node for cpu in taken})),
        )
        for taken in takes
    )


def _most_on_one_node(sizes: Sequence[int], ranks: int) -> int:
    """Returns the most threads a rank with which every rank fits on some node; 0 if none does."""
    return next((n for n in range(max(sizes), 0, -1) if sum(size // n for size in sizes) >= ranks), 0)


def _take_from_one(left: dict[int, list[Cpu]], threads: int) -> list[Cpu]:
    node = next(node for node, cpus in left.items() if len(cpus) >= threads)
    taken, left[node] = left[node][:threads], left[node][threads:]
    return taken


def _take_evenly(left: dict[int, list[Cpu]], threads: int) -> list[Cpu]:
    """Takes CPUs from the nodes in turn, so that memory of all of them is read at once."""
    turns = [cpu for row in zip_longest(*left.values()) for cpu in row if cpu is not None]
    taken = turns[:threads]
    for node, cpus in left.items():
        left[node] = [cpu for cpu in cpus if cpu not in taken]
    return taken
