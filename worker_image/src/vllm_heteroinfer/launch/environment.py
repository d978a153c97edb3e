"""Builds the environment of each process of a pod from the plan, the pod's identity and the machine. Pure.

These variables must be set before the process starts: its libraries read thread pools, device visibility and
vLLM's platform only when they load.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from heteroinfer_contract import names
from heteroinfer_contract.errors import ContractError
from heteroinfer_contract.plan import Device, Plan, RankAssignment
from heteroinfer_contract.pod_launch import (
    CpuBinding,
    PodLaunch,
    are_on_one_machine,
    engine_cpus,
    ranks_on_machine,
)
from vllm_heteroinfer.launch.cpu_allocation import Cpu, CpuSet, allocate
from vllm_heteroinfer.pod.open_mp import omp_thread_count

READ_WHEN_LOADED = ("OMP_", "GOMP_", "KMP_", "MKL_", "LD_")
"""Prefixes of variables that libraries read when they load: a forked process keeps its parent's values."""
GOMP_SPINCOUNT = "GOMP_SPINCOUNT"
OPENMP_SPINS = "20000000"
"""GOMP_SPINCOUNT of feed-forward ranks: tens of milliseconds, so that their threads still spin when the
request for the next layer comes."""
FEED_FORWARD_SPIN_S = 0.002
"""Time for which a feed-forward rank spins for the next request. It is longer than the time between a GPU's
requests for two layers, and shorter than a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Facts about this pod's machine, on which the environments of the pod's processes depend.

    Attributes:
        cpu_quota: CPU limit of the cgroups, in CPUs; None without a limit.
        address: own IP address, on the network that connects this pod and the leader.
    """

    cpus: tuple[Cpu, ...]
    cpu_quota: float | None
    machine_cpus: int
    address: str
    interface: str

    @property
    def usable_cpus(self) -> int:
        """Number of threads that can run at the same time, at least 1."""
        quota = len(self.cpus) if self.cpu_quota is None else int(self.cpu_quota)
        return max(1, min(len(self.cpus), quota))

    @property
    def has_exclusive_cpus(self) -> bool:
        """Whether no other pod uses the pod's CPUs, so binding threads slows down neither pod.

        The kubelet gives such a pod fewer CPUs than the machine has, and no lower CPU limit.
        """
        return len(self.cpus) < self.machine_cpus and self.usable_cpus == len(self.cpus)


ONEDNN_CACHE: Final = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
MAX_CACHED_PRIMITIVES: Final = "128"
"""oneDNN compiles a matrix product for each number of rows, and by default caches 1,024 products. Prompts of
500 lengths grew a float32 rank of 32 layers by 965 MB. With a limit of 128 the rank grew by 215 MB at the
same speed (2 cores of an AMD EPYC, 2026-11-26). The planner's RANK_OVERHEAD_BYTES covers this growth."""


def rank_environment(
    plan: Plan, launch: PodLaunch, rank: RankAssignment, base_env: Mapping[str, str], host: Host
) -> dict[str, str]:
    """Builds the environment of one rank, without its channel.

    `base_env` is the pod's environment, including `engine.env`. It overrides settings of threads and caches,
    but never the variables that the plan sets.

    Raises:
        ContractError: the pod has fewer GPUs than GPU ranks, or its number of threads is not valid.
    """
    base_env = _without_blank_threads(base_env)
    env = {**base_env, **_device_settings(plan, rank.device, host), names.ENV_RANK: str(rank.rank)}
    if rank.device is Device.GPU:
        env[names.ENV_VISIBLE_GPUS] = _gpu_of_rank(rank, base_env)
        _add_relay_settings(plan, launch, rank, env, host)
        return env
    env[names.ENV_VISIBLE_GPUS] = names.HIDE_GPUS
    cpu_set = bound_cpus(plan, launch, rank, host)
    if cpu_set is not None and _sets_more_threads(base_env, cpu_set):
        cpu_set = None  # bound threads without a CPU of their own would wait for each other
    for name, value in _thread_settings(plan, launch, cpu_set, host).items():
        env.setdefault(name, value)
    env.setdefault(ONEDNN_CACHE, MAX_CACHED_PRIMITIVES)
    env[names.ENV_MEMORY_NODES] = _memory_nodes(cpu_set, host)
    _add_relay_settings(plan, launch, rank, env, host)  # needs the number of threads in `env`
    if rank.feed_forward is not None:
        spin = spin_s(plan, launch, env, host)
        env.setdefault(names.ENV_FEED_FORWARD_SPIN, repr(spin))
        if spin:
            env.setdefault(GOMP_SPINCOUNT, OPENMP_SPINS)
    return env


