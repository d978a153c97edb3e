"""The worker of a CPU rank. Never import this in a GPU process."""

from pathlib import Path
from typing import Any

import torch
from vllm.config import CompilationMode, set_current_vllm_config
from vllm.v1.worker.cpu_worker import CPUWorker

from heteroinfer_contract.cgroups import available_memory
from vllm_heteroinfer.feed_forward import loaded_experts
from vllm_heteroinfer.patches import (
    cpu_attention,
    cpu_coded,
    cpu_coded_experts,
    cpu_experts,
    cpu_linear,
    cpu_mixture,
    cpu_norm,
    cpu_packing,
    cpu_rope,
    cpu_router,
)
from vllm_heteroinfer.rank.worker import headroom
from vllm_heteroinfer.rank.worker.group_worker import GroupWorkerMixin
from vllm_heteroinfer.rank.worker.memory_policy import prefer_nodes_or_warn
from vllm_heteroinfer.rank.worker.sleep import CpuSleepMixin, SleepMixin


class HeteroCpuWorker(GroupWorkerMixin, SleepMixin, CpuSleepMixin, CPUWorker):
    """vLLM's CPU worker as one rank of a group."""

    def init_device(self) -> None:
        """Makes the kernel use memory of the rank's own NUMA nodes. Then joins the process groups.

        vLLM's worker binds memory strictly to the node of its first CPU, and the model may not fit there
        (vllm/v1/worker/cpu_worker.py::CPUWorker.__init__@v0.32.0).
        """
        prefer_nodes_or_warn(self.context.memory_nodes)
        super().init_device()

    def load_model(self, **kwargs: Any) -> None:
        """Loads this stage's weights. The patches choose HeteroInfer's kernels if the CPU can run them."""
        cpu_linear.install()
        cpu_coded.install()
        cpu_experts.install()
        cpu_coded_experts.install(loaded_experts.pack_loaded_experts)
        cpu_packing.install()
        cpu_router.install()
        cpu_mixture.install()
        cpu_norm.install()
        cpu_attention.install()
        cpu_rope.install()
        super().load_model(**kwargs)

    def begin_profile(self) -> None:
        """Starts to measure the peak of the resident set."""
        self._peak = headroom.PeakOfRun()

    def run_profile(self) -> int:
        """Runs the largest batch if the model is compiled. Returns the planned size of the KV cache.

        Replaces vLLM's method, which refuses a plan larger than the free memory of one NUMA node, and counts
        the page cache as memory in use.
        """
        if self._should_warm_up_model():
            self.model_runner.warming_up_model()
        return self.context.rank.kv_cache_bytes

    def measure_headroom(self) -> headroom.KvHeadroom:
        """Measures this rank's share of the memory that its pod and machine have left."""
        context = self.context
        available = available_memory(
            Path("/sys/fs/cgroup"), Path("/proc/self/cgroup").read_text(), Path("/proc/meminfo").read_text()
        )
        return headroom.host_headroom(
            available_bytes=available,
            share=headroom.share_of_memory(context.plan, context.launch, context.rank),
            activations_bytes=self._peak.temporary_bytes(),
        )

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Runs the largest batch once if vLLM's CPU worker would not.

        In eager mode with a given KV cache size, vLLM's worker runs nothing. A later stage then lacks its
        input buffer
        (vllm/v1/worker/gpu_model_runner.py::GPUModelRunner.sync_and_gather_intermediate_tensors@v0.32.0
        asserts that it exists). The run also checks before the first request that the activations fit.
        """
        if self.compilation_config.mode == CompilationMode.NONE and not self.mode.follows:
            with set_current_vllm_config(self.vllm_config):
                self.model_runner.profile_run()

    def _should_warm_up_model(self) -> bool:
        """Returns whether this rank warms up by itself. A follower has run its leader's warm-up already.

        Source: vllm/v1/worker/cpu_worker.py::CPUWorker._should_warm_up_model@v0.32.0.
        """
        return not self.mode.follows and super()._should_warm_up_model()
