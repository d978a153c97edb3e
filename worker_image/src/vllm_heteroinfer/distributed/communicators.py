"""Communicators of vLLM's process groups, by the devices of their ranks.

| process group | mode | communicator |
|---|---|---|
| pipeline | any | none |
| all on GPUs | any | vLLM's CudaCommunicator (NCCL) |
| on CPUs only | Pipeline | GroupCpuCommunicator (vLLM's shared memory, or gloo) |
| with CPUs | Tensor | BridgeCommunicator |

A pipeline's process group has no communicator, since `distributed.transport` carries its hops. Without a
communicator, neither side runs hidden collectives, and CUDA graph capture does not look for a communicator
(vllm/distributed/parallel_state.py::GroupCoordinator.graph_capture@v0.32.0).
"""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from heteroinfer_contract import names
from heteroinfer_contract.errors import ContractError
from heteroinfer_contract.plan import Device, Mode, Plan
from heteroinfer_contract.pod_launch import PodLaunch, are_on_one_machine, ranks_on_machine
from vllm_heteroinfer.pod.open_mp import omp_thread_count

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where POSIX shared memory is on Linux

_BRIDGES = ("auto", "shared_memory", "gloo")

_wait_s = [0.0]
"""Seconds spent in collectives since the last `take_wait_s`; only the worker thread adds to it."""


def take_wait_s() -> float:
    """Returns the seconds spent in collectives by this process since the last call."""
    seconds, _wait_s[0] = _wait_s[0], 0.0
    return seconds


def build_cpu_communicator(**kwargs: Any) -> Any:
    """Builds the communicator of a CPU rank's process group; None for a pipeline's process group.

    vLLM calls this function instead of a communicator class, on every rank of the process group.
    """
    if _is_pipeline_group(kwargs):
        return None
    if Plan.from_env(os.environ).mode is Mode.TENSOR:
        return _build_bridge_communicator(kwargs)
    return _define_group_cpu_communicator()(**kwargs)


def _define_group_cpu_communicator() -> Any:
    """Defines and returns the class GroupCpuCommunicator. Its base needs vLLM, which is imported late."""
    import torch.distributed
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator, _CPUSHMDistributed

    class GroupCpuCommunicator(CpuCommunicator):
        """vLLM's CpuCommunicator, with timed collectives.

        vLLM's collectives over shared memory spin. So this class uses them only if each compute thread has a
        CPU, and otherwise gloo.
        """

        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            if isinstance(self.dist_module, _CPUSHMDistributed):
                # Every rank has mapped the shared memory by now. Without a name, the memory is freed when its
                # last process ends.
                name = f"{self.dist_module.group_name}_{self.rank_in_group}"
                (SHARED_MEMORY / name).unlink(missing_ok=True)

        def _all_group_ranks_share_shm_group_name(self) -> bool:
            """Returns whether the process group's collectives may use shared memory; the same on each rank.

            vLLM's own check compares names that contain the rendezvous port. These names are the same in
            every pod, so vLLM's check would also accept pods on different hosts. It would also accept ranks
            that share CPUs, although the collectives spin.
            """
            plan, launch = Plan.from_env(os.environ), PodLaunch.from_env(os.environ)
            can_share = len({plan.ranks[rank].pod for rank in self.ranks}) == 1 and may_spin(plan, launch)
            answers: list[bool] = [False] * self.world_size
            torch.distributed.all_gather_object(answers, can_share, group=self.device_group)
            return all(answers)

        def all_reduce(self, input_: Any) -> Any:
            """Sums over the process group; every rank calls it in the same order."""
            with _TimedCollective():
                return super().all_reduce(input_)

        def all_gather(self, input_: Any, dim: int = -1) -> Any:
            """Concatenates over the process group along `dim`; every rank calls it in the same order."""
            with _TimedCollective():
                return super().all_gather(input_, dim)

        def gather(self, input_: Any, dst: int = 0, dim: int = -1) -> Any:
            """Concatenates on `dst` only; every rank calls it in the same order."""
            with _TimedCollective():
                return super().gather(input_, dst, dim)

    return GroupCpuCommunicator


