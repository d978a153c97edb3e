"""vLLM's requirements on quantized checkpoints, on any device. Pure; data.

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
_SIXTEEN_BITS: Final = frozenset({"bfloat16", "float16"})
_ANY: Final = _SIXTEEN_BITS | {"float32"}
_BFLOAT16: Final = frozenset({"bfloat16"})
_METHODS: Final = {
    _SIXTEEN_BITS: """
        auto_awq auto_gptq awq awq_marlin deepseek_v4_fp8 experts_int8 fbgemm_fp8 fp8 fp8_per_block
        fp8_per_channel fp8_per_tensor gptq gptq_marlin humming inc int8_per_channel_weight_only modelopt
        modelopt_fp4 modelopt_mixed moe_wna16 nvfp4_per_token online quark
    """,
    _BFLOAT16: "fp_quant gpt_oss_mxfp4 modelopt_mxfp8 mxfp4 mxfp8",
    _ANY: "compressed-tensors torchao",
}
METHOD_DTYPES: Final[Mapping[str, frozenset[str]]] = MappingProxyType(
    dict(sorted((method, dtypes) for dtypes, methods in _METHODS.items() for method in methods.split()))
)
"""Types of activations that each of vLLM's methods supports
(vllm/.../quantization/base_config.py::QuantizationConfig.get_supported_act_dtypes@v0.32.0)."""
DEPRECATED_METHODS: Final = frozenset({"fbgemm_fp8", "fp_quant"})
"""Methods that vLLM accepts only with --allow-deprecated-quantization
(vllm/.../quantization/__init__.py::DEPRECATED_QUANTIZATION_METHODS@v0.32.0)."""
_CHECKPOINT_ALIASES: Final[Mapping[str, str]] = MappingProxyType(
    {"auto-round": "inc", "compressed_tensors": "compressed-tensors"}
)
"""vLLM's names of methods in checkpoints (vllm/.../quantization/inc/inc.py::INCConfig@v0.32.0,
vllm/transformers_utils/model_arch_config_convertor.py@v0.32.0)."""
_SCALE_BITS: Final[Mapping[SchemeName, int]] = MappingProxyType({SchemeName.MXFP4: 8, SchemeName.NVFP4: 8})
"""Bits of the scale of a group of weights; 16 in other formats."""


def in_bf16(profile: ModelProfile) -> str:
    """Describes the same model in bf16, with the approximate size of its weights if it is known."""
    if not (profile.scheme.bits and profile.scheme_of_experts.bits):
        return "in bf16"
    stored = sum(profile.layer_bytes) + profile.embedding_bytes + profile.head_bytes + profile.other_bytes
    linear = sum(kind.quantized_bytes for kind in profile.layers) * (16 / _bits(profile.scheme) - 1)
    experts = sum(kind.routed_bytes for kind in profile.layers if kind.experts_quantized)
    experts_more = experts * (16 / _bits(profile.scheme_of_experts) - 1)
    return f"in bf16 (about {(stored + linear + experts_more) / 2**30:.0f} GiB)"


def _bits(scheme: Scheme) -> float:
    """Returns the bits of one weight with its part of a scale."""
    return scheme.bits + (_SCALE_BITS.get(scheme.name, 16) / scheme.group if scheme.group else 0)


def check_quantization(profile: ModelProfile, engine: EngineSettings) -> None:
    """Checks that vLLM supports the method of quantization with the engine's dtype.

    Raises:
        PlanError: vLLM would fail to load the model; the message names the method and a fix.
    """
    own = profile.quantization.lower()
    found = {"model: quantization_config.quant_method": _CHECKPOINT_ALIASES.get(own, own)}
    found["engine.args --quantization"] = EngineOptions.of(engine.extra_args).quantization
    for where, method in found.items():
        if method:
            _check_method(where, method, engine)


def _check_method(where: str, method: str, engine: EngineSettings) -> None:
    dtypes = METHOD_DTYPES.get(method)
    if dtypes is None:
        raise _refuse(
            f"{where}: got {method}, which vLLM does not know; expected one of {', '.join(METHOD_DTYPES)}; "
            "take the same model in bf16, or quantized by one of these"
        )
    if method in DEPRECATED_METHODS and not EngineOptions.of(engine.extra_args).allows_deprecated:
        raise _refuse(
            f"{where}: got {method}, which vLLM is about to drop, and refuses; add "
            "--allow-deprecated-quantization to engine.args, or take the model in another format"
        )
    if engine.dtype not in dtypes:
        raise _refuse(
            f"{where}: got {method} with engine.dtype {engine.dtype}, with which vLLM refuses to load it; "
            f"expected {' or '.join(sorted(dtypes))}; set engine.dtype: bfloat16"
        )


def _refuse(message: str) -> PlanError:
    return PlanError(message, reason=PlanReason.UNSUPPORTED_MODEL)
