"""Compares norms with the patch `cpu_norm` to vLLM's own norms. `layers_probe` calls it."""

from typing import Any
from unittest import mock

import torch

from tests.integration.kernels.reverting import revert
from vllm_heteroinfer.kernels import norms
from vllm_heteroinfer.patches import cpu_norm

ULP = 2.0**-7
"""The largest step between neighbouring bf16 numbers, as a share of the number."""


def patched_norms() -> Any:
    """Returns the results of `compared` for norms that one call computes, and for other norms."""
    from vllm import ir
    from vllm.model_executor.layers.layernorm import RMSNorm

    import vllm_heteroinfer.platform.cpu_norms  # noqa: F401 - registers the operations that it stands for

    ir.set_default_torch_wrap(False)
    original = RMSNorm.forward_native
    torch.manual_seed(0)
    taken, left = {}, {}
    for op in (ir.ops.rms_norm, ir.ops.fused_add_rms_norm):
        op.set_default([norms.PROVIDER, "native"])
    for rows, width in ((1, 32), (7, 64), (16, 96), (33, 2048), (5, 4096)):
        taken[f"flat {rows} {width}"] = compared(drawn(rows, width))
        taken[f"added {rows} {width}"] = compared(drawn(rows, width), drawn(rows, width))
        wide = drawn(rows, 6 * width)
        taken[f"heads {rows} {width}"] = compared(wide[:, width : 5 * width].view(rows, 4, width))
        taken[f"heads apart {rows} {width}"] = compared(wide.view(rows, 3, 2 * width)[..., :width])
        taken[f"a view {rows} {width}"] = compared(wide[:, width : 2 * width])
    left["float32"] = compared(drawn(5, 64).float())
    left["added float32"] = compared(drawn(5, 64).float(), drawn(5, 64).float())
    left["no whole vectors"] = compared(drawn(5, 80))
    left["part of a row"] = compared(drawn(5, 64), var_hidden_size=32)
    left["no weight"] = compared(drawn(5, 64), has_weight=False)
    left["columns"] = compared(drawn(64, 64).t())
    left["added to a view"] = compared(drawn(5, 64), drawn(5, 128)[:, 64:])
    for op in (ir.ops.rms_norm, ir.ops.fused_add_rms_norm):
        op.set_default(["native"])
    left["chosen"] = compared(drawn(5, 64))
    left["chosen and added"] = compared(drawn(5, 64), drawn(5, 64))
    cpu_norm.install()
    cpu_norm.install()
    applied = RMSNorm.forward_native is not original
    revert("cpu_norm")
    return {
        "taken": taken,
        "left": left,
        "applied": applied,
        "reverted": RMSNorm.forward_native is original,
    }


def drawn(*shape: int) -> torch.Tensor:
    """Draws random bf16 numbers."""
    return torch.randn(*shape).bfloat16()


def compared(x: torch.Tensor, residual: torch.Tensor | None = None, **options: Any) -> list[float]:
    """Returns how many of our calls computed a norm, and the share and size of differences from vLLM's."""
    from vllm.model_executor.layers.layernorm import RMSNorm

    norm = RMSNorm(x.shape[-1], dtype=x.dtype, **options)
    if norm.has_weight:
        norm.weight.data = (torch.randn(x.shape[-1]) + 1).to(x.dtype)
    revert("cpu_norm")
    expected = outputs(norm, x, residual)
    cpu_norm.install()
    with (
        mock.patch.object(norms, "norm", wraps=norms.norm) as one,
        mock.patch.object(norms, "add_and_norm", wraps=norms.add_and_norm) as both,
    ):
        got = outputs(norm, x, residual)
    apart = (got.double() - expected.double()).abs()
    steps = apart / (expected.double().abs().clamp(min=1e-30) * ULP)
    return [one.call_count + both.call_count, float((apart > 0).double().mean()), float(steps.max())]


def outputs(norm: Any, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    """Returns a norm's outputs for copies of these inputs, and the sum with the residual if there is one."""
    with torch.inference_mode():
        if residual is None:
            return torch.as_tensor(norm.forward_native(x))
        first = x.clone()
        second = torch.empty_strided(residual.shape, residual.stride(), dtype=residual.dtype).copy_(residual)
        return torch.cat(norm.forward_native(first, second))
