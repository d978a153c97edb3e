"""Communicators of vLLM's process groups, by what their ranks are.

| process group | mode | communicator |
|---|---|---|
| pipeline | any | none |
| all on GPUs | any | vLLM's CudaCommunicator (NCCL) |
| on CPUs only | Pipeline | GroupCpuCommunicator (vLLM's shared memory, or gloo) |
| with CPUs | Tensor | BridgeCommunicator |

A pipeline's process group gets none: its hops are `distributed.transport`, and without a communicator
neither side does hidden collectives, nor does CUDA graph capture look for one
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
from heteroinfer_contract.pod_launch import PodLaunch, ranks_on_machine, share_machine
from vllm_heteroinfer.pod.open_mp import first_level

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where POSIX shared memory is on Linux

_BRIDGES = ("auto", "shared_memory", "gloo")

_wait_s = [0.0]
"""Seconds spent in collectives since `take_wait_s`, by this process's one worker thread."""


def take_wait_s() -> float:
    """Returns the seconds that this process spent in collectives since the last call."""
    seconds, _wait_s[0] = _wait_s[0], 0.0
    return seconds


def build_cpu_communicator(**kwargs: Any) -> Any:
    """Returns the communicator of a CPU rank's process group, or None for a pipeline's.

    Called by vLLM instead of a communicator class, on every rank of the process group.
    """
    if _is_pipeline(kwargs):
        return None
    if Plan.from_env(os.environ).mode is Mode.TENSOR:
        return _bridge_communicator(kwargs)
    import torch.distributed
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator, _CPUSHMDistributed

    class GroupCpuCommunicator(CpuCommunicator):
        """CpuCommunicator that spins on shared memory only where that is sound, and is timed."""

        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            if isinstance(self.dist_module, _CPUSHMDistributed):
                # Every rank has mapped it by now, and without a name it vanishes with them.
                name = f"{self.dist_module.group_name}_{self.rank_in_group}"
                (SHARED_MEMORY / name).unlink(missing_ok=True)

        def _all_group_ranks_share_shm_group_name(self) -> bool:
            """Returns whether the process group's collectives may go by shared memory; equal on each rank.

            vLLM compares names made of the rendezvous port, which are equal in every pod.
            Its collectives spin, so each rank needs CPUs of its own.
            """
            plan, launch = Plan.from_env(os.environ), PodLaunch.from_env(os.environ)
            wish = len({plan.ranks[rank].pod for rank in self.ranks}) == 1 and may_spin(plan, launch)
            wishes: list[bool] = [False] * self.world_size
            torch.distributed.all_gather_object(wishes, wish, group=self.device_group)
            return all(wishes)

        def all_reduce(self, input_: Any) -> Any:
            """Sums over the process group; every rank calls it in the same order."""
            with _Timed():
                return super().all_reduce(input_)

        def all_gather(self, input_: Any, dim: int = -1) -> Any:
            """Concatenates over the process group along `dim`; every rank calls it in the same order."""
            with _Timed():
                return super().all_gather(input_, dim)

        def gather(self, input_: Any, dst: int = 0, dim: int = -1) -> Any:
            """Concatenates on `dst` only; every rank calls it in the same order."""
            with _Timed():
                return super().gather(input_, dst, dim)

    return GroupCpuCommunicator(**kwargs)


def build_cuda_communicator(**kwargs: Any) -> Any:
    """Returns the communicator of a GPU rank's process group, or None for a pipeline's.

    Raises:
        ContractError: the process group has CPU ranks too in pipeline mode, or there is no NCCL.
    """
    if _is_pipeline(kwargs):
        return None
    import torch.distributed

    plan = Plan.from_env(os.environ)
    ranks = torch.distributed.get_process_group_ranks(kwargs["cpu_group"])
    if any(plan.ranks[rank].device is not Device.GPU for rank in ranks):
        if plan.mode is Mode.TENSOR:
            return _bridge_communicator(kwargs)
        raise ContractError(
            f"process group {kwargs.get('unique_name')}: got GPU and CPU ranks {ranks}, expected one device; "
            "set spec.parallelism.mode: Tensor, or give each stage one device"
        )
    from vllm.distributed.device_communicators.cuda_communicator import CudaCommunicator

    communicator = CudaCommunicator(**kwargs)
    if communicator.pynccl_comm is None or communicator.pynccl_comm.disabled:
        # vLLM would go on over gloo, through host memory.
        raise ContractError(
            f"process group {kwargs.get('unique_name')}: got no NCCL on GPU ranks {ranks}, expected "
            "libnccl.so.2; install it in the worker image, and unset VLLM_DISABLE_PYNCCL"
        )
    return communicator


def shares_host(plan: Plan, launch: PodLaunch, stage: int, env: Mapping[str, str]) -> bool:
    """Returns whether a stage's ranks are to use one host's shared memory; the bridge proves that they can.

    Pods with one address share a machine, as under `heteroinfer up`; those of a cluster have one each.

    Raises:
        ContractError: the user's setting is none.
    """
    asked = env.get(names.ENV_BRIDGE, "auto")
    if asked not in _BRIDGES:
        raise ContractError(
            f"got {names.ENV_BRIDGE}={asked!r}, expected one of {', '.join(_BRIDGES)}; set it in engine.env"
        )
    if asked != "auto":
        return asked == "shared_memory"
    return share_machine(launch, (rank.pod for rank in plan.stage(stage)))


def may_spin(plan: Plan, launch: PodLaunch) -> bool:
    """Returns whether every compute thread on this host can have a CPU of its own.

    With fewer CPUs than threads vLLM's spinning collectives made a step take 0.23 s instead of 0.04 (2 busy
    CPUs of a Xeon at 2.5 GHz, 4 ranks, 8 tiny layers, 2026-11-21).
    """
    if names.ENV_OMP_PLACES in os.environ:  # the supervisor pins threads where the pod has whole cores
        return True
    ranks = ranks_on_machine(plan, launch)
    return len(os.sched_getaffinity(0)) >= len(ranks) * (first_level(os.environ) or 1)


def forget_shared_memory(*groups: Any) -> None:
    """Takes the names off the message queues of vLLM's process groups, once their constructors have returned.

    Every rank has mapped them by then; without a name they vanish with the processes,
    however these end.
    """
    for group in groups:
        queue = group.mq_broadcaster
        if queue is not None and queue.buffer is not None and queue.buffer.is_creator:
            queue.buffer.shared_memory.unlink()
            queue.buffer.is_creator = False


def _bridge_communicator(kwargs: dict[str, Any]) -> Any:
    from vllm_heteroinfer.distributed.bridge_communicator import BridgeCommunicator

    return BridgeCommunicator(**kwargs)


def _is_pipeline(kwargs: dict[str, Any]) -> bool:
    return str(kwargs.get("unique_name", "")).split(":")[0] == "pp"


class _Timed:
    """Adds the time of a collective to the wait for peers, outside of compiled graphs."""

    def __enter__(self) -> None:
        import torch

        self._compiling = torch.compiler.is_compiling()
        if not self._compiling:
            self._start = time.perf_counter()

    def __exit__(self, *exc: object) -> None:
        if not self._compiling:
            _wait_s[0] += time.perf_counter() - self._start
