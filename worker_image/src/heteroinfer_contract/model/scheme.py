"""Reads how a model's weights are quantized, and how its routers choose experts. Stdlib only; pure."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from heteroinfer_contract import codec


class SchemeName(StrEnum):
    """A format of weights that needs its own kernels."""

    NONE = "None"
    FP8_TENSOR = "FP8 per tensor"
    FP8_CHANNEL = "FP8 per channel"
    FP8_BLOCK = "FP8 in blocks"
    INT8 = "int8"
    AWQ = "AWQ"
    GPTQ = "GPTQ"
    INT4 = "int4"
    """compressed-tensors' packed integers, 4 or 8 bits."""
    MXFP4 = "MXFP4"
    MXFP8 = "MXFP8"
    NVFP4 = "NVFP4"
    BITSANDBYTES = "bitsandbytes"
    GGUF = "GGUF"
    OTHER = "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """The format of a model's quantized weights.

    Attributes:
        group: number of weights that share a scale; 0 if a whole channel or tensor shares a scale.
        zeros: whether each group of compressed-tensors' packed integers stores a zero point.
    """

    name: SchemeName = SchemeName.NONE
    bits: int = 16
    group: int = 0
    zeros: bool = False

    def __str__(self) -> str:
        """Describes the format for messages."""
        group = (
            f", groups of {self.group} weights"
            if self.group and self.name is not SchemeName.FP8_BLOCK
            else ""
        )
        bits = f"{self.bits}-bit " if self.name in (SchemeName.AWQ, SchemeName.GPTQ) else ""
        return f"{bits}{self.name}{group}"

    def check(self) -> None:
        """Checks that no number is negative; raises ContractError that names it."""
        codec.at_least(0, "Scheme", bits=self.bits, group=self.group)


class Routing(StrEnum):
    """The rule by which a router chooses experts and their weights from its logits.

    Source: vllm/model_executor/layers/fused_moe/config.py::RoutingMethodType@v0.32.0.
    """

    NONE = "None"
    SOFTMAX = "Default"
    TOP_K_SOFTMAX = "Renormalize"
    SOFTMAX_NORMALIZED = "RenormalizeNaive"
    SIGMOID = "Sigmoid"
    SIGMOID_NORMALIZED = "SigmoidRenorm"
    DEEPSEEK_V3 = "DeepSeekV3"
    LLAMA4 = "Llama4"
    MINIMAX = "MiniMax2"
    UNKNOWN = "Unspecified"


def read_scheme(config: Mapping[str, Any], text: Mapping[str, Any]) -> Scheme:
    """Returns the format that a config.json names.

    Args:
        config: config of the whole model.
        text: config of its language model.
    """
    quantization = find_quantization(config, text)
    if quantization is None:
        return Scheme()
    method = _method_name(quantization).lower().replace("_", "-")
    read = _READERS.get(method)
    return Scheme(name=SchemeName.OTHER, bits=0) if read is None else read(quantization)


def read_method(config: Mapping[str, Any], text: Mapping[str, Any]) -> str:
    """Returns vLLM's name of the method in a config.json; "" if the weights are not quantized."""
    quantization = find_quantization(config, text)
    return "" if quantization is None else _method_name(quantization)


