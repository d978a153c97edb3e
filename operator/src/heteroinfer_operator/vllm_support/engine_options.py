"""Options in `engine.args` that affect a plan. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from heteroinfer_contract.given_options import GivenOption, given_options

ELEMENT_BYTES: Final = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes of an element, by the value of `--dtype` or `--kv-cache-dtype`."""
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
    """Values of options in `engine.args`; the default of each field is vLLM's default.

    Attributes:
        kv_cache_dtype: type of the KV cache; `auto` for the model's type.
        quantization: method of quantization at load, or of the checkpoint; "" if not set.
        moe_backend: kernels of experts; `auto` for vLLM's choice.
        state_dtype: type of recurrent states; None if vLLM chooses the type by device.
        convolution_dtype: type of the convolutions' states; `auto` for the model's type.
        keep_alive: seconds without output after which a stream sends a comment, unparsed; None if not set.
        load_format: format in which vLLM reads weights; None if not set.
        model_impl: library whose model classes vLLM uses; None if not set.
        offloaded_gib: GiB that vLLM offloads to the CPU, unparsed; None if not set.
        offloaded_layers: size of the groups of layers that vLLM offloads, unparsed; None if not set.
        is_text_only: whether vLLM omits the encoder of a multimodal model.
        allows_deprecated: whether vLLM accepts methods of quantization that vLLM will remove soon.
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
        """Parses arguments like vLLM's parser. If an option occurs several times, the last value counts."""
        return _parse(tuple(args))

    def value_of(self, option: str) -> str | None:
        """Returns the value of one of the options that feed-forward ranks check; None if it is not set."""
        values = {
            LOAD_FORMAT: self.load_format,
            MODEL_IMPL: self.model_impl,
            OFFLOADED_GIB: self.offloaded_gib,
            OFFLOADED_LAYERS: self.offloaded_layers,
        }
        return values[option]


@lru_cache(maxsize=256)
def _parse(args: tuple[str, ...]) -> EngineOptions:
    """Parses arguments. Caches the result, because one plan needs the options many times."""
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
    """Returns the last value of an option; None if it is not set or sets only an entry of a dictionary."""
    return next((each.value for each in reversed(given) if each.may_mean(option) and not each.path), None)


def _is_set(given: Sequence[GivenOption], flag: str) -> bool:
    """Reports whether a flag is set and no later argument negates it."""
    negated = f"--no-{flag.removeprefix('--')}"
    last = next((each for each in reversed(given) if each.may_mean(flag) or each.may_mean(negated)), None)
    return last is not None and not last.is_negated