def build_cuda_communicator(**kwargs: Any) -> Any:
    """Builds the communicator of a GPU rank's process group; None for a pipeline's process group.

    Raises:
        ContractError: the process group also has CPU ranks in pipeline mode, or NCCL is not available.
    """
    if _is_pipeline_group(kwargs):
        return None
    import torch.distributed

    plan = Plan.from_env(os.environ)
    ranks = torch.distributed.get_process_group_ranks(kwargs["cpu_group"])
    if any(plan.ranks[rank].device is not Device.GPU for rank in ranks):
        if plan.mode is Mode.TENSOR:
            return _build_bridge_communicator(kwargs)
        raise ContractError(
            f"process group {kwargs.get('unique_name')}: ranks {ranks} must be all on GPUs or all on CPUs in "
            f"mode {plan.mode}. Set spec.parallelism.mode: Tensor, or give each stage one kind of device"
        )
    from vllm.distributed.device_communicators.cuda_communicator import CudaCommunicator

    communicator = CudaCommunicator(**kwargs)
    if communicator.pynccl_comm is None or communicator.pynccl_comm.disabled:
        # Without this error, vLLM would use gloo, through host memory.
        raise ContractError(
            f"process group {kwargs.get('unique_name')}: NCCL is not available on GPU ranks {ranks}. Install "
            "libnccl.so.2 in the worker image, and unset VLLM_DISABLE_PYNCCL"
        )
    return communicator


def shares_host(plan: Plan, launch: PodLaunch, stage: int, env: Mapping[str, str]) -> bool:
    """Returns whether the ranks of a stage should exchange tensors over the shared memory of one host.

    HETEROINFER_BRIDGE decides if the user set it, otherwise the plan does. The bridge tests later whether the
    ranks can share memory. Pods with the same address share a machine, as under `heteroinfer up`. In a
    cluster, each pod has its own address.

    Raises:
        ContractError: the value of HETEROINFER_BRIDGE is not valid.
    """
    setting = env.get(names.ENV_BRIDGE, "auto")
    if setting not in _BRIDGES:
        raise ContractError(
            f"{names.ENV_BRIDGE} must be one of {', '.join(_BRIDGES)} (got {setting!r}). Change "
            "spec.engine.env"
        )
    if setting != "auto":
        return setting == "shared_memory"
    return are_on_one_machine(launch, (rank.pod for rank in plan.stage(stage)))


def may_spin(plan: Plan, launch: PodLaunch) -> bool:
    """Returns whether every compute thread on this host can have its own CPU.

    With fewer CPUs than threads, vLLM's spinning collectives slowed a step from 0.04 s to 0.23 s (2 busy
    CPUs of a Xeon at 2.5 GHz, 4 ranks, 8 tiny layers, 2026-11-21).
    """
    # The supervisor sets this variable, and so pins the threads, if the pod has whole cores.
    if names.ENV_OMP_PLACES in os.environ:
        return True
    ranks = ranks_on_machine(plan, launch)
    return len(os.sched_getaffinity(0)) >= len(ranks) * (omp_thread_count(os.environ) or 1)


def forget_shared_memory(*groups: Any) -> None:
    """Unlinks the message queues of vLLM's process groups. Call it after the constructors have returned.

    Every rank has mapped the queues by then. Without a name, their memory disappears with the processes, even
    after a crash.
    """
    for group in groups:
        queue = group.mq_broadcaster
        if queue is not None and queue.buffer is not None and queue.buffer.is_creator:
            queue.buffer.shared_memory.unlink()
            queue.buffer.is_creator = False  # the destructor must not unlink the memory again


def _build_bridge_communicator(kwargs: dict[str, Any]) -> Any:
    """Builds the communicator over the bridge. Imports its module late, because the module imports vLLM."""
    from vllm_heteroinfer.distributed.bridge_communicator import BridgeCommunicator

    return BridgeCommunicator(**kwargs)


def _is_pipeline_group(kwargs: dict[str, Any]) -> bool:
    """Returns whether vLLM builds a communicator for a pipeline's process group ("pp")."""
    return str(kwargs.get("unique_name", "")).split(":")[0] == "pp"


class _TimedCollective:
    """Adds the time of a collective to `take_wait_s`. Does nothing inside compiled graphs."""

    def __enter__(self) -> None:
        import torch

        self._compiling = torch.compiler.is_compiling()
        if not self._compiling:
            self._start = time.perf_counter()

    def __exit__(self, *exc: object) -> None:
        if not self._compiling:
            _wait_s[0] += time.perf_counter() - self._start
