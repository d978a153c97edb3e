"""The platform of a CPU rank. A subclass of vLLM's platform, so `is_cpu()` remains true."""

import os
from typing import TYPE_CHECKING, Any

from vllm.platforms.cpu import CpuPlatform

from vllm_heteroinfer.kernels.linear_layers import is_wanted
from vllm_heteroinfer.platform.environ import register_environ

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.config.kernel import IrOpPriorityConfig


class HeteroCpuPlatform(CpuPlatform):
    """CpuPlatform with our worker and communicators."""

    # vLLM compiles small functions even if the model runs eagerly, such as the embedding's mask
    # (vllm/model_executor/layers/vocab_parallel_embedding.py::get_masked_input_and_mask@v0.32.0). Inductor
    # would need a C++ compiler in the image and 24 s without a cache, while peers wait in a collective.
    simple_compile_backend = "eager"

    @classmethod
    def pre_register_and_update(cls, parser: Any = None) -> None:
        """Prepares like vLLM's platform, and registers our environment variable with vLLM."""
        super().pre_register_and_update(parser)
        register_environ()

    @classmethod
    def check_and_update_config(cls, vllm_config: "VllmConfig") -> None:
        """Applies vLLM's CPU rules, with our worker class, and makes vLLM fork its child processes."""
        if vllm_config.parallel_config.worker_cls == "auto":
            vllm_config.parallel_config.worker_cls = "vllm_heteroinfer.rank.worker.cpu_worker.HeteroCpuWorker"
        super().check_and_update_config(vllm_config)
        # vLLM uses spawn on CPUs, because its workers need their own environment before exec. The supervisor
        # starts our workers, so vLLM's API server starts only the engine, which computes nothing. A fork of
        # vLLM's API server does not import everything again (10 s of a CPU).
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    @classmethod
    def import_ir_kernels(cls) -> None:
        """Registers vLLM's implementations of small operations, and our implementations for CPUs."""
        super().import_ir_kernels()
        import vllm_heteroinfer.platform.cpu_norms  # noqa: F401 - registers them

    @classmethod
    def get_default_ir_op_priority(cls, vllm_config: "VllmConfig") -> "IrOpPriorityConfig":
        """Returns our order of implementations of small operations.

        Returns vLLM's order if the model is compiled, or if the user chose vLLM's implementations.
        """
        from vllm.config import CompilationMode
        from vllm.config.kernel import IrOpPriorityConfig

        if vllm_config.compilation_config.mode != CompilationMode.NONE or not is_wanted(os.environ):
            return super().get_default_ir_op_priority(vllm_config)
        from vllm_heteroinfer.kernels.norms import PROVIDER

        ours = [PROVIDER, "native"]
        return IrOpPriorityConfig.with_default(["native"], rms_norm=ours, fused_add_rms_norm=ours)

    @classmethod
    def opaque_attention_op(cls) -> bool:
        """Returns whether attention runs as an operation of torch's dispatcher. It does not in eager models.

        For few rows, the dispatcher takes as long as attention. Returns vLLM's choice if the model is
        compiled, and for latent attention: without the op, latent attention runs a code path that vLLM tests
        only on GPUs.
        """
        from vllm.config import CompilationMode, get_current_vllm_config_or_none

        config = get_current_vllm_config_or_none()
        if config is None or config.model_config is None or config.model_config.use_mla:
            return super().opaque_attention_op()
        return config.compilation_config.mode != CompilationMode.NONE

    def is_sleep_mode_available(self) -> bool:
        """Returns True, because our worker releases the KV cache. vLLM's CPU worker only logs."""
        return True

    @classmethod
    def get_compile_backend(cls) -> str:
        """Returns the backend that compiles the model if the plan requests it; the same as vLLM's."""
        return "inductor"

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        """Returns the path of the function that builds the communicator of a group with several ranks."""
        return "vllm_heteroinfer.distributed.communicators.build_cpu_communicator"
