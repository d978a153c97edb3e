"""Memory for the KV cache: limits of the kernel, shares of ranks, and errors for too little memory."""

import resource
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest

from heteroinfer_contract.cgroups import available_memory
from heteroinfer_contract.plan import Device
from heteroinfer_contract.pod_launch import PodAddress, PodLaunch
from tests.unit.launch.test_environment import LEADER, PLAN
from vllm_heteroinfer.group import kv_blocks
from vllm_heteroinfer.group.engine_calls import check_sleep_level
from vllm_heteroinfer.rank.worker import headroom

MIB = 1 << 20
MEMINFO = "MemTotal:       16777216 kB\nMemFree:         1048576 kB\nMemAvailable:    4194304 kB\n"
STAT_V2 = "anon 1000\nfile 9000\ninactive_file 3000\nactive_file 2000\nshmem 4000\n"
STAT_V1 = "inactive_file 1\nactive_file 2\ntotal_inactive_file 300\ntotal_active_file 200\n"


def write(directory: Path, **files: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (directory / name.replace("__", ".")).write_text(text)


def test_the_tightest_limit_of_all_parent_cgroups_counts_v2(tmp_path: Path) -> None:
    write(tmp_path / "pods/mine", memory__max="max\n", memory__current="9\n", memory__stat=STAT_V2)
    write(tmp_path / "pods", memory__max="1000000\n", memory__current="900000\n", memory__stat=STAT_V2)
    assert available_memory(tmp_path, "0::/pods/mine\n", MEMINFO) == 100_000 + 5_000


def test_reads_the_memory_limit_of_cgroup_v1_in_a_container(tmp_path: Path) -> None:
    write(
        tmp_path / "memory",
        memory__limit_in_bytes="1000000\n",
        memory__usage_in_bytes="400000\n",
        memory__stat=STAT_V1,
    )
    own = "5:memory:/kubepods/pod1/box\n3:cpu,cpuacct:/kubepods\n"
    assert available_memory(tmp_path, own, MEMINFO) == 600_000 + 500


def test_the_memory_of_the_machine_is_the_limit_if_no_cgroup_has_one(tmp_path: Path) -> None:
    assert available_memory(tmp_path, "0::/\n", MEMINFO) == 4194304 * 1024


def test_ranks_divide_memory_in_the_ratio_of_their_planned_caches() -> None:
    cpu = tuple(
        replace(rank, device=Device.CPU, kv_cache_bytes=size)
        for rank, size in zip(PLAN.ranks, (100, 300, 50, 50), strict=True)
    )
    plan = replace(PLAN, ranks=cpu)
    shares = [headroom.share_of_memory(plan, replace(LEADER, pod_index=r.pod), r) for r in plan.ranks]
    assert shares == [Fraction(1, 4), Fraction(3, 4), Fraction(1, 2), Fraction(1, 2)]
    one_machine: PodLaunch = replace(LEADER, addresses=(PodAddress(host="127.0.0.1"),) * 2)
    assert [headroom.share_of_memory(plan, one_machine, r) for r in plan.ranks] == [
        Fraction(1, 5),
        Fraction(3, 5),
        Fraction(1, 10),
        Fraction(1, 10),
    ]


def test_ranks_without_a_cache_get_equal_shares_of_memory() -> None:
    """A rank has no KV cache if its layers read the caches of other layers."""
    cpu = tuple(replace(rank, device=Device.CPU, kv_cache_bytes=0) for rank in PLAN.ranks)
    plan = replace(PLAN, ranks=cpu)
    shares = [headroom.share_of_memory(plan, replace(LEADER, pod_index=r.pod), r) for r in plan.ranks]
    assert shares == [Fraction(1, 2)] * 4


def test_host_headroom_is_the_smallest_limit() -> None:
    measured_headroom = headroom.host_headroom(
        available_bytes=1000 * MIB, share=Fraction(1, 4), activations_bytes=30 * MIB
    )
    assert measured_headroom.size_bytes == 220 * MIB
    assert measured_headroom.explanation == (
        "0.98 GiB available to all ranks, 25% to this rank, minus 30.0 MiB for the largest batch"
    )


def test_gpu_headroom_is_the_free_part_of_its_limit() -> None:
    measured_headroom = headroom.gpu_headroom(
        free_bytes=5000 * MIB,
        cached_bytes=0,
        allocated_bytes=900 * MIB,
        peak_bytes=1400 * MIB,
        graphs_bytes=1000 * MIB,
    )
    assert measured_headroom.size_bytes == 3500 * MIB
    assert "0.49 GiB for the largest batch and 0.98 GiB for CUDA graphs" in measured_headroom.explanation


@pytest.mark.parametrize(
    ("measured", "granted", "warned"), [(64, 64, False), (65, 64, False), (63, 63, True), (1, 1, True)]
)
def test_a_rank_gets_the_planned_memory_or_the_free_memory(measured: int, granted: int, warned: bool) -> None:
    measured_headroom = headroom.KvHeadroom(size_bytes=measured * MIB, explanation="as measured")
    size, warning = headroom.grant(PLAN.ranks[1], 64 * MIB, measured_headroom)
    assert size == granted * MIB
    assert bool(warning) is warned
    if warned:
        assert warning == (
            f"rank 1 (role cpu, CPU): memory for the KV cache is {measured}.0 MiB, but the plan needs "
            "64.0 MiB: as measured. Raise resources.limits.memory of the role, or give the rank fewer "
            "layers. In this epoch, all ranks use the number of KV blocks that fits on this rank"
        )


@pytest.mark.parametrize(("cached", "headroom_mib"), [(400, 3900), (500, 4000), (2000, 4000)])
def test_activations_use_memory_that_torch_has_reserved(cached: int, headroom_mib: int) -> None:
    measured = headroom.gpu_headroom(
        free_bytes=5000 * MIB,
        cached_bytes=cached * MIB,
        allocated_bytes=900 * MIB,
        peak_bytes=1400 * MIB,
        graphs_bytes=1000 * MIB,
    )
    assert measured.size_bytes == headroom_mib * MIB


def test_a_rank_without_a_cache_needs_no_headroom() -> None:
    assert headroom.grant(PLAN.ranks[1], 0, headroom.KvHeadroom(size_bytes=-MIB, explanation="")) == (0, "")


def test_a_rank_without_headroom_reports_an_error() -> None:
    with pytest.raises(
        MemoryError, match=r"rank 2 \(role gpu, GPU\): memory for the KV cache is -1.0 MiB.*deviceMemory"
    ):
        headroom.grant(
            PLAN.ranks[2], 64 * MIB, headroom.KvHeadroom(size_bytes=-MIB, explanation="as measured")
        )


def test_measures_the_peak_of_a_run(tmp_path: Path) -> None:
    write(tmp_path, status="Name:\tpython\nVmHWM:\t  3072 kB\nVmRSS:\t  1024 kB\n", clear_refs="")
    peak = headroom.PeakOfRun(tmp_path)
    assert (tmp_path / "clear_refs").read_text() == "5"
    assert peak.temporary_bytes() == 2 * MIB


def test_without_vmhwm_the_peak_since_the_start_of_the_process_counts(tmp_path: Path) -> None:
    write(tmp_path, status="Name:\tpython\nVmRSS:\t  1024 kB\n")  # gVisor
    own_peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert headroom.PeakOfRun(tmp_path).temporary_bytes() >= own_peak_bytes - MIB > 0


def test_the_peak_includes_memory_that_is_free_again() -> None:
    peak = headroom.PeakOfRun()
    before = peak.temporary_bytes()
    taken = bytearray(64 * MIB)
    taken[::4096] = b"x" * len(taken[::4096])
    del taken
    assert peak.temporary_bytes() - before > 60 * MIB


def describe_kv_blocks(*, planned_bytes: int, headrooms_bytes: list[int]) -> str:
    ranks = tuple(replace(rank, kv_cache_bytes=planned_bytes) for rank in PLAN.ranks)
    return kv_blocks.describe(
        replace(PLAN, ranks=ranks),
        blocks=10,
        sizes_bytes=[1000, 1000, 4000, 4000],
        headrooms_bytes=headrooms_bytes,
    )


def test_the_limiting_rank_is_reported() -> None:
    line = describe_kv_blocks(planned_bytes=1500, headrooms_bytes=[2000, 1000, 9000, 5000])
    assert "10 blocks of 32 tokens on every rank. Rank 1 (role cpu, CPU) limits this number" in line
    assert "have space for 10 blocks. Headroom in blocks: rank 0 20, rank 1 10, rank 2 22, rank 3 12" in line


def test_the_plan_limits_the_blocks_if_every_rank_has_the_planned_memory() -> None:
    line = describe_kv_blocks(planned_bytes=1000, headrooms_bytes=[2000, 1500, 9000, 8000])
    assert "The plan limits this number. Rank 1 (role cpu, CPU) has space for the fewest blocks: 15" in line


@pytest.mark.parametrize("level", [0, 1])
def test_refuses_unsupported_levels_of_sleep(level: int) -> None:
    check_sleep_level(level)


@pytest.mark.parametrize("level", [2, -1, 3])
def test_unsupported_sleep_levels_are_refused_with_a_fix(level: int) -> None:
    with pytest.raises(ValueError, match=rf"sleep level must be 0 or 1 \(got {level}\): .*set spec.suspend"):
        check_sleep_level(level)
