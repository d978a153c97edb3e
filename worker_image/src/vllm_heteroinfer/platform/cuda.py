"""The platform of a GPU rank; subclasses vLLM's, so that dispatch by `is_cuda()` stays as it is."""

import os
from typing import TYPE_CHECKING, Any

from vllm.platforms.cuda import CudaPlatform

from vllm_heteroinfer.platform.environ import register_environ

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class HeteroCudaPlatform(CudaPlatform):
    """CudaPlatform with our worker and communicators, and process groups that CPU ranks can join."""

    # Every rank must name the same backend. GPU-only groups talk by NCCL all the same: PyNccl
    # is built from a group's gloo side (vllm/distributed/device_communicators/cuda_communicator.py).
    dist_backend = "gloo"

    @classmethod
    def pre_register_and_update(cls, parser: Any = None) -> None:
        """Does what vLLM's platform does before a configuration is made, and names our variable to vLLM."""
        super().pre_register_and_update(parser)
        register_environ()

    @classmethod
    def check_and_update_config(cls, vllm_config: "VllmConfig") -> None:
        """Applies vLLM's CUDA rules, with our worker class."""
        if vllm_config.parallel_config.worker_cls == "auto":
            vllm_config.parallel_config.worker_cls = "vllm_heteroinfer.rank.worker.gpu_worker.HeteroGpuWorker"
        super().check_and_update_config(vllm_config)
        # GPUs of a stage talk by NCCL. Both of these want ranks that see each other's GPUs by different
        # numbers, and each of ours sees its own as number 0: torch's refuses that, with a warning at best
        # (vllm/distributed/device_communicators/symm_mem.py::SymmMemCommunicator@v0.32.0).
        for option in ("VLLM_ALLREDUCE_USE_SYMM_MEM", "VLLM_ALLREDUCE_USE_FLASHINFER"):
            os.environ.setdefault(option, "0")

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        """Returns what builds the communicator of a group with more than one rank."""
        return "vllm_heteroinfer.distributed.communicators.build_cuda_communicator"
