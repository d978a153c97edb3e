"""The patch `cpu_linear`: our kernels compute bf16 linear layers of a CPU rank, instead of oneDNN.

Layers that our kernels cannot compute go to vLLM's original function. Imports vLLM.
It is enough to replace the attribute of the module, because callers import the function inside their own
functions (linear.py::UnquantizedLinearMethod, vocab_parallel_embedding.py::UnquantizedEmbeddingMethod).
Source: vllm/model_executor/layers/utils.py::dispatch_cpu_unquantized_gemm@v0.32.0.
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
    """Replaces vLLM's choice of a kernel for CPU linear layers in this process.

    Does nothing if HETEROINFER_CPU_LINEAR=onednn.
    """
    if is_wanted(os.environ):
        replace(CPU_LINEAR, partial(_with_our_layers, LinearLayers()))
    else:
        _logger.info("CPU linear layers: oneDNN, because %s=%s", names.ENV_CPU_LINEAR, ONEDNN)


def _with_our_layers(layers: LinearLayers, original: Dispatch) -> Dispatch:
    """Returns a dispatch() that packs a layer for our kernels, or calls `original` for unsupported layers."""

    def dispatch(layer: torch.nn.Module, remove_weight: bool) -> None:
        """Packs a layer, or lets vLLM choose its kernel."""
        if not layers.pack_layer(layer, remove_weight=remove_weight):
            original(layer, remove_weight)

    return dispatch
