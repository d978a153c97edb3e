"""The worker of a CPU rank. Never import this in a GPU process."""

import torch
from vllm.config import CompilationMode, set_current_vllm_config
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_heteroinfer.worker.common import GroupWorkerMixin


class HeteroCpuWorker(GroupWorkerMixin, CPUWorker):
    """vLLM's CPU worker as one rank of a group."""

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Runs the largest batch once where vLLM's CPU worker would not.

        With eager mode and a given KV size it runs nothing, and a later stage then lacks the
        buffer for its input (vllm/v1/worker/gpu_model_runner.py::GPUModelRunner.
        sync_and_gather_intermediate_tensors@v0.32.0 asserts it). It also shows before the
        first request that the activations fit.
        """
        if self.compilation_config.mode == CompilationMode.NONE and not self._follows():
            with set_current_vllm_config(self.vllm_config):
                self.model_runner.profile_run()

    def _should_warm_up_model(self) -> bool:
        """Returns whether this rank warms up by itself; a follower has already done what its leader did.

        Source: vllm/v1/worker/cpu_worker.py::CPUWorker._should_warm_up_model@v0.32.0.
        """
        return not self._follows() and super()._should_warm_up_model()

    def _follows(self) -> bool:
        return self.tensor_group is not None and self.tensor_group.follows
