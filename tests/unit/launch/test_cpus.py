"""Cores and NUMA nodes: read from the kernel's files, and divided among ranks."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_heteroinfer.launch.cpu_allocation import Cpu, CpuSet, allocate
from vllm_heteroinfer.launch.host import observe_cpus, parse_id_list

ONE_NODE = tuple(Cpu(id=i, core=i) for i in range(8))
TWO_NODES = tuple(Cpu(id=i, core=i, node=i // 8) for i in range(16))
SMT = tuple(Cpu(id=i, core=i % 8, node=i % 8 // 4) for i in range(16))
"""Two nodes of four cores; hyper-threads 8..15 are the second ones of cores 0..7."""


def cpu_set(*cpus: int, nodes: tuple[int, ...] = (0,)) -> CpuSet:
    return CpuSet(cpus=cpus, nodes=nodes)


def test_the_first_cpus_are_reserved() -> None:
    assert allocate(ONE_NODE, ranks=2, reserved=2) == (cpu_set(2, 3, 4), cpu_set(5, 6, 7))


def test_leaves_remaining_cores_free() -> None:
    assert allocate(ONE_NODE, ranks=3, reserved=0) == (cpu_set(0, 1), cpu_set(2, 3), cpu_set(4, 5))


def test_each_rank_gets_its_own_numa_node() -> None:
    assert allocate(TWO_NODES, ranks=2, reserved=0) == (
        cpu_set(*range(8), nodes=(0,)),
        cpu_set(*range(8, 16), nodes=(1,)),
    )


def test_reserved_cpus_leave_equally_many_cores_on_each_numa_node() -> None:
    assert allocate(TWO_NODES, ranks=2, reserved=2) == (
        cpu_set(*range(1, 8), nodes=(0,)),
        cpu_set(*range(9, 16), nodes=(1,)),
    )


def test_a_few_unused_threads_are_better_than_a_second_numa_node() -> None:
    uneven = TWO_NODES[:6] + TWO_NODES[8:]
    assert allocate(uneven, ranks=2, reserved=0) == (
        cpu_set(*range(6), nodes=(0,)),
        cpu_set(*range(8, 14), nodes=(1,)),
    )


def test_one_rank_spans_numa_nodes_instead_of_leaving_half_of_the_machine_unused() -> None:
    assert allocate(TWO_NODES, ranks=1, reserved=2) == (cpu_set(*range(1, 8), *range(9, 16), nodes=(0, 1)),)


def test_three_ranks_share_two_numa_nodes() -> None:
    """With whole NUMA nodes, each rank has four of the five threads of an equal share, which is enough."""
    assert allocate(TWO_NODES, ranks=3, reserved=0) == (
        cpu_set(0, 1, 2, 3, nodes=(0,)),
        cpu_set(4, 5, 6, 7, nodes=(0,)),
        cpu_set(8, 9, 10, 11, nodes=(1,)),
    )


def test_a_rank_uses_one_hyper_thread_of_each_core() -> None:
    assert allocate(SMT, ranks=2, reserved=0) == (
        cpu_set(0, 1, 2, 3, nodes=(0,)),
        cpu_set(4, 5, 6, 7, nodes=(1,)),
    )


def test_reserved_cpus_are_a_whole_core() -> None:
    """Two CPUs are one core here. The rank's threads must not share a core with a spinning process."""
    assert allocate(SMT, ranks=1, reserved=2) == (cpu_set(1, 2, 3, 4, 5, 6, 7, nodes=(0, 1)),)


def test_ranks_use_both_hyper_threads_if_there_are_too_few_cores() -> None:
    two_cores = (SMT[0], SMT[1], SMT[8], SMT[9])
    assert allocate(two_cores, ranks=3, reserved=1) == (cpu_set(1), cpu_set(8), cpu_set(9))


def test_assigns_no_cpus_if_there_are_too_few() -> None:
    assert allocate(ONE_NODE, ranks=7, reserved=2) is None


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3)), min_size=1, max_size=40),
    st.integers(1, 6),
    st.integers(0, 4),
)
def test_assigns_no_cpu_twice(cores: list[tuple[int, int]], ranks: int, reserved: int) -> None:
    cpus = [Cpu(id=i, core=core * 4 + node, node=node) for i, (core, node) in enumerate(cores)]
    cpu_sets = allocate(cpus, ranks=ranks, reserved=reserved)
    if cpu_sets is None:
        assert len(cpus) < ranks + reserved
        return
    assert len(cpu_sets) == ranks
    assert len({len(own.cpus) for own in cpu_sets}) == 1
    taken = [cpu for own in cpu_sets for cpu in own.cpus]
    assert len(set(taken)) == len(taken) >= ranks
    assert len(cpus) - len(taken) >= reserved
    nodes = {cpu.id: cpu.node for cpu in cpus}
    assert all(own.nodes == tuple(sorted({nodes[cpu] for cpu in own.cpus})) for own in cpu_sets)


@pytest.mark.parametrize(("text", "ids"), [("0-2,8\n", [0, 1, 2, 8]), ("5\n", [5]), ("\n", [])])
def test_parses_cpu_lists_of_the_kernel(text: str, ids: list[int]) -> None:
    assert parse_id_list(text) == ids


def test_reads_cores_and_nodes_from_the_kernels_files(tmp_path: Path) -> None:
    for node, ids in (("node0", "0-1,4-5\n"), ("node1", "2-3,6-7\n")):
        (tmp_path / "node" / node).mkdir(parents=True)
        (tmp_path / "node" / node / "cpulist").write_text(ids)
    for cpu in range(8):
        topology = tmp_path / f"cpu/cpu{cpu}/topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
    assert observe_cpus([1, 2, 5], tmp_path) == (
        Cpu(id=1, core=1, node=0),
        Cpu(id=2, core=2, node=1),
        Cpu(id=5, core=1, node=0),
    )


def test_each_cpu_is_a_core_if_the_kernel_reports_none(tmp_path: Path) -> None:
    assert observe_cpus([3, 4], tmp_path) == (Cpu(id=3, core=3), Cpu(id=4, core=4))
