"""The patch `cpu_linear`: bf16 layers of a CPU rank are handed to our kernels instead of oneDNN.

Everything that the kernels don't take goes on to the function that was replaced. Imports vLLM.
Source: vllm/model_executor/layers/utils.py::dispatch_cpu_unquantized_gemm@v0.32.0. Its callers
import it by name inside their own functions (linear.py::UnquantizedLinearMethod,
vocab_parallel_embedding.py::UnquantizedEmbeddingMethod), so the module's name is the only binding.
"""

import logging
import os
from collections.abc import Callable
from functools import partial

import torch

from heteroinfer_contract import names
from vllm_heteroinfer.kernels.linear_layers import ONEDNN, LinearLayers, is_wanted
from vllm_heteroinfer.patches.registry import CPU_LINEAR
from vllm_heteroinfer.patches.replacing import replace

_logger = logging.getLogger(__name__)

Dispatch = Callable[[torch.nn.Module, bool], None]


def install() -> None:
    """Hands this process's CPU linear layers to our kernels from now on, unless the user chose oneDNN."""
    if is_wanted(os.environ):
        replace(CPU_LINEAR, partial(_dispatching, LinearLayers()))
    else:
        _logger.info("CPU linear layers: oneDNN, as %s=%s says", names.ENV_CPU_LINEAR, ONEDNN)


def _dispatching(layers: LinearLayers, original: Dispatch) -> Dispatch:
    def dispatch(layer: torch.nn.Module, remove_weight: bool) -> None:
        if not layers.take(layer, remove_weight=remove_weight):
            original(layer, remove_weight)

    return dispatch
