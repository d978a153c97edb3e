"""Prints which CPU kernels vLLM chooses for each format, as JSON.

.venv-worker/bin/python -m tests.shapes.kernels

The output has the routing methods that kernels for experts accept, the types of activations for which linear
layers have a kernel, and the types for latent attention, each with and without AMX. It also has the functions
of vLLM's CPU libraries that vLLM's choice of kernels does not check. A value is null if the kernel needs AMX
or AVX-512 and this CPU lacks it.
"""

import json
import mmap
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

_CLASSES = {
    "FP8 in blocks": "CPUExpertsFp8",
    "MXFP4": "CPUExpertsMxfp4",
    "int4": "CPUExpertsInt4",
    "int8": "CPUExpertsInt8",
}
"""For each format, the class in vllm/model_executor/layers/fused_moe/experts/cpu_moe.py."""
DTYPES = ("bfloat16", "float16", "float32")
_SIZE = (4096, 4096)
_GROUP = 128


@contextmanager
def cpu_with(*, amx: bool) -> Iterator[None]:
    """Makes vLLM see a CPU with or without AMX. Its kernels are only queried, not run."""
    import torch
    from vllm import _custom_ops as ops

    kept = torch.cpu._is_amx_tile_supported, ops._supports_cpu_fp8_w8a16
    torch.cpu._is_amx_tile_supported = lambda: amx
    ops._supports_cpu_fp8_w8a16 = amx or kept[1]  # it is in the library that CPUs with AMX load
    try:
        yield
    finally:
        torch.cpu._is_amx_tile_supported, ops._supports_cpu_fp8_w8a16 = kept


def routing_methods() -> dict[str, list[str]]:
    """Returns the routing methods that each kernel for experts supports, by format."""
    from vllm.model_executor.layers.fused_moe.config import RoutingMethodType
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    return {
        scheme: sorted(
            {
                method.name
                for method in RoutingMethodType
                if getattr(cpu_moe, name)._supports_routing_method(method, None, None)
            }
        )
        for scheme, name in _CLASSES.items()
    }


def activations() -> dict[str, list[str]]:
    """Returns the activations that each kernel for experts supports, by format; "None" for plain weights."""
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    return {
        scheme: sorted(
            each.value for each in MoEActivation if getattr(cpu_moe, name)._supports_activation(each)
        )
        for scheme, name in {"None": "CPUUnquantizedExperts", **_CLASSES}.items()
    }


def routers() -> dict[str, dict[str, Any]]:
    """Returns how vLLM's present router for CPUs handles scores of each kind.

    The result has vLLM's methods by whether weights are normalized, whether the router computes them, and
    whether it respects a bias that corrects the choice.
    """
    found = {}
    for scoring, grouped, biased in product(("softmax", "sigmoid"), (False, True), (False, True)):
        routed = [_route(scoring, grouped, biased, normalized=each) for each in (False, True)]
        kind = " ".join([scoring, *["grouped"] * grouped, *["biased"] * biased])
        found[kind] = {
            "methods": sorted({name for name, _ in routed}),
            "computes": all(chosen is not None for _, chosen in routed),
            "heeds": all(_FAVOURED in (chosen or ()) for _, chosen in routed),
        }
    return found


_EXPERTS, _FAVOURED = 8, 5


def _route(scoring: str, grouped: bool, biased: bool, *, normalized: bool) -> tuple[str, list[int] | None]:
    """Returns the method and the chosen experts.

    With a bias, expert _FAVOURED should be the best. The experts are None if the router refuses the method.
    """
    import torch
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

    correction = torch.zeros(_EXPERTS)
    correction[_FAVOURED] = 100.0
    router = CPURouter(
        top_k=2,
        global_num_experts=_EXPERTS,
        use_grouped_topk=grouped,
        num_expert_group=2 if grouped else None,
        topk_group=1 if grouped else None,
        renormalize=normalized,
        scoring_func=scoring,
        e_score_correction_bias=correction if biased else None,
    )
    logits = torch.arange(_EXPERTS, 0, -1, dtype=torch.float32).view(1, -1)
    try:
        _, chosen = router._compute_routing(torch.zeros(1, 4), logits, None)
    except AssertionError:
        return router.routing_method_type.name, None
    return router.routing_method_type.name, chosen.flatten().tolist()


def experts_run() -> dict[str, bool]:
    """Returns whether this CPU has the kernel for experts, by format; "None" for bf16 without AMX."""
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    classes = {"None": "CPUUnquantizedExperts", **_CLASSES}
    return {scheme: getattr(cpu_moe, name)._supports_current_device() for scheme, name in classes.items()}


