"""The platform of a GPU rank. A subclass of vLLM's platform, so `is_cuda()` remains true."""

import os
from typing import TYPE_CHECKING, Any

from vllm.platforms.cuda import CudaPlatform

from vllm_heteroinfer.platform.environ import register_environ

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class HeteroCudaPlatform(CudaPlatform):
    """CudaPlatform with our worker and communicators, and process groups that CPU ranks can join."""

    # All ranks must use the same backend. GPU-only groups still communicate by NCCL: vLLM builds PyNccl from
    # a group's gloo part (vllm/distributed/device_communicators/cuda_communicator.py).
    dist_backend = "gloo"

    @classmethod
    def pre_register_and_update(cls, parser: Any = None) -> None:
        """Prepares like vLLM's platform, and registers our environment variable with vLLM."""
        super().pre_register_and_update(parser)
        register_environ()

    @classmethod
    def check_and_update_config(cls, vllm_config: "VllmConfig") -> None:
        """Applies vLLM's CUDA rules, with our worker class."""
        if vllm_config.parallel_config.worker_cls == "auto":
            vllm_config.parallel_config.worker_cls = "vllm_heteroinfer.rank.worker.gpu_worker.HeteroGpuWorker"
        super().check_and_update_config(vllm_config)
        # GPUs of a stage communicate by NCCL. The options below need ranks whose GPUs have different numbers,
        # but each of our ranks sees its GPU as number 0. Torch's symmetric memory refuses equal numbers, at
        # best with a warning
        # (vllm/distributed/device_communicators/symm_mem.py::SymmMemCommunicator@v0.32.0).
        for option in ("VLLM_ALLREDUCE_USE_SYMM_MEM", "VLLM_ALLREDUCE_USE_FLASHINFER"):
            os.environ.setdefault(option, "0")

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        """Returns the path of the function that builds the communicator of a group with several ranks."""
        return "vllm_heteroinfer.distributed.communicators.build_cuda_communicator"
