"""The patch `cpu_linear`: bf16 layers of a CPU rank are handed to our kernels instead of oneDNN.

Everything that the kernels don't take goes on to the function that was replaced. Imports vLLM.
Source: vllm/model_executor/layers/utils.py::dispatch_cpu_unquantized_gemm@v0.32.0. Its callers
import it by name inside their own functions (linear.py::UnquantizedLinearMethod,
vocab_parallel_embedding.py::UnquantizedEmbeddingMethod), so the module's name is the only binding.
"""

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch

from vllm_heteroinfer.kernels.layers import LinearLayers
from vllm_heteroinfer.patches.registry import CPU_LINEAR, build_refusal

Dispatch = Callable[[torch.nn.Module, bool], None]

_ORIGINAL = "heteroinfer_original"


def apply(layers: LinearLayers) -> None:
    """Lets `layers` take what it can of the layers that vLLM hands over from now on; twice is a no-op.

    Raises:
        PatchError: this vLLM's function is missing, or another one.
    """
    module_name, name = CPU_LINEAR.target.split(":")
    module = importlib.import_module(module_name)
    original: Any = getattr(module, name, None)
    if hasattr(original, _ORIGINAL):
        return
    check(original)
    setattr(module, name, _wrap(original, layers))


def revert() -> None:
    """Puts vLLM's own function back; a no-op where the patch is not applied."""
    module_name, name = CPU_LINEAR.target.split(":")
    module = importlib.import_module(module_name)
    original = getattr(getattr(module, name), _ORIGINAL, None)
    if original is not None:
        setattr(module, name, original)


def check(target: Any) -> None:
    """Raises PatchError unless `target` is the function that the patch was written for."""
    if not callable(target):
        raise build_refusal(CPU_LINEAR, "nothing" if target is None else repr(target), _version())
    found = tuple(inspect.signature(target).parameters)
    if found != CPU_LINEAR.parameters:
        raise build_refusal(CPU_LINEAR, f"parameters ({', '.join(found)})", _version())


def _wrap(original: Dispatch, layers: LinearLayers) -> Dispatch:
    @functools.wraps(original)
    def dispatch(layer: torch.nn.Module, remove_weight: bool) -> None:
        if not layers.take(layer, remove_weight=remove_weight):
            original(layer, remove_weight)

    setattr(dispatch, _ORIGINAL, original)
    return dispatch


def _version() -> str:
    import vllm

    return str(vllm.__version__)
