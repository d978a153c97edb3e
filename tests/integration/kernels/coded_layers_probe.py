"""Computes vLLM's quantized linear layers with our kernels. Has the argument of `probe`.

The layers are built and loaded as vLLM does for a checkpoint's configuration, with random weights. The layers
q, k and v are joined, and each has its own scale.
"""

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.model_executor.layers.quantization import get_quantization_config
from vllm.utils.torch_utils import set_default_torch_dtype

from tests.integration.kernels import checkpoint_layers
from tests.integration.kernels.answering import serve
from tests.integration.kernels.reverting import revert
from vllm_heteroinfer.kernels import coded
from vllm_heteroinfer.kernels.weight_bytes import weight_bytes
from vllm_heteroinfer.patches import cpu_coded

LIBRARY = Path(sys.argv[1]) if len(sys.argv) > 1 else None
INPUTS, WIDTHS = 384, (256, 128, 128)
COLUMNS = sum(WIDTHS)
TYPES = {"bf16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def _compressed(weights: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the configuration of a format of compressed-tensors in 8-bit floats."""
    eight = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**eight, **weights, "dynamic": False},
        "input_activations": {**eight, **inputs},
    }
    return {"format": "float-quantized", "ignore": [], "config_groups": {"group_0": group}}


FORMATS: Final[Mapping[str, tuple[str, dict[str, Any]]]] = {
    "fp8 tensor": ("fp8", {"activation_scheme": "dynamic"}),
    "fp8 tensor, static inputs": ("fp8", {"activation_scheme": "static"}),
    "fp8 tensor, compressed": (
        "compressed-tensors",
        _compressed({"strategy": "tensor"}, {"strategy": "tensor", "dynamic": False}),
    ),
    "fp8 tensor of modelopt": ("modelopt", {"quant_algo": "FP8", "ignore": []}),
    "fp8 channel": (
        "compressed-tensors",
        _compressed({"strategy": "channel"}, {"strategy": "token", "dynamic": True}),
    ),
    "fp8 block, compressed": (
        "compressed-tensors",
        _compressed(
            {"strategy": "block", "block_structure": [128, 128]},
            {"strategy": "group", "group_size": 128, "dynamic": True},
        ),
    ),
    "fp8 block": ("fp8", {"activation_scheme": "dynamic", "weight_block_size": [128, 128]}),
}


class _Model:
    """The fields of the model's configuration that a quantized layer reads."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype


def gaps(question: dict[str, Any]) -> Any:
    """Returns for a format: the error as a share of the largest output, the kernel, and the bytes."""
    coded.register(LIBRARY)
    method_name, config = {**FORMATS, **checkpoint_layers.FORMATS}[question["format"]]
    # Imports vLLM's methods, like a rank's configuration before the patch is applied.
    kind = get_quantization_config(method_name)
    cpu_coded.install()
    found = {}
    for name, dtype in TYPES.items():
        settings = VllmConfig()
        settings.model_config = _Model(dtype)
        with set_default_torch_dtype(dtype), set_current_vllm_config(settings, check_compile=False):
            quantization = kind.from_config(
                {**config, **({"quant_method": "fp8", "fmt": "e4m3"} if method_name == "fp8" else {})}
            )
            if dtype not in quantization.get_supported_act_dtypes():
                continue  # vLLM refuses such models
            found[name] = _product(quantization, dtype, question["format"])
    revert("cpu_coded")
    return found


def _product(quantization: Any, dtype: torch.dtype, name: str) -> Any:
    """Computes a layer's product. Returns its error, its kernel, and its bytes after packing."""
    from vllm.model_executor.layers.linear import LinearBase

    layer = LinearBase.__new__(LinearBase)
    torch.nn.Module.__init__(layer)
    layer.quant_method = method = quantization.get_quant_method(layer, "model.layers.0.self_attn.qkv_proj")
    method.create_weights(layer, INPUTS, list(WIDTHS), INPUTS, COLUMNS, dtype, weight_loader=lambda *_: None)
    draw = torch.Generator().manual_seed(0)
    if name in checkpoint_layers.FORMATS:
        checkpoint_layers.fill(layer, draw)
        dense = checkpoint_layers.dense(layer, name, WIDTHS)
    else:
        dense = _fill_fp8(layer, draw)
    before = weight_bytes(layer)
    method.process_weights_after_loading(layer)
    x = torch.randn(5, INPUTS, generator=draw).to(dtype)
    bias = torch.randn(COLUMNS, generator=draw).to(dtype)
    y, exact = method.apply(layer, x, bias).double(), x.double() @ dense.T + bias.double()
    return {
        "gap": float((y - exact).abs().max() / exact.abs().max()),
        "bytes": weight_bytes(layer) / before,
        "kernel": _kernel_name(method, layer),
    }


def _kernel_name(method: Any, layer: Any) -> str:
    owners = (method, getattr(layer, "scheme", None))
    names = ("fp8_linear", "kernel")
    kernels = (getattr(owner, name, None) for owner in owners for name in names)
    return next(type(kernel).__name__ for kernel in kernels if kernel is not None)


def _fill_fp8(layer: Any, draw: torch.Generator) -> torch.Tensor:
    codes = torch.randint(0, 127, layer.weight.shape, generator=draw, dtype=torch.uint8)
    codes += 128 * torch.randint(0, 2, codes.shape, generator=draw, dtype=torch.uint8)
    layer.weight.data.copy_(codes.view(torch.float8_e4m3fn))
    name = "weight_scale_inv" if hasattr(layer, "weight_scale_inv") else "weight_scale"
    scale = getattr(layer, name).data
    scale.copy_(torch.rand(scale.shape, generator=draw) / 100 + 0.001)
    if getattr(layer, "input_scale", None) is not None:
        layer.input_scale.data.fill_(0.01)
    return layer.weight.data.double() * _spread(scale.double())


def _spread(scale: torch.Tensor) -> torch.Tensor:
    if scale.ndim == 1:  # of q, k and v
        return scale.repeat_interleave(torch.tensor(WIDTHS)).view(-1, 1)
    if scale.shape[1] == 1:
        return scale
    return scale.repeat_interleave(128, 0).repeat_interleave(128, 1)


def join(folder: str) -> None:
    """Makes this process a rank of its own."""
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{folder}/store", 0, "gloo")
        initialize_model_parallel(1)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        join(scratch)
        serve({f.__name__: f for f in (gaps,)})