def _add_relay_settings(
    plan: Plan, launch: PodLaunch, rank: RankAssignment, env: dict[str, str], host: Host
) -> None:
    """Adds the settings of the relay, if feed-forward ranks in other pods serve this rank.

    The relay is a thread of the rank. It exchanges asks and answers with the other pods. If CPU ranks of the
    machine are bound to cores, the relay gets the other CPUs.
    """
    if not _has_relay(plan, rank):
        return
    env.setdefault(names.ENV_FEED_FORWARD_SPIN, repr(spin_s(plan, launch, env, host)))
    bound = [bound_cpus(plan, launch, each, host) for each in ranks_on_machine(plan, launch, Device.CPU)]
    taken = {cpu for cpu_set in bound if cpu_set is not None for cpu in cpu_set.cpus}
    free = [cpu.id for cpu in host.cpus if cpu.id not in taken]
    if taken and free:
        env[names.ENV_RELAY_CPUS] = ",".join(map(str, free))


def _has_relay(plan: Plan, rank: RankAssignment) -> bool:
    """Returns whether feed-forward ranks in other pods serve this rank."""
    if rank.feed_forward is not None:
        return False
    return any(each.pod != rank.pod for each in plan.feed_forward_ranks_of(rank))


def api_environment(plan: Plan, base_env: Mapping[str, str], host: Host) -> dict[str, str]:
    """Builds the environment of vLLM's API server and its engine core, which compute nothing.

    They use rank 0's platform, because the engine builds vLLM's configuration for rank 0's device.

    Raises:
        ContractError: the number of threads in `base_env` is not valid.
    """
    base_env = _without_blank_threads(base_env)
    device = plan.ranks[0].device
    env = {**base_env, **_device_settings(plan, device, host)}
    env.pop(names.ENV_RANK, None)  # vLLM's API server is not a rank
    if device is Device.CPU:
        env[names.ENV_VISIBLE_GPUS] = names.HIDE_GPUS
    env.setdefault(names.ENV_OMP_THREADS, "1")
    return env


def can_be_forked(rank_env: Mapping[str, str], first_env: Mapping[str, str]) -> bool:
    """Whether a rank can be forked from the first rank after the first rank has loaded its libraries.

    Both must have the same variables of READ_WHEN_LOADED. So ranks that are bound to cores cannot be forked:
    each has its own OMP_PLACES, which OpenMP reads only once.
    """
    return all(
        rank_env.get(name) == first_env.get(name)
        for name in {*rank_env, *first_env}
        if name.startswith(READ_WHEN_LOADED)
    )