def find_quantization(config: Mapping[str, Any], text: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Returns the part of a config.json that describes the quantization; None if the weights have none."""
    for source in (config, text):
        for key in ("quantization_config", "compression_config"):
            quantization = source.get(key)
            if isinstance(quantization, Mapping):
                return quantization
    return None


def _method_name(quantization: Mapping[str, Any]) -> str:
    """Returns the method of quantization; ModelOpt's own files name only an algorithm.

    Source: vllm/transformers_utils/model_arch_config_convertor.py::_normalize_quantization_config@v0.32.0.
    """
    producer, inner = quantization.get("producer"), quantization.get("quantization")
    by_modelopt = isinstance(producer, Mapping) and producer.get("name") == "modelopt"
    if by_modelopt and isinstance(inner, Mapping) and (algorithm := inner.get("quant_algo")):
        return _MODELOPT_METHODS.get(str(algorithm).upper(), f"modelopt {algorithm}")
    return str(quantization.get("quant_method") or "")


def _read_fp8(quantization: Mapping[str, Any]) -> Scheme:
    """Returns the format of `quant_method: fp8`."""
    block = quantization.get("weight_block_size")
    if block:
        return Scheme(name=SchemeName.FP8_BLOCK, bits=8, group=int(block[-1]))
    return Scheme(name=SchemeName.FP8_TENSOR, bits=8)


def _grouped_reader(name: SchemeName) -> Callable[[Mapping[str, Any]], Scheme]:
    """Returns a reader for a format whose weights share a scale in groups."""

    def read(quantization: Mapping[str, Any]) -> Scheme:
        group = int(quantization.get("group_size", quantization.get("q_group_size", 128)))
        bits = int(quantization.get("bits", quantization.get("w_bit", 4)))
        return Scheme(name=name, bits=bits, group=max(group, 0))  # -1: a whole channel shares a scale

    return read


def _read_compressed_tensors(quantization: Mapping[str, Any]) -> Scheme:
    """Returns the format of the first group in a config of compressed-tensors."""
    groups = quantization.get("config_groups")
    first = next(iter(groups.values()), None) if isinstance(groups, Mapping) else None
    weights = first.get("weights") if isinstance(first, Mapping) else None
    if first is None or not isinstance(weights, Mapping):
        return Scheme(name=SchemeName.OTHER, bits=0)
    bits, group = int(weights.get("num_bits", 0)), max(int(weights.get("group_size") or 0), 0)
    match weights.get("type"), bits, weights.get("strategy"):
        case "float", 8, "block":
            group = int(weights["block_structure"][-1])
            return Scheme(name=SchemeName.FP8_BLOCK, bits=8, group=group)
        case "float", 8, "group":  # no other format has 8-bit floats in groups
            return _MXFP8
        case "float", 8, strategy:
            name = SchemeName.FP8_TENSOR if strategy == "tensor" else SchemeName.FP8_CHANNEL
        case "float", 4, _:  # groups have 16 weights in NVFP4, and 32 in MXFP4
            return Scheme(name=SchemeName.NVFP4 if group == 16 else SchemeName.MXFP4, bits=4, group=group)
        case "int", 8, _ if isinstance(first.get("input_activations"), Mapping):  # int8 activations, too
            name = SchemeName.INT8
        case "int", _, _:
            zeros = not weights.get("symmetric", True)
            return Scheme(name=SchemeName.INT4, bits=bits, group=group, zeros=zeros)
        case _:
            name = SchemeName.OTHER
    return Scheme(name=name, bits=bits)


def _read_modelopt(quantization: Mapping[str, Any]) -> Scheme:
    """Returns the format that a config of ModelOpt names by its algorithm."""
    inner = quantization.get("quantization")
    algorithm = str((inner if isinstance(inner, Mapping) else quantization).get("quant_algo", "")).upper()
    if "NVFP4" in algorithm:
        return Scheme(name=SchemeName.NVFP4, bits=4, group=16)
    if "MXFP8" in algorithm:
        return _MXFP8
    if "PB_WO" in algorithm:  # per block, weights only
        return Scheme(name=SchemeName.FP8_BLOCK, bits=8, group=128)
    if "PER_CHANNEL" in algorithm:
        return Scheme(name=SchemeName.FP8_CHANNEL, bits=8)
    return Scheme(name=SchemeName.FP8_TENSOR if algorithm == "FP8" else SchemeName.OTHER, bits=8)


_MXFP8: Final = Scheme(name=SchemeName.MXFP8, bits=8, group=32)
_MODELOPT_METHODS: Final[Mapping[str, str]] = {
    "FP8": "modelopt",
    "FP8_PB_WO": "modelopt",
    "FP8_PER_CHANNEL_PER_TOKEN": "modelopt",
    "NVFP4": "modelopt_fp4",
}
"""ModelOpt's algorithm -> vLLM's method. vLLM refuses other algorithms in files without a method."""
_READERS: Final[Mapping[str, Callable[[Mapping[str, Any]], Scheme]]] = {
    "": _read_compressed_tensors,
    "awq": _grouped_reader(SchemeName.AWQ),
    "bitsandbytes": lambda _: Scheme(name=SchemeName.BITSANDBYTES, bits=4),
    "compressed-tensors": _read_compressed_tensors,
    "fbgemm-fp8": lambda _: Scheme(name=SchemeName.FP8_CHANNEL, bits=8),
    "fp8": _read_fp8,
    "gguf": lambda _: Scheme(name=SchemeName.GGUF, bits=0),
    "gptq": _grouped_reader(SchemeName.GPTQ),
    "modelopt": _read_modelopt,
    "modelopt-fp4": _read_modelopt,
    "modelopt-mxfp8": lambda _: _MXFP8,
    "mxfp4": lambda _: Scheme(name=SchemeName.MXFP4, bits=4, group=32),
    "mxfp8": lambda _: _MXFP8,
}
"""`quant_method` of config.json -> function that reads the format. Files without a method are of
compressed-tensors."""
_LIMIT_KEYS: Final = ("swiglu_limits", "expert_swiglu_limit_list")
_SCORING_KEYS: Final = ("scoring_func", "score_function", "score_func", "moe_router_activation")
_SIGMOID_WITH_BIAS: Final = (
    "BailingMoeV3",
    "ExaoneMo",
    "Glm4Moe",
    "HYV3",
    "Laguna",
    "Lfm2Moe",
    "MiMoV2",
    "MiniMaxM2",
    "NemotronH",
    "Pangu",
)
"""Architectures with sigmoid scores and a bias, which their config.json does not contain."""
_SIGMOID_WITH_BIAS_UNLESS_NAMED: Final = ("AXK1", "Afmoe", "Param2MoE", "Sarvam", "Step3p5")
"""Architectures with a bias, and with sigmoid scores unless config.json names another function."""
_SOFTMAX_WITH_BIAS: Final = ("Ernie4_5_", "LongcatFlash")
"""Architectures with softmax scores and a bias, which their config.json does not contain."""
_ONE_GROUP: Final = ("HYV3", "Lfm2Moe", "Pangu")
"""Architectures whose experts vLLM treats as one group."""


def has_limited_experts(text: Mapping[str, Any]) -> bool:
    """Reports whether a config clamps the outputs of the experts' gate and up projections in some layers.

    GPT-OSS's single `swiglu_limit` does not count, because the activation applies it to all layers. Source:
    vllm/model_executor/models/exaone_moe.py, step3p5.py, bailing_moe_v3.py@v0.32.0.
    """
    values = (text.get(key) for key in _LIMIT_KEYS)
    limits = [limit for limits in values if isinstance(limits, list) for limit in limits]
    return any(isinstance(limit, int | float) and limit > 0 for limit in limits)


def read_routing(architecture: str, text: Mapping[str, Any]) -> Routing:
    """Returns the rule of a mixture's routers.

    Source: vllm/model_executor/layers/fused_moe/config.py::get_routing_method_type@v0.32.0, and the
    arguments that each architecture passes to it.
    """
    if architecture.startswith("Llama4"):
        return Routing.LLAMA4
    if architecture.startswith("GptOss"):
        return Routing.TOP_K_SOFTMAX
    named = next((str(text[key]) for key in _SCORING_KEYS if text.get(key)), "")
    scoring = named or "softmax"
    has_bias = text.get("topk_method") == "noaux_tc" or bool(text.get("moe_router_enable_expert_bias"))
    if architecture.startswith(_SIGMOID_WITH_BIAS):
        scoring, has_bias = "sigmoid", True
    elif architecture.startswith(_SIGMOID_WITH_BIAS_UNLESS_NAMED):
        scoring, has_bias = named or "sigmoid", True
    has_bias = has_bias or architecture.startswith(_SOFTMAX_WITH_BIAS)
    groups = 1 if architecture.startswith(_ONE_GROUP) else text.get("n_group") or 0
    # Without the field, only DeepSeek's models do not normalize the weights.
    normalized = bool(text.get("norm_topk_prob", not architecture.startswith("Deepseek")))
    match scoring, has_bias, normalized:
        case "sigmoid", True, True:
            return Routing.DEEPSEEK_V3 if groups > 0 else Routing.MINIMAX
        case "sigmoid", False, _:
            return Routing.SIGMOID_NORMALIZED if normalized else Routing.SIGMOID
        case "softmax", False, _:
            return Routing.SOFTMAX_NORMALIZED if normalized else Routing.SOFTMAX
    return Routing.UNKNOWN  # vLLM has no name for other combinations


def limits_all_experts(text: Mapping[str, Any]) -> bool:
    """Reports whether a config has one limit for the gates and ups of all experts (DeepSeek-V4).

    GPT-OSS's `swiglu_limit` belongs to its activation. Source: vllm/models/deepseek_v4@v0.32.0.
    """
    return str(text.get("model_type")).startswith("deepseek_v4") and bool(text.get("swiglu_limit"))