def linear_kernels() -> dict[str, dict[str, str]]:
    """Returns the kernel that vLLM chooses on this CPU, by format with its bits, and type; "" for none."""
    import torch

    return {
        name: {dtype: _chosen(choose, getattr(torch, dtype)) for dtype in DTYPES}
        for name, choose in _choosers().items()
    }


def _chosen(choose: Callable[[Any], Any], dtype: Any) -> str:
    try:
        return str(choose(dtype).__name__)
    except ValueError:  # no kernel supports it, and vLLM reports each kernel's reason
        return ""


def _choosers() -> dict[str, Callable[[Any], Any]]:
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import MPLinearLayerConfig
    from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import (
        FP8ScaledMMLinearLayerConfig,
        Int8ScaledMMLinearLayerConfig,
    )
    from vllm.model_executor.layers.quantization.utils import quant_utils as keys
    from vllm.scalar_type import scalar_types

    def fp8(weights: Any, activations: Any, *, blocks: bool = False) -> Callable[[Any], Any]:
        kernels = linear._POSSIBLE_FP8_BLOCK_KERNELS if blocks else linear._POSSIBLE_FP8_KERNELS
        return lambda dtype: linear.choose_scaled_mm_linear_kernel(
            FP8ScaledMMLinearLayerConfig(
                weight_quant_key=weights,
                activation_quant_key=activations,
                weight_shape=_SIZE,
                input_dtype=dtype,
                out_dtype=dtype,
            ),
            kernels,
            quantization="fp8_block_w8a8" if blocks else "fp8_w8a8",
        )

    def packed(weights: Any, *, zero_points: bool = False) -> Callable[[Any], Any]:
        return lambda dtype: linear.choose_mp_linear_kernel(
            MPLinearLayerConfig(_SIZE, _SIZE, weights, dtype, _GROUP, zero_points)
        )

    int8 = Int8ScaledMMLinearLayerConfig(
        is_channelwise=True, is_static_input_scheme=False, input_symmetric=True
    )
    return {
        "AWQ 4": packed(scalar_types.uint4, zero_points=True),
        "GPTQ 4": packed(scalar_types.uint4b8),
        "GPTQ 8": packed(scalar_types.uint8b128),
        "int4 4": packed(scalar_types.uint4b8),
        "int4 8": packed(scalar_types.uint8b128),
        "int8 8": lambda _: linear.choose_scaled_mm_linear_kernel(
            int8, linear._POSSIBLE_INT8_KERNELS, quantization="int8_w8a8"
        ),
        "FP8 in blocks 8": fp8(keys.kFp8Static128BlockSym, keys.kFp8Dynamic128Sym, blocks=True),
        "FP8 per channel 8": fp8(keys.kFp8StaticChannelSym, keys.kFp8DynamicTokenSym),
        "FP8 per tensor 8": fp8(keys.kFp8StaticTensorSym, keys.kFp8StaticTensorSym),
        "MXFP4 4": lambda _: type(linear.init_mxfp4_linear_kernel()),
        "MXFP8 8": lambda _: type(linear.init_mxfp8_linear_kernel(weight_shape=_SIZE)),
        "NVFP4 4": lambda _: type(linear.init_nvfp4_linear_kernel()),
    }


def head_sizes() -> dict[str, list[int] | None]:
    """Returns the head sizes that attention on CPUs supports, by the type of the KV cache."""
    import torch
    from vllm import _custom_ops as ops
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    current_platform.import_kernels()

    def takes(size: int, cache: str) -> bool:
        try:
            ops.cpu_attn_get_scheduler_metadata(
                num_reqs=1,
                num_heads=1,
                num_kv_heads=1,
                head_dim=size,
                seq_lens=torch.tensor([1], dtype=torch.int32),
                dtype=torch.bfloat16,
                query_start_loc=torch.tensor([0, 1], dtype=torch.int32),
                causal=True,
                sliding_window_size=-1,
                isa=_get_attn_isa(torch.bfloat16, 32, size, cache),
                enable_kv_split=True,
                kv_cache_dtype=cache,
            )
        except (RuntimeError, NotImplementedError):  # no such kernel was compiled
            return False
        return True

    caches = ("auto", "fp8") if torch.cpu._is_avx512_supported() else ("auto",)
    found: dict[str, list[int] | None] = {"fp8": None}
    for cache in caches:
        found[cache] = [size for size in range(8, 1032, 8) if takes(size, cache)]
    return found


