"""What `engine.args` choose of vLLM, as far as a plan counts with it: parsed once. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Final

ELEMENT_BYTES: Final = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Of an element, by `--dtype` or `--kv-cache-dtype`."""
KV_CACHE_DTYPE: Final = "--kv-cache-dtype"
QUANTIZATION: Final = "--quantization"
MOE_BACKEND: Final = "--moe-backend"
STATE_DTYPE: Final = "--mamba-ssm-cache-dtype"
LOAD_FORMAT: Final = "--load-format"
MODEL_IMPL: Final = "--model-impl"
OFFLOADED_GIB: Final = "--cpu-offload-gb"
OFFLOADED_LAYERS: Final = "--offload-group-size"
_SHORT: Final[Mapping[str, str]] = MappingProxyType({QUANTIZATION: "-q"})
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
    load_format: str | None = None
    model_impl: str | None = None
    offloaded_gib: str | None = None
    offloaded_layers: str | None = None
    is_text_only: bool = False
    allows_deprecated: bool = False

    @staticmethod
    def of(args: Sequence[str]) -> "EngineOptions":
        """Returns what arguments choose; of an option that is given twice, the last one.

        Args:
            args: as given to vLLM, in any spelling that its parser takes: `--opt value`, `--opt=value`,
                underscores or hyphens, a prefix such as `--quant`, and `-q value`, `-q=value` or `-qvalue`.
        """
        return _parse(tuple(args))

    def given(self, option: str) -> str | None:
        """Returns the value of an option that feed-forward ranks check, or None if it is not given."""
        values = {
            LOAD_FORMAT: self.load_format,
            MODEL_IMPL: self.model_impl,
            OFFLOADED_GIB: self.offloaded_gib,
            OFFLOADED_LAYERS: self.offloaded_layers,
        }
        return values[option]


@lru_cache(maxsize=256)
def _parse(args: tuple[str, ...]) -> EngineOptions:
    return EngineOptions(
        kv_cache_dtype=_value(args, KV_CACHE_DTYPE) or "auto",
        quantization=_value(args, QUANTIZATION) or "",
        moe_backend=_value(args, MOE_BACKEND) or "auto",
        state_dtype=_value(args, STATE_DTYPE),
        load_format=_value(args, LOAD_FORMAT),
        model_impl=_value(args, MODEL_IMPL),
        offloaded_gib=_value(args, OFFLOADED_GIB),
        offloaded_layers=_value(args, OFFLOADED_LAYERS),
        is_text_only=_has_flag(args, _TEXT_ONLY),
        allows_deprecated=_has_flag(args, _DEPRECATED),
    )


def _value(args: Sequence[str], option: str) -> str | None:
    found, short = None, _SHORT.get(option)
    for index, arg in enumerate(args):
        name, has_value, value = arg.partition("=")
        following = next(iter(args[index + 1 : index + 2]), "")
        if _means(name, option) or name == short:
            found = value if has_value else following
        elif short is not None and arg.startswith(short):
            found = arg[len(short) :]
    return found


def _has_flag(args: Sequence[str], flag: str) -> bool:
    """Returns whether a flag is given and no later argument takes it back."""
    negated = f"--no-{flag.removeprefix('--')}"
    given = False
    for arg in args:
        if _means(arg, flag):
            given = True
        elif _means(arg, negated) and len(arg) > len("--no-"):
            given = False
    return given


def _means(name: str, option: str) -> bool:
    """Returns whether vLLM's parser takes a name for an option: argparse accepts prefixes.

    Source: vllm/utils/argparse_utils.py::FlexibleArgumentParser@v0.32.0. It refuses an ambiguous prefix.
    """
    return name.startswith("--") and len(name) > len("--") and option.startswith(name.replace("_", "-"))
