"""The patch `cpu_linear`: bf16 layers of a CPU rank are handed to our kernels instead of oneDNN.

Everything that the kernels don't take goes on to the function that was replaced. Imports vLLM.
Source: vllm/model_executor/layers/utils.py::dispatch_cpu_unquantized_gemm@v0.32.0. Its callers
import it by name inside their own functions (linear.py::UnquantizedLinearMethod,
vocab_parallel_embedding.py::UnquantizedEmbeddingMethod), so the module's name is the only binding.
"""

import logging
import os
from collections.abc import Callable

import torch

from heteroinfer_contract import names
from vllm_heteroinfer.kernels.linear_layers import ONEDNN, LinearLayers, is_wanted
from vllm_heteroinfer.patches.registry import CPU_LINEAR
from vllm_heteroinfer.patches.replacing import replace, restore

_logger = logging.getLogger(__name__)

Dispatch = Callable[[torch.nn.Module, bool], None]


def install() -> None:
    """Hands this process's CPU linear layers to our kernels from now on, unless the user chose oneDNN.

    To be called in a CPU rank before it loads its model; twice is a no-op.

    Raises:
        ContractError: the setting is neither `auto` nor `onednn`.
        PatchError: this vLLM is another one than the patch was written for.
    """
    if is_wanted(os.environ):
        apply(LinearLayers())
    else:
        _logger.info("CPU linear layers: oneDNN, as %s=%s says", names.ENV_CPU_LINEAR, ONEDNN)


def apply(layers: LinearLayers) -> None:
    """Lets `layers` take what it can of the layers that vLLM hands over from now on; twice is a no-op.

    Raises:
        PatchError: this vLLM's function is missing, or another one.
    """

    def build(original: Dispatch) -> Dispatch:
        def dispatch(layer: torch.nn.Module, remove_weight: bool) -> None:
            if not layers.take(layer, remove_weight=remove_weight):
                original(layer, remove_weight)

        return dispatch

    replace(CPU_LINEAR, build)


def revert() -> None:
    """Puts vLLM's own function back; a no-op where the patch is not applied."""
    restore(CPU_LINEAR)
