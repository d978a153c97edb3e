"""Assigns CPUs to the ranks of a machine: whole cores, and one NUMA node for each rank if possible. Pure.

In this module, a node is a NUMA node.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

WORTH_ONE_NODE = 0.75
"""A rank gets CPUs of several nodes if it would keep less than this part of its threads on one NUMA node.

Fewer threads would cost more than remote memory, which is read at about two thirds of the speed of local
memory. Besides, only a part of the rank's memory is remote then.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cpu:
    """One CPU that this pod may run on.

    Attributes:
        core: number of the physical core. CPUs of one core are hyper-threads of each other.
        node: number of the NUMA node.
    """

    id: int
    core: int
    node: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuSet:
    """The CPUs of one rank.

    Attributes:
        cpus: ids in ascending order; each runs one thread.
        nodes: NUMA nodes of the CPUs, in ascending order.
    """

    cpus: tuple[int, ...]
    nodes: tuple[int, ...]


def allocate(cpus: Sequence[Cpu], *, ranks: int, reserved: int) -> tuple[CpuSet, ...] | None:
    """Assigns the same number of CPUs to each rank, and no CPU twice.

    The hyper-threads of a core share its execution units, so a rank uses only one hyper-thread of each core.
    If there are fewer cores than ranks, each hyper-thread counts as a core. A rank gets CPUs of one NUMA
    node, or of several nodes if one node would cost the rank more than a quarter of its threads.

    Args:
        reserved: number of CPUs to leave free. They are the first CPUs of the nodes with the most free CPUs.

    Returns:
        None if there are too few CPUs for the ranks and the reserved CPUs.
    """
    whole_cores = _cores(cpus)
    single_cpus = [[cpu] for cpu in sorted(cpus, key=lambda cpu: cpu.id)]
    for units in (whole_cores, single_cpus):
        free = _free_cpus_by_node(units, reserved)
        free_units = sum(len(node) for node in free.values())
        if free_units >= ranks:
            return _distribute(free, ranks, free_units // ranks)
    return None


def _cores(cpus: Sequence[Cpu]) -> list[list[Cpu]]:
    """Groups CPUs by core, in the order of each core's first CPU."""
    cores: dict[int, list[Cpu]] = defaultdict(list)
    for cpu in sorted(cpus, key=lambda cpu: cpu.id):
        cores[cpu.core].append(cpu)
    return list(cores.values())


def _free_cpus_by_node(units: Sequence[Sequence[Cpu]], reserved: int) -> dict[int, list[Cpu]]:
    """Returns the first CPU of each unit that is not reserved, by node.

    Reserves units of the node with the most units left, so that no node loses many.

    Args:
        units: lists of CPUs, each a core with its hyper-threads or a single CPU.
        reserved: least number of CPUs in the reserved units.
    """
    nodes: dict[int, list[Sequence[Cpu]]] = defaultdict(list)
    for unit in units:
        nodes[unit[0].node].append(unit)
    while reserved > 0 and any(nodes.values()):
        fullest = max(nodes.values(), key=len)
        reserved -= len(fullest.pop(0))
    return {
        node: [unit[0] for unit in node_units] for node, node_units in sorted(nodes.items()) if node_units
    }


def _distribute(free_cpus: dict[int, list[Cpu]], ranks: int, threads: int) -> tuple[CpuSet, ...]:
    """Returns a CPU set for each rank. Each set is on one node if this costs few threads (WORTH_ONE_NODE).

    Args:
        free_cpus: free CPUs by node.
        threads: threads of each rank if ranks use several nodes.
    """
    threads_on_one_node = _most_threads_on_one_node([len(cpus) for cpus in free_cpus.values()], ranks)
    if threads_on_one_node >= WORTH_ONE_NODE * threads:
        taken_cpus = (_take_from_one_node(free_cpus, threads_on_one_node) for _ in range(ranks))
    else:
        taken_cpus = (_take_evenly(free_cpus, threads) for _ in range(ranks))
    return tuple(
        CpuSet(
            cpus=tuple(sorted(cpu.id for cpu in taken)),
            nodes=tuple(sorted({cpu.node for cpu in taken})),
        )
        for taken in taken_cpus
    )


def _most_threads_on_one_node(cpus_per_node: Sequence[int], ranks: int) -> int:
    """Returns the largest number of threads with which each rank fits on one node; 0 if none fits."""
    for threads in range(max(cpus_per_node), 0, -1):
        ranks_that_fit = sum(cpus // threads for cpus in cpus_per_node)
        if ranks_that_fit >= ranks:
            return threads
    return 0


def _take_from_one_node(free_cpus: dict[int, list[Cpu]], threads: int) -> list[Cpu]:
    """Takes the CPUs of a rank from the first node that has enough free CPUs."""
    node = next(node for node, cpus in free_cpus.items() if len(cpus) >= threads)
    taken, free_cpus[node] = free_cpus[node][:threads], free_cpus[node][threads:]
    return taken


def _take_evenly(free_cpus: dict[int, list[Cpu]], threads: int) -> list[Cpu]:
    """Takes CPUs from all nodes in turn, so that a rank reads the memory of all nodes at the same time."""
    one_of_each_node = zip_longest(*free_cpus.values())  # None for a node with fewer CPUs
    in_turn = [cpu for cpus in one_of_each_node for cpu in cpus if cpu is not None]
    taken = in_turn[:threads]
    for node, cpus in free_cpus.items():
        free_cpus[node] = [cpu for cpu in cpus if cpu not in taken]
    return taken
