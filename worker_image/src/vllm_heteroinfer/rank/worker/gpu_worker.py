"""The worker of a GPU rank; keeps CUDA graphs unless it splits its layers with CPU ranks.

No hop sits inside the forward pass, but a collective with a CPU rank does.
"""

import gc
import os
from collections.abc import Callable
from itertools import cycle
from typing import Any

import torch
from vllm.config import CUDAGraphMode
from vllm.v1.worker.gpu_worker import Worker

from heteroinfer_contract.plan import RankAssignment
from vllm_heteroinfer.distributed.nccl_log import NcclLog
from vllm_heteroinfer.rank.worker import headroom
from vllm_heteroinfer.rank.worker.group_worker import GroupWorkerMixin
from vllm_heteroinfer.rank.worker.sleep import SleepMixin

_ACTIVATIONS_BYTES = 1 << 30
"""Beside weights and KV cache, for the check at start only: the profile run measures what is needed."""
_PAIRS = 8
"""More than steps can be under way at once: a pair of events is used again after so many steps."""


class HeteroGpuWorker(GroupWorkerMixin, SleepMixin, Worker):
    """vLLM's GPU worker as one rank of a group."""

    _nccl_log: NcclLog | None = None

    def init_device(self) -> None:
        """Joins the process groups, once the GPU has the free memory that the plan counts on.

        vLLM would ask for 92 % of the whole GPU although the plan may count on a share of it.
        Source: vllm/v1/worker/utils.py::request_memory@v0.32.0.
        """
        self._nccl_log = NcclLog.begin(os.environ)
        total = torch.cuda.get_device_properties(0).total_memory
        self.cache_config.gpu_memory_utilization = memory_share(self.context.rank, total)
        super().init_device()

    def load_model(self, **kwargs: Any) -> None:
        """Loads as the mixin does, and has the device time each step's forward pass."""
        super().load_model(**kwargs)
        if self.context.metrics.counts:
            DeviceTimer(self.model_runner, self.context.metrics.on_device)

    def compile_or_warm_up_model(self) -> Any:
        """Warms up as the mixin does, and reports how tensors travelled between GPUs."""
        times = super().compile_or_warm_up_model()
        for way in sorted(self._nccl_log.ways()) if self._nccl_log else ():
            self.context.metrics.travels("ranks", way)
        return times

    def begin_profile(self) -> None:
        """Forgets torch's peak so far."""
        torch.cuda.reset_peak_memory_stats(self.device)

    def measure_headroom(self) -> headroom.KvHeadroom:
        """Returns what the GPU has left."""
        torch.cuda.synchronize(self.device)
        peak = torch.cuda.max_memory_allocated(self.device)
        gc.collect()
        torch.cuda.empty_cache()
        allocated = torch.cuda.memory_allocated(self.device)
        captures = self.vllm_config.compilation_config.cudagraph_mode != CUDAGraphMode.NONE
        return headroom.gpu_headroom(
            free_bytes=torch.cuda.mem_get_info(self.device)[0],
            cached_bytes=torch.cuda.memory_reserved(self.device) - allocated,
            allocated_bytes=allocated,
            peak_bytes=peak,
            graphs_bytes=headroom.CUDA_GRAPHS_BYTES if captures else 0,
        )


def memory_share(rank: RankAssignment, total_bytes: int) -> float:
    """Returns the share of a GPU's memory, at most 1, that must be free before `rank` starts."""
    return min(1.0, (rank.weight_bytes + rank.kv_cache_bytes + _ACTIVATIONS_BYTES) / total_bytes)


class DeviceTimer:
    """Times forward passes by CUDA events; put around the model runner's own call, on that instance.

    Source: vllm/v1/worker/gpu_model_runner.py::GPUModelRunner._model_forward@v0.32.0, made to be overridden.
    """

    def __init__(self, runner: Any, tell: Callable[[Callable[[], float]], None]) -> None:
        """Puts itself around `runner._model_forward`.

        Args:
            tell: gets, for each forward pass, a function that returns its seconds on the device.
                It waits for the forward pass, so it is called when the step is over anyway.
        """
        self._forward = runner._model_forward
        self._tell = tell
        self._events = cycle(
            [
                (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
                for _ in range(_PAIRS)
            ]
        )
        runner._model_forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the forward pass between two events."""
        start, end = next(self._events)
        start.record()
        output = self._forward(*args, **kwargs)
        end.record()

        def seconds() -> float:
            end.synchronize()
            return float(start.elapsed_time(end)) / 1e3

        self._tell(seconds)
        return output
