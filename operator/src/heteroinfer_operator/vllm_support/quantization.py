"""Checks of quantized checkpoints that apply to every device, and vLLM's data for these checks. Pure.

tests/integration/models compares the table with vLLM.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from heteroinfer_contract.model import Scheme, SchemeName
from heteroinfer_contract.model_profile import ModelProfile
from heteroinfer_contract.plan import EngineSettings
from heteroinfer_operator.errors import PlanError, PlanReason
from heteroinfer_operator.vllm_support.engine_options import EngineOptions

FOUR_BITS: Final = frozenset({SchemeName.AWQ, SchemeName.GPTQ, SchemeName.INT4})
"""Formats of integers with 4 bits."""
_SIXTEEN_BITS: Final = frozenset({"bfloat16", "float16"})
_ALL_TYPES: Final = _SIXTEEN_BITS | {"float32"}
_BFLOAT16: Final = frozenset({"bfloat16"})
_METHODS: Final = {
    _SIXTEEN_BITS: """
        auto_awq auto_gptq awq awq_marlin deepseek_v4_fp8 experts_int8 fbgemm_fp8 fp8 fp8_per_block
        fp8_per_channel fp8_per_tensor gptq gptq_marlin humming inc int8_per_channel_weight_only modelopt
        modelopt_fp4 modelopt_mixed moe_wna16 nvfp4_per_token online quark
    """,
    _BFLOAT16: "fp_quant gpt_oss_mxfp4 modelopt_mxfp8 mxfp4 mxfp8",
    _ALL_TYPES: "compressed-tensors torchao",
}
METHOD_DTYPES: Final[Mapping[str, frozenset[str]]] = MappingProxyType(
    dict(sorted((method, dtypes) for dtypes, methods in _METHODS.items() for method in methods.split()))
)
"""Types of activations that each of vLLM's methods of quantization supports
(vllm/.../quantization/base_config.py::QuantizationConfig.get_supported_act_dtypes@v0.32.0)."""
DEPRECATED_METHODS: Final = frozenset({"fbgemm_fp8", "fp_quant"})
"""Methods that vLLM accepts only with --allow-deprecated-quantization
(vllm/.../quantization/__init__.py::DEPRECATED_QUANTIZATION_METHODS@v0.32.0)."""
_CHECKPOINT_ALIASES: Final[Mapping[str, str]] = MappingProxyType(
    {"auto-round": "inc", "compressed_tensors": "compressed-tensors"}
)
"""Name of a method in checkpoints -> vLLM's name (vllm/.../quantization/inc/inc.py::INCConfig@v0.32.0,
vllm/transformers_utils/model_arch_config_convertor.py@v0.32.0)."""
_SCALE_BITS: Final[Mapping[SchemeName, int]] = MappingProxyType({SchemeName.MXFP4: 8, SchemeName.NVFP4: 8})
"""Bits of the scale that a group of weights shares; 16 in other formats."""


def describe_in_bf16(profile: ModelProfile) -> str:
    """Returns "in bf16", with the approximate size of the model's weights in bf16 if it is known."""
    if not (profile.scheme.bits and profile.scheme_of_experts.bits):
        return "in bf16"
    stored_bytes = (
        sum(profile.layer_bytes) + profile.embedding_bytes + profile.head_bytes + profile.other_bytes
    )
    linear_bytes = sum(kind.quantized_bytes for kind in profile.layers)
    linear_growth = linear_bytes * (16 / _bits_per_weight(profile.scheme) - 1)
    expert_bytes = sum(kind.routed_bytes for kind in profile.layers if kind.experts_quantized)
    expert_growth = expert_bytes * (16 / _bits_per_weight(profile.scheme_of_experts) - 1)
    return f"in bf16 (about {(stored_bytes + linear_growth + expert_growth) / 2**30:.0f} GiB)"


def _bits_per_weight(scheme: Scheme) -> float:
    """Returns the bits of one weight, including its part of the scale that its group shares."""
    return scheme.bits + (_SCALE_BITS.get(scheme.name, 16) / scheme.group if scheme.group else 0)


def check_quantization(profile: ModelProfile, engine: EngineSettings) -> None:
    """Checks that vLLM supports the method of quantization together with the engine's dtype.

    Raises:
        PlanError: vLLM would fail to load the model; the message names the method and a fix.
    """
    written_method = profile.quantization.lower()
    method_by_source = {
        "model: quantization_config.quant_method": _CHECKPOINT_ALIASES.get(written_method, written_method),
        "engine.args --quantization": EngineOptions.of(engine.extra_args).quantization,
    }
    for source, method in method_by_source.items():
        if method:
            _check_method(source, method, engine)


def _check_method(source: str, method: str, engine: EngineSettings) -> None:
    """Raises PlanError if vLLM would refuse a method of quantization.

    Args:
        source: setting that names the method, in the checkpoint or in the engine's arguments.
    """
    dtypes = METHOD_DTYPES.get(method)
    if dtypes is None:
        raise _build_error(
            f"{source}: must be a method that vLLM supports (got {method}). Use the same model in bf16, or "
            f"quantized by one of these methods: {', '.join(METHOD_DTYPES)}"
        )
    if method in DEPRECATED_METHODS and not EngineOptions.of(engine.extra_args).allows_deprecated:
        raise _build_error(
            f"{source}: must not be {method}, which vLLM will remove soon and refuses by default. Add "
            "--allow-deprecated-quantization to engine.args, or use the model in another format"
        )
    if engine.dtype not in dtypes:
        raise _build_error(
            f"{source}: for {method}, vLLM requires engine.dtype to be {' or '.join(sorted(dtypes))} (got "
            f"{engine.dtype}). Set engine.dtype: bfloat16"
        )


def _build_error(message: str) -> PlanError:
    return PlanError(message, reason=PlanReason.UNSUPPORTED_MODEL)
