"""The platform of a CPU rank; subclasses vLLM's, so that dispatch by `is_cpu()` stays as it is."""

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

    # For small functions that vLLM compiles even where the model runs eagerly, such as the embedding's
    # mask (vllm/model_executor/layers/vocab_parallel_embedding.py::get_masked_input_and_mask@v0.32.0): with
    # inductor they need a C++ compiler in the image, and 24 s cold, while peers wait in the next collective.
    simple_compile_backend = "eager"

    @classmethod
    def pre_register_and_update(cls, parser: Any = None) -> None:
        """Does what vLLM's platform does before a configuration is made, and names our variable to vLLM."""
        super().pre_register_and_update(parser)
        register_environ()

    @classmethod
    def check_and_update_config(cls, vllm_config: "VllmConfig") -> None:
        """Applies vLLM's CPU rules, with our worker class."""
        if vllm_config.parallel_config.worker_cls == "auto":
            vllm_config.parallel_config.worker_cls = "vllm_heteroinfer.rank.worker.cpu_worker.HeteroCpuWorker"
        super().check_and_update_config(vllm_config)
        # vLLM spawns on the CPU since its workers need an environment of their own before exec; ours are
        # started by the supervisor. The one process that is started here is the engine, from the API
        # server, which computes nothing: by fork it saves importing everything again (10 s of a CPU).
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    @classmethod
    def import_ir_kernels(cls) -> None:
        """Registers vLLM's implementations of small operations, and those that we add for CPUs."""
        super().import_ir_kernels()
        import vllm_heteroinfer.platform.cpu_norms  # noqa: F401 - registers them

    @classmethod
    def get_default_ir_op_priority(cls, vllm_config: "VllmConfig") -> "IrOpPriorityConfig":
        """Returns vLLM's choice where the model is compiled, or the user chose its kernels; else ours."""
        from vllm.config import CompilationMode
        from vllm.config.kernel import IrOpPriorityConfig

        if vllm_config.compilation_config.mode != CompilationMode.NONE or not is_wanted(os.environ):
            return super().get_default_ir_op_priority(vllm_config)
        from vllm_heteroinfer.kernels.norms import PROVIDER

        ours = [PROVIDER, "native"]
        return IrOpPriorityConfig.with_default(["native"], rms_norm=ours, fused_add_rms_norm=ours)

    @classmethod
    def opaque_attention_op(cls) -> bool:
        """Returns False in eager models: torch's dispatcher takes as long as attention of few rows.

        Latent attention has another way without it, that vLLM tests on GPUs alone: there, and where the model
        is compiled, vLLM's choice stays.
        """
        from vllm.config import CompilationMode, get_current_vllm_config_or_none

        config = get_current_vllm_config_or_none()
        if config is None or config.model_config is None or config.model_config.use_mla:
            return super().opaque_attention_op()
        return config.compilation_config.mode != CompilationMode.NONE

    def is_sleep_mode_available(self) -> bool:
        """Returns True: our worker gives back the KV cache, where vLLM's CPU worker only logs."""
        return True

    @classmethod
    def get_compile_backend(cls) -> str:
        """Returns what compiles the model itself where the plan asks for it; vLLM's own choice."""
        return "inductor"

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        """Returns what builds the communicator of a group with more than one rank."""
        return "vllm_heteroinfer.distributed.communicators.build_cpu_communicator"
