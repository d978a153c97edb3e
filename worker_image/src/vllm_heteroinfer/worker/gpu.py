"""The worker of a GPU rank; keeps CUDA graphs, since no hop sits inside the forward pass."""

from typing import Any

from vllm.v1.worker.gpu_worker import Worker

from vllm_heteroinfer.worker.common import GroupWorkerMixin
from vllm_heteroinfer.worker.timing import DeviceTimer


class HeteroGpuWorker(GroupWorkerMixin, Worker):
    """vLLM's GPU worker as one rank of a group."""

    def load_model(self, **kwargs: Any) -> None:
        """Loads as the mixin does, and has the device time each step's forward pass."""
        super().load_model(**kwargs)
        if self.context.metrics.counts:
            DeviceTimer(self.model_runner, self.context.metrics.on_device)
