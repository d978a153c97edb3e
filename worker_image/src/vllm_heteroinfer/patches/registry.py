"""All patches of vLLM, as data. docs/contributor/patches.md is generated from this module. Stdlib only."""

from dataclasses import dataclass, replace
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """A function of vLLM that HeteroInfer replaces.

    Attributes:
        id: name of the module in this package whose `install()` applies the patch.
        target: the replaced function, as `module:attribute`.
        parameters: parameter names of the target, in order. Any other signature raises PatchError.
        processes: the only processes that apply the patch.
        why: purpose of the patch, and why an extension point of vLLM is not enough.
        upstream: link to a request for a change in vLLM; empty if there is no request yet.
        verified: versions of vLLM in which the tests of the patch passed.
        remove_when: change in vLLM after which the patch can be removed.
        otherwise: end of an error message that explains how to serve without the patch; empty if impossible.
    """

    id: str
    target: str
    parameters: tuple[str, ...]
    why: str
    verified: tuple[str, ...]
    remove_when: str
    processes: str = "CPU ranks of a group"
    upstream: str = ""
    otherwise: str = ""


class PatchError(RuntimeError):
    """The installed vLLM differs from the version that a patch was written for."""


CPU_LINEAR: Final = Patch(
    id="cpu_linear",
    target="vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm",
    parameters=("layer", "remove_weight"),
    why=(
        "our kernels for bf16 linear layers read weights faster than oneDNN for few rows. vLLM has no "
        "option, registry or method by which a plugin can choose the kernel of a CPU's linear layers. The "
        "patch also avoids second copies of the embedding and the head"
    ),
    verified=("0.32.0",),
    remove_when="vLLM lets a plugin choose the kernel of a CPU's linear layers, or vLLM's kernel is as fast",
    otherwise=", or set HETEROINFER_CPU_LINEAR=onednn to serve without the patch",
)
_EXPERTS: Final = "vllm.model_executor.layers.fused_moe.experts.cpu_moe"
CPU_EXPERTS_PACKING: Final = Patch(
    id="cpu_experts",
    target=f"{_EXPERTS}:CPUUnquantizedExperts.process_weights_after_loading",
    parameters=("self", "layer"),
    why=(
        "packs bf16 experts for our kernels, which read the chosen experts faster for few rows. vLLM chooses "
        "the class of experts in a function (`fused_moe/oracle`) to which a plugin cannot add a class"
    ),
    verified=("0.32.0",),
    remove_when="vLLM lets a plugin add classes of experts, or vLLM's experts are as fast",
    otherwise=", or set HETEROINFER_CPU_LINEAR=onednn to serve without the patch",
)
CPU_EXPERTS_APPLY: Final = replace(
    CPU_EXPERTS_PACKING,
    target=f"{_EXPERTS}:CPUUnquantizedExperts.apply",
    parameters=(
        *("self", "output", "hidden_states", "w1", "w2", "topk_weights", "topk_ids", "activation"),
        *("global_num_experts", "expert_map", "a1q_scale", "a2_scale", "workspace13", "workspace2"),
        *("expert_tokens_meta", "apply_router_weight_on_input"),
    ),
    why="computes the bf16 experts that this patch packed",
)
CPU_FP8_EXPERTS_PACKING: Final = replace(
    CPU_EXPERTS_PACKING,
    target=f"{_EXPERTS}:prepare_fp8_moe_layer_for_cpu",
    parameters=("w13", "w2"),
    why="packs experts in FP8 blocks for our kernels. vLLM calls this function for all checkpoint formats",
)
CPU_FP8_EXPERTS_APPLY: Final = replace(
    CPU_EXPERTS_APPLY,
    target=f"{_EXPERTS}:CPUExpertsFp8.apply",
    why="computes the FP8 experts that this patch packed",
)
CPU_INT4_EXPERTS_PACKING: Final = Patch(
    id="cpu_packing",
    target="vllm.model_executor.layers.fused_moe.oracle.int_wna16:_process_weights_cpu",
    parameters=(
        *("quant_config", "w13", "w2", "w13_scale", "w2_scale", "w13_qzeros", "w2_qzeros"),
        *("w13_bias", "w2_bias"),
    ),
    why=(
        "vLLM unpacks 4-bit experts into 32-bit numbers before it packs the experts for its kernels. It "
        "unpacks all experts of a layer at the same time, which takes four to ten times their bytes. With "
        "the patch, vLLM unpacks and packs one expert after another"
    ),
    verified=("0.32.0",),
    remove_when="vLLM packs 4-bit weights of CPUs in parts",
)
_INT4: Final = "vllm.model_executor.kernels.linear.mixed_precision.cpu:CPUWNA16LinearKernel"
CPU_INT4_PACKING: Final = replace(
    CPU_INT4_EXPERTS_PACKING,
    target=f"{_INT4}._process_gptq_weights_w4a16",
    parameters=("self", "layer"),
    why=(
        "packs 4-bit linear layers in slices, to save memory: vLLM unpacks a whole layer into 32-bit numbers "
        "before it packs the layer"
    ),
)
CPU_INT4_PACKING_AMX: Final = replace(
    CPU_INT4_PACKING,
    target=f"{_INT4}._process_gptq_weights_w4a8",
    why="packs 4-bit linear layers in slices on CPUs with AMX, to save memory",
)
CPU_AWQ_PACKING: Final = replace(
    CPU_INT4_PACKING,
    target="vllm.model_executor.layers.quantization.auto_awq:_convert_awq_to_standard_format",
    parameters=("layer", "w_q_name", "w_zp_name", "size_bits"),
    why="converts AWQ weights to GPTQ's order in slices, to save memory: vLLM unpacks a whole layer",
)
CPU_CODED_SCALES: Final = Patch(
    id="cpu_coded",
    target="vllm.model_executor.layers.quantization.utils.w8a8_utils:requantize_with_max_scale",
    parameters=("weight", "weight_scale", "logical_widths"),
    why=(
        "vLLM joins FP8 layers (q, k and v, or gate and up). It rounds their weights again so that they "
        "share one scale, by an operation that CPUs lack. Our kernels keep the weights and take a scale for "
        "each column"
    ),
    verified=("0.32.0",),
    remove_when="vLLM keeps the scale of each joined layer",
    otherwise=", or set HETEROINFER_CPU_LINEAR=onednn to serve without the patch",
)
CPU_CODED_MODELOPT_SCALES: Final = replace(
    CPU_CODED_SCALES,
    target="vllm.model_executor.layers.quantization.modelopt:requantize_with_max_scale",
    why=(
        "vLLM's module for ModelOpt imports requantize_with_max_scale by name, so a patch of w8a8_utils does "
        "not reach this module"
    ),
)
CPU_CODED_FACTORS: Final = replace(
    CPU_CODED_SCALES,
    target=(
        "vllm.model_executor.layers.quantization.compressed_tensors.schemes.compressed_tensors_w4a4_nvfp4"
        ":CompressedTensorsW4A4Fp4.process_weights_after_loading"
    ),
    parameters=("self", "layer"),
    why=(
        "each layer in NVFP4 has a factor. If vLLM joins layers with different factors, it uses one of the "
        "factors for all, so most of the weights are wrong. Our kernels take a factor for each column"
    ),
    remove_when="vLLM keeps the factor of each joined layer",
)
CPU_CODED_MODELOPT_FACTORS: Final = replace(
    CPU_CODED_FACTORS,
    target="vllm.model_executor.layers.quantization.modelopt:KNvfp4Static.process",
    parameters=("self", "layer", "role"),
    why="keeps the factor of each joined layer in NVFP4, for checkpoints that ModelOpt wrote",
)
CPU_CODED_EXPERTS_CHOICE: Final = Patch(
    id="cpu_coded_experts",
    target="vllm.model_executor.layers.fused_moe.modular_kernel:FusedMoEExperts.is_supported_config",
    parameters=("cls", "moe_config", "weight_key", "activation_key", "activation_format"),
    why=(
        "vLLM's kernels for quantized experts on CPUs need AMX, and vLLM has no kernels for FP8 per channel "
        "and per tensor, MXFP8 and NVFP4. Its methods ask this function whether they support a layer, so the "
        "patch makes the function accept the formats of our kernels"
    ),
    verified=("0.32.0",),
    remove_when="vLLM lets a plugin add classes of experts",
    otherwise=", or set HETEROINFER_CPU_LINEAR=onednn to serve without the patch",
)
CPU_CODED_EXPERTS_METHOD: Final = replace(
    CPU_CODED_EXPERTS_CHOICE,
    target="vllm.model_executor.layers.fused_moe.routed_experts:RoutedExperts._get_quant_method",
    parameters=("self", "prefix", "quant_config", "moe_config"),
    why="our kernels pack and compute quantized experts, in every format that vLLM's methods load",
)
CPU_ROUTER: Final = Patch(
    id="cpu_router",
    target="vllm.model_executor.layers.fused_moe.router.cpu_router:CPURouter._compute_routing",
    parameters=("self", "hidden_states", "router_logits", "indices_type", "input_ids"),
    why=(
        "for models without expert groups, vLLM's CPU router fails an assertion if scores are sigmoids, and "
        "silently omits the bias that corrects a softmax choice. vLLM offers no way to register another "
        "class of router"
    ),
    verified=("0.32.0",),
    remove_when="vLLM's router on CPUs makes the same choice as its routers on GPUs",
)
CPU_MIXTURE: Final = Patch(
    id="cpu_mixture",
    target="vllm.model_executor.layers.fused_moe.runner.moe_runner:MoERunner.forward",
    parameters=("self", "hidden_states", "router_logits", "input_ids", "shared_experts_input"),
    why=(
        "CPU ranks without torch.compile compute the router, the choice of experts and the packed experts in "
        "one call. vLLM calls a dozen functions instead. For a few tokens, these calls take longer than the "
        "experts, and no option selects another runner"
    ),
    verified=("0.32.0",),
    remove_when="vLLM lets a plugin choose the runner of experts, or vLLM's runner is as fast",
    otherwise=", or set HETEROINFER_CPU_LINEAR=onednn to serve without the patch",
)
CPU_NORM: Final = Patch(
    id="cpu_norm",
    target="vllm.model_executor.layers.layernorm:RMSNorm.forward_native",
    parameters=("self", "x", "residual"),
    why=(
        "CPU ranks without torch.compile compute a bf16 norm in one call. For a few rows, vLLM's registry of "
        "operations, torch's dispatcher and the wake-up of threads take several times as long as the norm. A "
        "class that a plugin registers would replace every class of that name"
    ),
    verified=("0.32.0",),
    remove_when="vLLM's norm on CPUs is as fast for few rows",
    otherwise=", or set HETEROINFER_CPU_LINEAR=onednn to serve without the patch",
)
CPU_ATTENTION: Final = Patch(
    id="cpu_attention",
    target="vllm.model_executor.layers.attention.attention:Attention.forward",
    parameters=("self", "query", "key", "value", "output_shape", "output_dtype"),
    why=(
        "in each step, a CPU rank without torch.compile looks up each layer by name, and twice cuts the "
        "layer's KV cache into keys and values. For a few rows, this work takes longer than attention, and "
        "another class of attention backend could not skip this work"
    ),
    verified=("0.32.0",),
    remove_when="vLLM keeps the halves of a CPU's KV cache",
    otherwise=", or set HETEROINFER_CPU_LINEAR=onednn to serve without the patch",
)
CPU_ROPE: Final = Patch(
    id="cpu_rope",
    target="vllm.model_executor.layers.rotary_embedding.base:RotaryEmbedding.forward_cpu",
    parameters=("self", "positions", "query", "key"),
    why=(
        "vLLM's CPU kernel for rotary embedding (RoPE) uses the positions of other tokens if queries or keys "
        "have a dimension of heads, as in multi-head latent attention (MLA). In bf16 the kernel crashes for "
        "some sizes of the rotated part. vLLM has no option that selects another kernel for an eager rank"
    ),
    verified=("0.32.0",),
    remove_when="vLLM's rotary embedding on CPUs distinguishes tokens from heads",
)
ENGINE_PAUSE: Final = Patch(
    id="engine_pause",
    target="vllm.v1.engine.core:EngineCoreProc._process_engine_step",
    parameters=("self",),
    processes="the engine of a group",
    why=(
        "with a queue of batches (pipeline stages), the engine receives a step's output in a call that "
        "schedules nothing. vLLM treats such a call as an idle step and sleeps 1 ms, so each token takes "
        "1 ms longer. No option prevents the sleep, and no option selects another class of engine"
    ),
    verified=("0.32.0",),
    remove_when="vLLM does not sleep after a step that had outputs",
)

