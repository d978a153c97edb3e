"""The cores of this machine, shared between groups that each would take all of them. Pure."""

from collections.abc import Mapping
from dataclasses import replace

from heteroinfer_contract import names
from heteroinfer_contract.plan import Device, Plan
from heteroinfer_contract.pod_launch import CpuBinding, engine_cpus
from heteroinfer_operator.local.pod_process import PodProcess


def share_cores(pod: PodProcess, *, cores: float, groups: int, env: Mapping[str, str]) -> PodProcess:
    """Returns the pod with its ranks' threads limited to their share of this machine.

    Supervisors share the cores between the pods of their group, and know of no other group;
    ranks that wait for each other while spinning on the same cores are many times slower. What
    the user set, in engine.env or around `heteroinfer up`, stays.

    Args:
        pod: to start.
        cores: of this machine.
        groups: that run on it.
        env: around `heteroinfer up`.
    """
    if names.ENV_PLAN not in pod.env or groups == 1:
        return pod
    plan = Plan.from_json(pod.env[names.ENV_PLAN])
    added = {names.ENV_CPU_BINDING: CpuBinding.NEVER.value}
    if names.ENV_OMP_THREADS not in {**env, **pod.env}:
        added[names.ENV_OMP_THREADS] = str(threads_per_rank(plan, cores=cores, groups=groups))
    return replace(pod, env={**pod.env, **added})


def threads_per_rank(plan: Plan, *, cores: float, groups: int) -> int:
    """Returns the threads of each CPU rank, at least 1: what is left of a group's cores, evenly."""
    own = int(cores / groups)
    gpu_ranks = sum(rank.device is Device.GPU for rank in plan.ranks)
    cpu_ranks = plan.world_size - gpu_ranks
    reserved = engine_cpus(own) + gpu_ranks
    return max(1, (own - reserved) // max(1, cpu_ranks))
