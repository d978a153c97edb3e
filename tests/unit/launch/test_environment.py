"""The environment of each process of a pod, and the CPU limits of cgroups."""

from dataclasses import replace
from pathlib import Path

import pytest

from heteroinfer_contract import names
from heteroinfer_contract.cgroups import cpu_quota
from heteroinfer_contract.errors import ContractError
from heteroinfer_contract.plan import Device, EngineSettings, FeedForwardShare, Mode, Plan, RankAssignment
from heteroinfer_contract.pod_launch import CpuBinding, PodAddress, PodLaunch
from vllm_heteroinfer.launch.cpu_allocation import Cpu
from vllm_heteroinfer.launch.environment import (
    Host,
    api_environment,
    can_be_forked,
    rank_environment,
    threads_per_rank,
)


def cpus(count: int, *, nodes: int = 1) -> tuple[Cpu, ...]:
    return tuple(Cpu(id=i, core=i, node=i * nodes // count) for i in range(count))


HOST = Host(cpus=cpus(16), cpu_quota=None, machine_cpus=64, address="10.0.0.7", interface="eth0")


def rank(number: int, pod: int, local: int, device: Device, first: int, end: int) -> RankAssignment:
    return RankAssignment(
        rank=number,
        local_rank=local,
        pod=pod,
        role=device.lower(),
        device=device,
        stage=number,
        tensor_rank=0,
        first_layer=first,
        end_layer=end,
        kv_cache_bytes=1,
    )


PLAN = Plan(
    mode=Mode.PIPELINE,
    tensor_parallel_size=1,
    pipeline_parallel_size=4,
    ranks=(
        rank(0, 0, 0, Device.CPU, 0, 3),
        rank(1, 0, 1, Device.CPU, 3, 8),
        rank(2, 1, 0, Device.GPU, 8, 28),
        rank(3, 1, 1, Device.GPU, 28, 48),
    ),
    engine=EngineSettings(
        model="/model",
        served_name="m",
        dtype="bfloat16",
        max_model_len=64,
        max_num_batched_tokens=64,
        max_num_seqs=4,
        block_size=32,
    ),
)
LEADER = PodLaunch(
    group="ns/m/0",
    group_uid="u",
    epoch=1,
    pod_index=0,
    addresses=(PodAddress(host="a"), PodAddress(host="b")),
)
FOLLOWER = replace(LEADER, pod_index=1)


def test_a_cpu_rank_gets_exactly_these_variables() -> None:
    env = rank_environment(PLAN, LEADER, PLAN.ranks[1], {"HOME": "/tmp", "CUDA_VISIBLE_DEVICES": "0"}, HOST)
    assert env == {
        "HOME": "/tmp",
        "CUDA_VISIBLE_DEVICES": "-1",
        "GLOO_SOCKET_IFNAME": "eth0",
        "HETEROINFER_MEMORY_NODES": "",
        "HETEROINFER_RANK": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "7",
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128",
        "OMP_PLACES": "{9,10,11,12,13,14,15}",
        "OMP_PROC_BIND": "true",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_HETEROGENEOUS_DEVICE": "cpu",
        "VLLM_HOST_IP": "10.0.0.7",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_PP_LAYER_PARTITION": "3,5,20,20",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
    }


@pytest.mark.parametrize(("listed", "expected"), [(None, "1"), ("4,7", "7"), ("GPU-aa, GPU-bb", "GPU-bb")])
def test_gpu_rank_sees_its_own_device_only(listed: str | None, expected: str) -> None:
    base = {} if listed is None else {"CUDA_VISIBLE_DEVICES": listed}
    env = rank_environment(PLAN, FOLLOWER, PLAN.ranks[3], base, HOST)
    assert env["CUDA_VISIBLE_DEVICES"] == expected
    assert env[names.ENV_HETEROGENEOUS_DEVICE] == "cuda"
    assert "OMP_NUM_THREADS" not in env


def test_pod_with_too_few_gpus_is_refused() -> None:
    with pytest.raises(
        ContractError, match=r"CUDA_VISIBLE_DEVICES must list at least 2 GPUs in pod 1 \(got '4'\)"
    ):
        rank_environment(PLAN, FOLLOWER, PLAN.ranks[3], {"CUDA_VISIBLE_DEVICES": "4"}, HOST)


def test_a_users_variable_overrides_tuning_but_not_the_plan() -> None:
    users = {"OMP_NUM_THREADS": "3", "VLLM_LOGGING_LEVEL": "DEBUG", "VLLM_PP_LAYER_PARTITION": "1,1,1,1"}
    env = rank_environment(PLAN, LEADER, PLAN.ranks[0], users, HOST)
    assert env["OMP_NUM_THREADS"] == "3"
    assert env["VLLM_LOGGING_LEVEL"] == "DEBUG"
    assert env["VLLM_PP_LAYER_PARTITION"] == "3,5,20,20"


@pytest.mark.parametrize(
    ("text", "kept", "bound"),
    [
        ("4", "4", True),
        ("4,2", "4,2", True),
        (" 14 , 2 ", " 14 , 2 ", False),
        ("", "13", True),
        (" ", "13", True),
    ],
)
def test_only_the_first_level_of_omp_num_threads_counts(text: str, kept: str, bound: bool) -> None:
    gpu = replace(PLAN.ranks[0], device=Device.GPU, end_layer=48)
    share = FeedForwardShare(layers=tuple(range(48)))
    asked = replace(PLAN.ranks[1], stage=0, first_layer=0, end_layer=48, kv_cache_bytes=0)
    asked = replace(asked, feed_forward=share)
    plan = replace(PLAN, mode=Mode.FEED_FORWARD, pipeline_parallel_size=1, ranks=(gpu, asked))
    env = rank_environment(plan, LEADER, asked, {"OMP_NUM_THREADS": text}, HOST)
    assert (env["OMP_NUM_THREADS"], "OMP_PLACES" in env) == (kept, bound)
    assert env[names.ENV_FEED_FORWARD_SPIN] == ("0.002" if bound else "0.0")
    assert api_environment(plan, {"OMP_NUM_THREADS": text}, HOST)["OMP_NUM_THREADS"] == (
        kept if text.strip() else "1"
    )


def test_a_relay_to_other_pods_has_a_cpu_and_spins_if_no_limit_forbids_it() -> None:
    asking = replace(PLAN.ranks[0], end_layer=48)
    share = FeedForwardShare(layers=tuple(range(48)))
    near = replace(PLAN.ranks[1], stage=0, first_layer=0, end_layer=48, kv_cache_bytes=0, feed_forward=share)
    far = replace(near, rank=2, pod=1, local_rank=0, tensor_rank=1)
    alone = replace(PLAN, mode=Mode.FEED_FORWARD, pipeline_parallel_size=1, ranks=(asking, near))
    both = replace(alone, ranks=(asking, near, far))
    without, relaying = (rank_environment(plan, LEADER, asking, {}, HOST) for plan in (alone, both))
    assert not {names.ENV_RELAY_CPUS, names.ENV_FEED_FORWARD_SPIN} & set(without)
    free = set(relaying[names.ENV_RELAY_CPUS].split(","))
    lane = rank_environment(both, LEADER, near, {}, HOST)
    bound = {cpu for env in (relaying, lane) for cpu in env["OMP_PLACES"].strip("{}").split(",")}
    assert len(free) >= 3  # two CPUs of the engine, and the relay's own CPU
    assert not free & bound
    assert relaying[names.ENV_FEED_FORWARD_SPIN] == "0.002"
    limited = rank_environment(both, LEADER, asking, {}, replace(HOST, cpu_quota=8.0))
    assert limited[names.ENV_FEED_FORWARD_SPIN] == "0.0"
    assert names.ENV_RELAY_CPUS not in limited
    gpu = replace(asking, device=Device.GPU)
    on_gpu = rank_environment(replace(both, ranks=(gpu, near, far)), LEADER, gpu, {}, HOST)
    assert on_gpu[names.ENV_FEED_FORWARD_SPIN] == "0.002"
    assert rank_environment(both, FOLLOWER, far, {}, HOST)[names.ENV_OMP_THREADS] == "16"


@pytest.mark.parametrize("text", ["abc", "0", "-1", "4,", "4;2", "\u0664", "4,x", "1e3"])
def test_an_invalid_number_of_threads_is_reported(text: str) -> None:
    with pytest.raises(ContractError, match=r"OMP_NUM_THREADS: must be a number above 0"):
        rank_environment(PLAN, LEADER, PLAN.ranks[0], {"OMP_NUM_THREADS": text}, HOST)


@pytest.mark.parametrize(
    ("count", "quota", "launch", "threads"),
    [
        (16, None, LEADER, 7),
        (16, None, FOLLOWER, 8),
        (64, 16.0, LEADER, 7),
        (64, 3.5, LEADER, 1),
        (4, None, LEADER, 1),
        (5, None, LEADER, 2),
        (1, None, LEADER, 1),
        (8, 0.5, LEADER, 1),
    ],
)
def test_cpu_ranks_share_the_threads_of_a_pod(
    count: int, quota: float | None, launch: PodLaunch, threads: int
) -> None:
    host = replace(HOST, cpus=cpus(count), cpu_quota=quota)
    plan = replace(PLAN, ranks=tuple(replace(r, device=Device.CPU) for r in PLAN.ranks))
    assert threads_per_rank(plan, launch, host) == threads


@pytest.mark.parametrize(
    ("binding", "count", "quota", "bound"),
    [
        (CpuBinding.AUTO, 16, None, True),
        (CpuBinding.AUTO, 16, 16.0, True),
        (CpuBinding.AUTO, 64, None, False),
        (CpuBinding.AUTO, 16, 8.0, False),
        (CpuBinding.AUTO, 16, 15.5, False),
        (CpuBinding.ALWAYS, 64, None, True),
        (CpuBinding.ALWAYS, 64, 8.0, False),
        (CpuBinding.NEVER, 16, None, False),
    ],
)
def test_threads_are_bound_if_the_cores_belong_to_the_pod_alone(
    binding: CpuBinding, count: int, quota: float | None, bound: bool
) -> None:
    host = replace(HOST, cpus=cpus(count), cpu_quota=quota)
    launch = replace(LEADER, cpu_binding=binding)
    assert ("OMP_PLACES" in rank_environment(PLAN, launch, PLAN.ranks[0], {}, host)) is bound


def test_pods_of_one_machine_share_its_cores() -> None:
    """Under `heteroinfer up`, a GPU rank and CPU ranks of two pods have one address.

    No CPU is assigned twice.
    """
    one = tuple(PodAddress(host="127.0.0.1") for _ in range(3))
    plan = replace(
        PLAN,
        ranks=(*PLAN.ranks[:2], replace(PLAN.ranks[2], local_rank=0), rank(3, 2, 0, Device.CPU, 28, 48)),
    )
    launches = [replace(LEADER, addresses=one, pod_index=pod) for pod in range(3)]
    cpu_sets = [
        rank_environment(plan, launches[r.pod], r, {}, HOST)["OMP_PLACES"].strip("{}").split(",")
        for r in plan.ranks
        if r.device is Device.CPU
    ]
    assert [len(cpu_set) for cpu_set in cpu_sets] == [
        4,
        4,
        4,
    ]  # 16 CPUs, minus 2 for the engine and 1 for the GPU rank
    assert len({cpu for cpu_set in cpu_sets for cpu in cpu_set}) == 12
    assert {"0", "1", "2"}.isdisjoint(cpu for cpu_set in cpu_sets for cpu in cpu_set)
    host = replace(HOST, cpus=cpus(64))
    assert threads_per_rank(plan, launches[2], host) == (64 - 3) // 3


@pytest.mark.parametrize(("count", "first", "second"), [(16, "0", "1"), (64, "0,1", "0,1")])
def test_a_rank_allocates_memory_on_the_numa_nodes_of_its_cpus(count: int, first: str, second: str) -> None:
    host = replace(HOST, cpus=cpus(count, nodes=2))
    nodes = [rank_environment(PLAN, LEADER, PLAN.ranks[i], {}, host)[names.ENV_MEMORY_NODES] for i in (0, 1)]
    assert nodes == [first, second]


@pytest.mark.parametrize(("threads", "bound"), [("3", True), ("7", True), ("8", False)])
def test_more_threads_than_cores_are_not_bound(threads: str, bound: bool) -> None:
    env = rank_environment(PLAN, LEADER, PLAN.ranks[0], {"OMP_NUM_THREADS": threads}, HOST)
    assert ("OMP_PLACES" in env) is bound


def test_ranks_that_are_bound_to_cores_are_not_forked_from_each_other() -> None:
    """OpenMP reads its list of CPUs once, when it is loaded."""

    def environments(binding: CpuBinding) -> list[dict[str, str]]:
        launch = replace(LEADER, cpu_binding=binding)
        return [rank_environment(PLAN, launch, PLAN.ranks[i], {}, HOST) for i in (0, 1)]

    first, second = environments(CpuBinding.ALWAYS)
    assert not can_be_forked(second, first)
    first, second = environments(CpuBinding.NEVER)
    assert can_be_forked(second, first)
    assert not can_be_forked(second | {"LD_PRELOAD": "/lib/mine.so"}, first)
    assert not can_be_forked(second, first | {"KMP_BLOCKTIME": "1"})


def test_ranks_of_a_pod_are_pinned_to_different_cpus() -> None:
    cpu_sets = [rank_environment(PLAN, LEADER, PLAN.ranks[i], {}, HOST)["OMP_PLACES"] for i in (0, 1)]
    first, second = (set(cpu_set.strip("{}").split(",")) for cpu_set in cpu_sets)
    assert not first & second
    assert not {"0", "1"} & (first | second)


def test_the_api_server_uses_the_leaders_platform() -> None:
    env = api_environment(PLAN, {"HETEROINFER_RANK": "9"}, HOST)
    assert (env["VLLM_HETEROGENEOUS_DEVICE"], env["CUDA_VISIBLE_DEVICES"]) == ("cpu", "-1")
    assert names.ENV_RANK not in env
    assert "VLLM_TARGET_DEVICE" not in env


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_the_cpu_quota_of_cgroup_v2_is_the_smallest_of_all_ancestors(tmp_path: Path) -> None:
    write(tmp_path / "kubepods/pod1/cpu.max", "250000 100000\n")
    write(tmp_path / "kubepods/cpu.max", "max 100000\n")
    write(tmp_path / "kubepods/pod1/box/cpu.max", "400000 100000\n")
    assert cpu_quota(tmp_path, "0::/kubepods/pod1/box\n") == 2.5


def test_reads_the_cpu_quota_of_cgroup_v2_in_a_container(tmp_path: Path) -> None:
    write(tmp_path / "cpu.max", "1600000 100000\n")
    assert cpu_quota(tmp_path, "0::/\n") == 16.0


@pytest.mark.parametrize("mount", ["cpu", "cpu,cpuacct"])
def test_reads_the_cpu_quota_of_cgroup_v1(tmp_path: Path, mount: str) -> None:
    # /proc/self/cgroup has the host's path. In the container, the pod's own cgroup is the root.
    write(tmp_path / mount / "cpu.cfs_quota_us", "150000\n")
    write(tmp_path / mount / "cpu.cfs_period_us", "100000\n")
    assert cpu_quota(tmp_path, "4:memory:/x\n3:cpu,cpuacct:/kubepods/pod1\n0::/\n") == 1.5


def test_finds_no_cpu_quota_without_a_limit(tmp_path: Path) -> None:
    write(tmp_path / "cpu" / "cpu.cfs_quota_us", "-1\n")
    write(tmp_path / "cpu" / "cpu.cfs_period_us", "100000\n")
    assert cpu_quota(tmp_path, "1:cpu:/\n0::/\n") is None
