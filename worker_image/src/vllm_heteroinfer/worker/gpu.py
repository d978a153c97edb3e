"""The worker of a GPU rank; keeps CUDA graphs, since no hop sits inside the forward pass."""

from vllm.v1.worker.gpu_worker import Worker

from vllm_heteroinfer.worker.common import GroupWorkerMixin


class HeteroGpuWorker(GroupWorkerMixin, Worker):
    """vLLM's GPU worker as one rank of a group."""