PATCHES: Final = (
    CPU_LINEAR,
    CPU_EXPERTS_PACKING,
    CPU_EXPERTS_APPLY,
    CPU_FP8_EXPERTS_PACKING,
    CPU_FP8_EXPERTS_APPLY,
    CPU_INT4_EXPERTS_PACKING,
    CPU_INT4_PACKING,
    CPU_INT4_PACKING_AMX,
    CPU_AWQ_PACKING,
    CPU_CODED_SCALES,
    CPU_CODED_MODELOPT_SCALES,
    CPU_CODED_FACTORS,
    CPU_CODED_MODELOPT_FACTORS,
    CPU_CODED_EXPERTS_CHOICE,
    CPU_CODED_EXPERTS_METHOD,
    CPU_ROUTER,
    CPU_MIXTURE,
    CPU_NORM,
    CPU_ATTENTION,
    CPU_ROPE,
    ENGINE_PAUSE,
)


def build_refusal(patch: Patch, found: str, version: str) -> PatchError:
    """Returns the error for a vLLM that lacks the patch's target.

    Args:
        found: the replacement of the target in this vLLM, such as other parameters.
        version: version of the installed vLLM.
    """
    return PatchError(
        f"patch {patch.id}: vLLM must have {patch.target}({', '.join(patch.parameters)}) (got {found} in "
        f"vLLM {version}). Install vLLM {' or '.join(patch.verified)}{patch.otherwise}"
    )
