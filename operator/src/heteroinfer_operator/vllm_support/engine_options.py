"""What `engine.args` choose of vLLM, as far as a plan counts with it. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from heteroinfer_contract.given_options import GivenOption, given_options

ELEMENT_BYTES: Final = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Of an element, by `--dtype` or `--kv-cache-dtype`."""
KV_CACHE_DTYPE: Final = "--kv-cache-dtype"
QUANTIZATION: Final = "--quantization"
MOE_BACKEND: Final = "--moe-backend"
STATE_DTYPE: Final = "--mamba-ssm-cache-dtype"
CONVOLUTION_DTYPE: Final = "--mamba-cache-dtype"
LOAD_FORMAT: Final = "--load-format"
KEEP_ALIVE: Final = "--sse-keep-alive-interval"
MODEL_IMPL: Final = "--model-impl"
OFFLOADED_GIB: Final = "--cpu-offload-gb"
OFFLOADED_LAYERS: Final = "--offload-group-size"
_TEXT_ONLY: Final = "--language-model-only"
_DEPRECATED: Final = "--allow-deprecated-quantization"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """What `engine.args` choose; each field has vLLM's own default.

    Attributes:
        kv_cache_dtype: type of the KV cache, `auto` for the model's own.
        quantization: how weights are quantized at load, or how the checkpoint is, "" without one.
        moe_backend: kernels of experts, `auto` for vLLM's choice.
        state_dtype: type of recurrent states, or None if vLLM chooses it by device.
        convolution_dtype: type of the convolutions' states, `auto` for the model's own.
        keep_alive: seconds after which a silent stream sends a comment, as given, or None.
        load_format: how weights are read, or None.
        model_impl: whose classes of models are used, or None.
        offloaded_gib: what vLLM offloads to the CPU, as given, or None.
        offloaded_layers: how vLLM groups layers that it offloads, as given, or None.
        is_text_only: whether the encoder of a multimodal model is left out.
        allows_deprecated: whether methods of quantization are taken that vLLM is about to drop.
    """

    kv_cache_dtype: str = "auto"
    quantization: str = ""
    moe_backend: str = "auto"
    state_dtype: str | None = None
    convolution_dtype: str = "auto"
    keep_alive: str | None = None
    load_format: str | None = None
    model_impl: str | None = None
    offloaded_gib: str | None = None
    offloaded_layers: str | None = None
    is_text_only: bool = False
    allows_deprecated: bool = False

    @staticmethod
    def of(args: Sequence[str]) -> "EngineOptions":
        """Reads arguments as vLLM's parser does; of an option that is given twice, the last one counts."""
        return _parse(tuple(args))

    def given(self, option: str) -> str | None:
        """The value of an option that feed-forward ranks check, or None if it is not given."""
        values = {
            LOAD_FORMAT: self.load_format,
            MODEL_IMPL: self.model_impl,
            OFFLOADED_GIB: self.offloaded_gib,
            OFFLOADED_LAYERS: self.offloaded_layers,
        }
        return values[option]


@lru_cache(maxsize=256)
def _parse(args: tuple[str, ...]) -> EngineOptions:
    given = given_options(args)
    return EngineOptions(
        kv_cache_dtype=_value(given, KV_CACHE_DTYPE) or "auto",
        quantization=_value(given, QUANTIZATION) or "",
        moe_backend=_value(given, MOE_BACKEND) or "auto",
        state_dtype=_value(given, STATE_DTYPE),
        convolution_dtype=_value(given, CONVOLUTION_DTYPE) or "auto",
        keep_alive=_value(given, KEEP_ALIVE),
        load_format=_value(given, LOAD_FORMAT),
        model_impl=_value(given, MODEL_IMPL),
        offloaded_gib=_value(given, OFFLOADED_GIB),
        offloaded_layers=_value(given, OFFLOADED_LAYERS),
        is_text_only=_is_set(given, _TEXT_ONLY),
        allows_deprecated=_is_set(given, _DEPRECATED),
    )


def _value(given: Sequence[GivenOption], option: str) -> str | None:
    return next((each.value for each in reversed(given) if each.may_be(option) and not each.path), None)


def _is_set(given: Sequence[GivenOption], flag: str) -> bool:
    """Whether a flag is given and no later argument takes it back."""
    negated = f"--no-{flag.removeprefix('--')}"
    last = next((each for each in reversed(given) if each.may_be(flag) or each.may_be(negated)), None)
    return last is not None and not last.is_taken_back