def threads_per_rank(plan: Plan, launch: PodLaunch, host: Host) -> int:
    """Returns the number of compute threads for each unbound CPU rank of this pod, at least 1."""
    ranks = len(ranks_on_machine(plan, launch, Device.CPU))
    return max(1, (host.usable_cpus - _reserved_cpus(plan, launch, host)) // ranks)


def spin_s(plan: Plan, launch: PodLaunch, env: Mapping[str, str], host: Host) -> float:
    """Returns the seconds for which a feed-forward rank spins for its next request before it sleeps.

    Returns 0 in two cases. Under a CPU limit, spinning would use up the computing time (CFS throttling). With
    fewer CPUs than threads, spinning would keep other threads from running.
    """
    threads = (omp_thread_count(env) or 1) * len(ranks_on_machine(plan, launch, Device.CPU))
    limited = host.usable_cpus < len(host.cpus)
    crowded = threads + _reserved_cpus(plan, launch, host) > host.usable_cpus
    return 0.0 if limited or crowded else FEED_FORWARD_SPIN_S


def bound_cpus(plan: Plan, launch: PodLaunch, rank: RankAssignment, host: Host) -> CpuSet | None:
    """Returns the CPUs to which a CPU rank's threads are bound, or None if they are not bound.

    Threads are not bound if the pod has a CPU limit, or if the machine has too few CPUs for its ranks. With
    cpuBinding Auto, threads are bound only if the pod has exclusive CPUs.

    Pods with the same address share a machine (`heteroinfer up`). Each supervisor counts the CPU ranks of all
    these pods, so all supervisors of the machine divide its CPUs in the same way.
    """
    if launch.cpu_binding is CpuBinding.NEVER or host.usable_cpus < len(host.cpus):
        return None
    if launch.cpu_binding is CpuBinding.AUTO and not host.has_exclusive_cpus:
        return None
    ranks = ranks_on_machine(plan, launch, Device.CPU)
    cpu_sets = allocate(host.cpus, ranks=len(ranks), reserved=_reserved_cpus(plan, launch, host))
    return None if cpu_sets is None else cpu_sets[ranks.index(rank)]


def _reserved_cpus(plan: Plan, launch: PodLaunch, host: Host) -> int:
    """Returns the number of CPUs that CPU ranks leave to the engine, GPU ranks and relays on this machine."""
    if host.usable_cpus == 1:
        return 0  # the CPU ranks need the only CPU
    gpu_ranks = len(ranks_on_machine(plan, launch, Device.GPU))
    leader = 0
    hosts_engine = are_on_one_machine(launch, (leader, launch.pod_index))
    relays = sum(_has_relay(plan, rank) for rank in ranks_on_machine(plan, launch))
    return gpu_ranks + (engine_cpus(host.usable_cpus) if hosts_engine else 0) + relays


def _device_settings(plan: Plan, device: Device, host: Host) -> dict[str, str]:
    """Returns the variables that select the platform, the network and the layers of a process.

    Also turns off downloads and vLLM's usage statistics.
    """
    return {
        names.ENV_HETEROGENEOUS_DEVICE: "cuda" if device is Device.GPU else "cpu",
        # The model is on disk. vLLM must not download it if the path looks like a repository of a hub.
        names.ENV_HUB_OFFLINE: "1",
        "VLLM_NO_USAGE_STATS": "1",
        # vLLM's default is version 1 or 2 of its model runner, by device. The two exchange different tensors
        # between stages, so all ranks use version 1.
        names.ENV_V2_MODEL_RUNNER: "0",
        names.ENV_OWN_ADDRESS: host.address,
        names.ENV_GLOO_INTERFACE: host.interface,
        names.ENV_LAYER_PARTITION: ",".join(str(layers) for layers in plan.layers_by_stage),
    }


def _without_blank_threads(base_env: Mapping[str, str]) -> Mapping[str, str]:
    """Returns the variables without a blank number of threads, which would count as set.

    Raises:
        ContractError: the number of threads is not valid.
    """
    if omp_thread_count(base_env) is not None:
        return base_env
    return {name: value for name, value in base_env.items() if name != names.ENV_OMP_THREADS}


def _gpu_of_rank(rank: RankAssignment, base_env: Mapping[str, str]) -> str:
    """Returns the GPU of a rank: the entry of CUDA_VISIBLE_DEVICES at its local rank.

    If the variable is not set, the GPU has the number of the local rank.

    Raises:
        ContractError: the variable lists too few GPUs.
    """
    listed = base_env.get(names.ENV_VISIBLE_GPUS)
    if listed is None:
        return str(rank.local_rank)
    devices = [device.strip() for device in listed.split(",") if device.strip()]
    if rank.local_rank >= len(devices):
        raise ContractError(
            f"rank {rank.rank}: {names.ENV_VISIBLE_GPUS} must list at least {rank.local_rank + 1} GPUs in "
            f"pod {rank.pod} (got {listed!r}). Give each pod of the role one GPU per rank"
        )
    return devices[rank.local_rank]


def _sets_more_threads(base_env: Mapping[str, str], cpu_set: CpuSet) -> bool:
    """Returns whether the user set more threads than the rank has CPUs."""
    return (omp_thread_count(base_env) or 0) > len(cpu_set.cpus)


def _thread_settings(plan: Plan, launch: PodLaunch, cpu_set: CpuSet | None, host: Host) -> dict[str, str]:
    """Returns the variables that set and bind the threads of a CPU rank."""
    threads = threads_per_rank(plan, launch, host) if cpu_set is None else len(cpu_set.cpus)
    settings = {
        names.ENV_OMP_THREADS: str(threads),
        # vLLM's own binding follows only the affinity, not the quota. It refuses more ranks than NUMA nodes
        # (vllm/utils/ompmultiprocessing.py::OMPProcessManager@v0.32.0).
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    if cpu_set is not None:
        # All threads of a rank share one set of CPUs. Otherwise the threads that its main thread starts later
        # would be pinned to a single CPU.
        settings[names.ENV_OMP_PLACES] = "{" + ",".join(str(cpu) for cpu in cpu_set.cpus) + "}"
        settings["OMP_PROC_BIND"] = "true"
    return settings


def _memory_nodes(cpu_set: CpuSet | None, host: Host) -> str:
    """Returns the NUMA nodes for a rank's memory, or "" if the machine has only one node."""
    machine_nodes = sorted({cpu.node for cpu in host.cpus})
    if len(machine_nodes) <= 1:
        return ""
    nodes = machine_nodes if cpu_set is None else cpu_set.nodes
    return ",".join(map(str, nodes))