def latent_backend() -> dict[str, Any]:
    """Returns vLLM's message about the latent attention that it chooses on this CPU."""
    from types import SimpleNamespace

    from vllm.platforms import current_platform
    from vllm.utils.import_utils import resolve_obj_by_qualname

    asked: Any = SimpleNamespace(use_sparse=False, use_mla=True)
    unset: Any = None
    backend = resolve_obj_by_qualname(current_platform.get_attn_backend_cls(unset, asked))
    return {
        "name": backend.get_name(),
        "dtypes": [str(dtype).removeprefix("torch.") for dtype in backend.supported_dtypes],
        "fp8": backend.supports_kv_cache_dtype("fp8"),
        "block_of_32": backend.supports_block_size(32),
    }


def latents_decode() -> dict[str, bool]:
    """Returns whether AMX's kernels decode latents of 512 + 64 elements like torch, by type."""
    import torch
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    return {name: _decodes(getattr(torch, name)) for name in DTYPES}


def _decodes(dtype: Any) -> bool:
    """Returns whether AMX's kernel for latent attention decodes three tokens like torch."""
    import torch
    from vllm import _custom_ops as ops

    tokens, heads, latent, rope, block = 3, 4, 512, 64, 32
    width = latent + rope
    cache = torch.zeros(4, block, width, dtype=dtype)
    values, positions = torch.randn(tokens, latent).to(dtype), torch.randn(tokens, rope).to(dtype)
    flat, query = cache.view(-1, 1, width), torch.randn(1, heads, width).to(dtype)
    out = torch.zeros(1, heads, latent, dtype=dtype)
    parts = torch.zeros(1, heads, 2, latent + 1)
    table = torch.arange(4 * block).view(1, -1)
    one, length = torch.zeros(1, dtype=torch.int64), torch.tensor([tokens])
    nothing = (None, None, None)
    try:
        ops.amx_mla_concat_and_cache(values, positions, cache, torch.arange(tokens))
        ops.cpu_mla_decode(
            query,
            flat,
            flat[..., :latent],
            out,
            *nothing,
            parts,
            table,
            one,
            length,
            0.1,
            0.0,
            False,
            0,
            None,
            None,
        )
    except NotImplementedError:
        return False
    keys = flat[:tokens, 0].float()
    expected = (query[0].float() @ keys.T * 0.1).softmax(-1) @ keys[:, :latent]
    return bool((expected - out[0].float()).abs().max() < 0.05)  # also False for NaN


def libraries_with_a_scan() -> list[str]:
    """Returns vLLM's libraries for CPUs that have the scan of Mamba 1."""
    import vllm

    found = []
    for library in sorted(Path(vllm.__file__).parent.glob("_C*.abi3.so")):
        with library.open("rb") as file:
            held = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            if held.find(b"selective_scan_fwd") >= 0:
                found.append(library.name)
    return found


def overflows() -> bool:
    """Returns whether attention writes elements of the model's type into a KV cache with half their size."""
    import torch
    from vllm import _custom_ops as ops

    blocks = torch.zeros(2, 1, 32, 64, dtype=torch.bfloat16)
    ones = torch.ones(1, 1, 64)
    ops.cpu_attn_reshape_and_cache(
        ones, ones, blocks, torch.zeros_like(blocks), torch.tensor([0]), "vec", 1.0, 1.0, "bfloat16"
    )
    # In float32, by columns: 1.0 is 0x3f80 after 0x0000. In bf16, one element would be 0x3f80 alone.
    return bool((blocks.view(torch.float32) == 1.0).sum() == ones.numel())


def answers() -> dict[str, Any]:
    """Returns all answers. An answer that depends on AMX has first the value with it, then without."""
    found: dict[str, Any] = {"routing": routing_methods(), "activations": activations()}
    found |= {"experts": [], "linear": [], "latent": []}
    from tests.integration.kernels.reverting import revert
    from vllm_heteroinfer.patches import cpu_coded, cpu_router

    cpu_coded.install()  # as in a CPU rank
    found["routers"] = [routers()]
    cpu_router.install()
    found["routers"].append(routers())
    revert("cpu_router")
    for amx in (True, False):
        with cpu_with(amx=amx):
            found["experts"].append(experts_run())
            found["linear"].append(linear_kernels())
            found["latent"].append(latent_backend())
    import torch

    found["scan"] = libraries_with_a_scan()
    found["latents_decode"] = latents_decode() if torch.cpu._is_amx_tile_supported() else None
    with cpu_with(amx=False):
        return {**found, "head_sizes": head_sizes(), "overflows": overflows()}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(answers()) + "\n")
