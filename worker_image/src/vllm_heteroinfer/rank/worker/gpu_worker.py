"""The worker of a GPU rank. It uses CUDA graphs unless it splits its layers with CPU ranks.

Hops happen outside the forward pass, but collectives with a CPU rank happen inside.
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
"""Memory for activations, only for the check at start. The profile run measures the real need."""
_EVENT_PAIRS = 8
"""Pairs of events, reused in turn: more than the steps that can run at the same time."""


class HeteroGpuWorker(GroupWorkerMixin, SleepMixin, Worker):
    """vLLM's GPU worker as one rank of a group."""

    _nccl_log: NcclLog | None = None

    def init_device(self) -> None:
        """Joins the process groups, and requires the free GPU memory that the plan needs.

        vLLM would require 92 % of the whole GPU, but the plan may use only a share.
        Source: vllm/v1/worker/utils.py::request_memory@v0.32.0.
        """
        self._nccl_log = NcclLog.capture(os.environ)  # before the process groups start NCCL
        total = torch.cuda.get_device_properties(0).total_memory
        self.cache_config.gpu_memory_utilization = memory_share(self.context.rank, total)
        super().init_device()

    def load_model(self, **kwargs: Any) -> None:
        """Loads like the mixin, and installs the timer of forward passes."""
        super().load_model(**kwargs)
        if self.context.metrics.writes_metrics:
            time_forward_passes(self.model_runner, self.context.metrics.set_device_timer)

    def report_transports(self) -> None:
        """Reports the transport of tensors between GPUs, from NCCL's log of the warm-up."""
        if self._nccl_log is None:
            return
        for transport in sorted(self._nccl_log.used_transports()):
            self.context.metrics.record_path("ranks", transport)

    def begin_profile(self) -> None:
        """Resets torch's memory peak."""
        torch.cuda.reset_peak_memory_stats(self.device)

    def measure_headroom(self) -> headroom.KvHeadroom:
        """Measures the memory that the GPU has left for a KV cache, after the largest batch.

        First makes torch release all unused memory that it can release, so that this memory counts as free.
        """
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


def time_forward_passes(runner: Any, report: Callable[[Callable[[], float]], None]) -> None:
    """Replaces `runner._model_forward`, so that CUDA events time each forward pass.

    Source: vllm/v1/worker/gpu_model_runner.py::GPUModelRunner._model_forward@v0.32.0 is made for overriding.

    Args:
        report: called for each forward pass with a function that returns the pass's seconds on the device.
            That function waits for the forward pass, so call it only after the step.
    """
    runner._model_forward = _TimedForward(runner, report)


class _TimedForward:
    """A runner's `_model_forward`, timed by CUDA events."""

    def __init__(self, runner: Any, report: Callable[[Callable[[], float]], None]) -> None:
        """Keeps the runner's own `_model_forward`, which this object calls."""
        self._forward = runner._model_forward
        self._report = report
        self._events = cycle(
            [
                (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
                for _ in range(_EVENT_PAIRS)
            ]
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the forward pass between two events."""
        start, end = next(self._events)
        start.record()
        output = self._forward(*args, **kwargs)
        end.record()

        def seconds() -> float:
            end.synchronize()
            return float(start.elapsed_time(end)) / 1e3

        self._report(seconds)
        return output
