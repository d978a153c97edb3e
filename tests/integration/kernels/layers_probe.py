"""Shows the effects of our patches on vLLM's layers: `python -m tests.integration.kernels.layers_probe NAME`.

Run it with the worker's Python; it prints JSON as its last line. The layers are vLLM's own, on the CPU. A
second argument is a library of kernels that replaces the package's own.
"""

import contextlib
import json
import logging
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import vllm
from vllm.model_executor.layers import utils
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from heteroinfer_contract.errors import ContractError
from tests.integration.kernels.attention_probe import attention
from tests.integration.kernels.fp8_weights import draw_fp8, draw_scales, widen_experts
from tests.integration.kernels.mixture_probe import choice, mixture
from tests.integration.kernels.norms_probe import patched_norms
from tests.integration.kernels.packing_probe import kernels_of_4_bits, packed_bytes
from tests.integration.kernels.reverting import revert
from tests.shapes.kernels import cpu_with
from vllm_heteroinfer.feed_forward import loaded_experts
from vllm_heteroinfer.kernels import linear
from vllm_heteroinfer.kernels.experts import FP8
from vllm_heteroinfer.kernels.weight_bytes import weight_bytes
from vllm_heteroinfer.patches import (
    cpu_coded_experts,
    cpu_experts,
    cpu_linear,
    cpu_rope,
    cpu_router,
    replacing,
)
from vllm_heteroinfer.patches.registry import CPU_LINEAR, PatchError

ROWS, INPUTS = 5, 64


class Said(logging.Handler):
    """Collects the log messages of our modules."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        logger = logging.getLogger("vllm_heteroinfer")
        logger.addHandler(self)
        logger.setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def build_linear(columns: int, dtype: torch.dtype, *, bias: bool = False) -> tuple[torch.nn.Module, Any]:
    """Builds a loaded layer as vLLM builds it inside its linear layers. Returns the layer and its method."""
    layer, method = torch.nn.Module(), UnquantizedLinearMethod()
    method.create_weights(layer, INPUTS, [columns], INPUTS, columns, dtype, weight_loader=None)
    layer.input_size_per_partition, layer.output_size_per_partition = INPUTS, columns
    torch.nn.init.normal_(layer.weight)
    layer.bias = torch.nn.Parameter(torch.randn(columns).to(dtype)) if bias else None
    return layer, method


def gap(layer: torch.nn.Module, method: Any, weight: torch.Tensor, bias: torch.Tensor | None = None) -> float:
    """Returns the difference of a layer's product from torch's, as a share of the largest value."""
    x = torch.randn(ROWS, INPUTS).to(weight.dtype)
    exact = torch.nn.functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
    got = method.apply(layer, x, bias).float()
    return float((got - exact).abs().max() / exact.abs().max())


def linear_layers() -> Any:
    """Checks that bf16 layers are packed and counted, others are left to vLLM, and each is logged once."""
    said = Said()
    cpu_linear.install()
    answer: dict[str, Any] = {"gaps": [], "served": []}
    for columns, dtype, bias in (
        (96, torch.bfloat16, False),
        (200, torch.bfloat16, True),
        (96, torch.float32, False),
        (64, torch.float32, True),
    ):
        layer, method = build_linear(columns, dtype, bias=bias)
        weight = layer.weight.detach().clone()
        before = weight_bytes(layer)
        method.process_weights_after_loading(layer)
        answer["gaps"].append(gap(layer, method, weight, layer.bias))
        answer["served"].append(layer.weight.ndim == 4)
        if columns % 32 == 0:
            assert weight_bytes(layer) == before, (columns, dtype)
    return {**answer, "said": said.lines}


def heads() -> Any:
    """Checks that a head keeps one form of its weight, an embedding its table, and a tied pair each one."""
    cpu_linear.install()
    torch.set_default_dtype(torch.bfloat16)
    table, head, tied = (
        VocabParallelEmbedding(128, INPUTS),
        ParallelLMHead(128, INPUTS),
        ParallelLMHead(128, INPUTS),
    )
    for layer in (table, head, tied):
        torch.nn.init.normal_(layer.weight)
    tied = tied.tie_weights(table)
    own, shared = head.weight.detach().clone(), table.weight.detach().clone()
    for layer in (table, head, tied):
        layer.quant_method.process_weights_after_loading(layer)
    return {
        "gaps": [
            gap(head, head.quant_method, own),
            gap(tied, tied.quant_method, shared),
            gap(table, table.quant_method, shared),  # a model that uses the embedding itself as its head
        ],
        "lookup": bool(torch.equal(table(torch.arange(128)), shared)),
        "packed": [layer.weight.ndim == 4 for layer in (table, head, tied)],
    }


def patch() -> Any:
    """Applies the patch twice, reverts it, and tries it with another version of vLLM."""
    original = utils.dispatch_cpu_unquantized_gemm
    cpu_linear.install()
    first = utils.dispatch_cpu_unquantized_gemm
    cpu_linear.install()
    answer: dict[str, Any] = {
        "applied": first is not original,
        "twice": utils.dispatch_cpu_unquantized_gemm is first,
    }
    revert("cpu_linear")
    answer["reverted"] = utils.dispatch_cpu_unquantized_gemm is original
    refusals = []
    for found, version in ((None, None), (lambda layer: None, None), (original, "0.33.0+cpu")):
        try:
            with mock.patch.object(vllm, "__version__", version or vllm.__version__):
                replacing.check_target(CPU_LINEAR, found)
        except PatchError as error:
            refusals.append(str(error))
    return {**answer, "refusals": refusals}


def without() -> Any:
    """Returns how a bf16 layer is computed if the kernels are disabled, or were not compiled."""
    said = Said()
    cpu_linear.install()
    answer = []
    for columns in (96, 200):
        layer, method = build_linear(columns, torch.bfloat16)
        weight = layer.weight.detach().clone()
        method.process_weights_after_loading(layer)
        answer.append(gap(layer, method, weight))
    return {"gaps": answer, "said": said.lines}


def onednn_alone() -> Any:
    """Returns what vLLM's own function does to a bf16 layer and to a head: the reason for the patch."""
    torch.set_default_dtype(torch.bfloat16)
    layer, method = build_linear(96, torch.bfloat16)
    method.process_weights_after_loading(layer)
    head = ParallelLMHead(128, INPUTS)
    head.quant_method.process_weights_after_loading(head)
    return {"linear": list(layer.weight.shape), "head": list(head.weight.shape)}


def build_experts(name: str, activation: str, inner: int, weights: str, *, bias: bool) -> Any:
    """Builds and loads a layer's routed experts as vLLM does, with random weights."""
    from vllm.model_executor.layers.fused_moe import FusedMoEFactory
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config
    from vllm.utils.torch_utils import set_default_torch_dtype

    fp8 = weights == "fp8"
    dtype = torch.bfloat16 if fp8 else getattr(torch, weights)
    # Our kernels for FP8 need no AMX.
    with set_default_torch_dtype(dtype), cpu_with(amx=False) if fp8 else contextlib.nullcontext():
        runner = FusedMoEFactory(
            num_experts=4,
            top_k=2,
            hidden_size=INPUTS,
            intermediate_size=inner,
            quant_config=Fp8Config(True, "dynamic", weight_block_size=[128, 128]) if fp8 else None,
            prefix=name,
            params_dtype=dtype,
            activation=activation,
            has_bias=bias,
        )
    part = next(module for module in runner.modules() if type(module).__name__ == "RoutedExperts")
    draw = torch.Generator().manual_seed(inner)
    if fp8:
        part.w13_weight.data, part.w2_weight.data = (
            draw_fp8(draw, *weight.shape) for weight in (part.w13_weight, part.w2_weight)
        )
        halves = [draw_scales(draw, 4, inner, INPUTS) for _ in range(2)]
        part.w13_weight_scale_inv.data.copy_(torch.cat(halves, 1))
        part.w2_weight_scale_inv.data.copy_(draw_scales(draw, 4, INPUTS, inner))
    else:
        for parameter in part.parameters():
            torch.nn.init.normal_(parameter, std=INPUTS**-0.5)
    return part


def exact_experts(
    part: Any, activation: str, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> Any:
    """Returns the weighted sum of each row's experts, before the experts are packed."""
    act = {"silu": torch.nn.functional.silu, "gelu": torch.nn.functional.gelu}[activation]
    w13, w2 = part.w13_weight, part.w2_weight
    if w13.dtype == FP8:
        w13, w2 = widen_experts(w13, w2, (part.w13_weight_scale_inv, part.w2_weight_scale_inv))
    y = torch.zeros(x.shape)
    biases = [getattr(part, name, None) for name in ("w13_bias", "w2_bias")]
    for row, j in ((row, j) for row in range(len(x)) for j in range(ids.shape[1])):
        expert = int(ids[row, j])
        added = [0 if bias is None else bias[expert].float() for bias in biases]
        gate, up = (w13[expert].float() @ x[row].float() + added[0]).chunk(2)
        y[row] += weights[row, j] * (w2[expert].float() @ (act(gate) * up) + added[1])
    return y


def experts() -> Any:
    """Checks which experts are packed for our kernels: bf16 and FP8 with SiLU, also padded.

    Others are vLLM's.
    """
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    def targets() -> list[Any]:
        unquantized, fp8 = cpu_moe.CPUUnquantizedExperts, cpu_moe.CPUExpertsFp8
        return [
            *(unquantized.apply, unquantized.process_weights_after_loading),
            *(fp8.apply, cpu_moe.prepare_fp8_moe_layer_for_cpu),
        ]

    original, said = targets(), Said()
    for _ in range(2):
        cpu_experts.install()
        cpu_coded_experts.install(loaded_experts.pack_loaded_experts)
    ours, gaps, stored = {}, {}, {}
    for name, activation, inner, held, bias in (
        ("bf16", "silu", 64, "bfloat16", False),
        ("padded", "silu", 48, "bfloat16", False),
        ("float32", "silu", 64, "float32", False),
        ("gelu", "gelu", 64, "bfloat16", False),
        ("bias", "silu", 64, "bfloat16", True),
        ("fp8", "silu", 256, "fp8", False),
    ):
        part = build_experts(name, activation, inner, held, bias=bias)
        x = torch.randn(ROWS, INPUTS).to(torch.float32 if held == "float32" else torch.bfloat16)
        ids = torch.rand(ROWS, 4).topk(2, -1).indices
        weights = torch.rand(ROWS, 2)
        exact, loaded = exact_experts(part, activation, x, ids, weights), weight_bytes(part)
        part.quant_method.process_weights_after_loading(part)
        ours[name] = cpu_experts.library_of(part) is not None
        got = part.quant_method.apply(
            layer=part, x=x.clone(), topk_weights=weights, topk_ids=ids,
            shared_experts=None, shared_experts_input=None,
        )  # fmt: skip
        gaps[name] = float((got.float() - exact).abs().max() / exact.abs().max())
        if inner % 32 == 0:
            stored[name] = weight_bytes(part) / loaded
    kernel = type(part.quant_method.moe_kernel.fused_experts).__name__
    limited = refused_limit(part, x, ids, weights)
    revert("cpu_experts")
    revert("cpu_coded_experts")
    return {
        "ours": ours,
        "gaps": gaps,
        "stored": stored,
        "fp8": [kernel, str(part.w13_weight.dtype), str(part.w2_weight.dtype)],
        "said": said.lines,
        "limited": limited,
        "reverted": targets() == original,
    }


def refused_limit(part: torch.nn.Module, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> str:
    """Returns the error for a layer with a limit on its activations."""
    part.quant_method.moe_kernel.fused_experts.moe_config.swiglu_limit = 7.0
    try:
        part.quant_method.apply(
            layer=part, x=x.clone(), topk_weights=weights, topk_ids=ids,
            shared_experts=None, shared_experts_input=None,
        )  # fmt: skip
    except ContractError as error:
        return str(error)
    return ""


def rope() -> Any:
    """Returns the error of rotated queries and keys by their axes, first vLLM's own, then with the patch."""
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    def gaps() -> dict[str, float]:
        return {
            f"{axes}, {'neox' if neox else 'interleaved'}": turned_wrongly(RotaryEmbedding, axes, neox=neox)
            for axes in ("flat", "heads", "heads in a view")
            for neox in (True, False)
        }

    found = [gaps()]
    cpu_rope.install()
    cpu_rope.install()
    found.append(gaps())
    in_part = {pairs: turned_in_part(RotaryEmbedding, pairs) for pairs in (8, 10, 12, 16, 20)}
    revert("cpu_rope")
    return [*found, gaps() == found[0], in_part]


def turned_in_part(kind: Any, pairs: int) -> float:
    """Returns the largest error, in bf16, of heads of 80 elements with this number of rotated pairs."""
    tokens, heads, size, turned = 7, 4, 80, 2 * pairs
    torch.manual_seed(0)
    rotary = kind(size, turned, 128, 10000.0, True, torch.bfloat16)
    positions = torch.arange(3, 3 + tokens)
    query, key = (torch.randn(tokens, count * size).to(torch.bfloat16) for count in (heads, 1))
    expected = []
    for part in (query, key):
        by_head = part.float().view(tokens, -1, size)
        first = rotated(by_head[..., :turned], positions, neox=True)
        expected.append(torch.cat([first, by_head[..., turned:]], -1))
    got = rotary.forward_cpu(positions, query, key)
    return max(
        float((one.float().view(exact.shape) - exact).abs().max())
        for one, exact in zip(got, expected, strict=True)
    )


def turned_wrongly(kind: Any, axes: str, *, neox: bool) -> float:
    """Returns the largest error of a rotated query or key."""
    tokens, heads, size = 7, 4, 64
    torch.manual_seed(0)
    rotary = kind(size, size, 128, 10000.0, neox, torch.float32)
    positions = torch.arange(3, 3 + tokens)
    query, key = torch.randn(tokens, heads, 32 + size)[..., 32:], torch.randn(tokens, 512 + size)[:, 512:]
    given = {
        "flat": (query.flatten(1), key),
        "heads": (query.contiguous(), key.unsqueeze(1).contiguous()),
        "heads in a view": (query, key.unsqueeze(1)),
    }[axes]
    expected = [rotated(part.reshape(tokens, -1, size), positions, neox=neox) for part in given]
    got = rotary.forward_cpu(positions, *given)  # the rotation may be in place
    return max(
        float((one.reshape(exact.shape) - exact).abs().max())
        for one, exact in zip(got, expected, strict=True)
    )


def rotated(x: torch.Tensor, positions: torch.Tensor, *, neox: bool) -> torch.Tensor:
    """Returns pairs of (tokens, heads, size) rotated by their positions' angles, as complex numbers."""
    size = x.shape[-1]
    angles = torch.outer(positions.double(), 10000.0 ** (-torch.arange(0, size, 2).double() / size))
    first, second = (x[..., : size // 2], x[..., size // 2 :]) if neox else (x[..., ::2], x[..., 1::2])
    turned = torch.complex(first.double(), second.double()) * torch.polar(
        torch.ones_like(angles), angles
    ).unsqueeze(1)
    parts = turned.real, turned.imag
    return torch.cat(parts, -1) if neox else torch.stack(parts, -1).flatten(-2)


def norms() -> Any:
    """Returns the errors of norms against float64, by their implementation, and which one ranks prefer.

    Each error has the largest difference, and the mean loss of magnitude.
    """
    from vllm import ir
    from vllm.config import CompilationMode

    import vllm_heteroinfer.platform.cpu_norms  # noqa: F401 - registers the operations
    from vllm_heteroinfer.kernels.norms import PROVIDER
    from vllm_heteroinfer.platform.cpu import HeteroCpuPlatform

    def exact(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide = x.double()
        return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * weight.double()

    def apart(got: torch.Tensor, expected: torch.Tensor) -> tuple[float, float]:
        size = expected.abs().clamp(min=1e-2)
        gap, missing = (got.double() - expected).abs() / size, (expected.abs() - got.double().abs()) / size
        return float(gap.max()), float(missing.mean())

    ir.set_default_torch_wrap(False)
    for op in (ir.ops.rms_norm, ir.ops.fused_add_rms_norm):
        op.set_default([PROVIDER, "native"])
    gaps: dict[str, tuple[float, float]] = {}
    for dtype, width in product((torch.float32, torch.bfloat16), (32, 4096, 80)):
        rows = torch.randn(50, 3, 2 * width).to(dtype)
        weight = (torch.randn(width) + 1).to(dtype)
        for kind, x in (("whole", rows[..., :width].contiguous()), ("view", rows[..., width:])):
            by = ir.ops.rms_norm.dispatch(x, weight, 1e-6).provider
            gaps[f"{dtype} {width} {kind} {by}"] = apart(ir.ops.rms_norm(x, weight, 1e-6), exact(x, weight))
        x, residual = rows[:, 0, :width].contiguous(), rows[:, 1, width:].contiguous()
        total = x.double() + residual.double()
        by = ir.ops.fused_add_rms_norm.dispatch(x, residual, weight, 1e-6).provider
        normed, added = ir.ops.fused_add_rms_norm.maybe_inplace(x, residual, weight, 1e-6)
        gaps[f"{dtype} {width} added {by}"] = apart(normed, exact(total, weight))
        gaps[f"{dtype} {width} sum {by}"] = apart(added, total)

    def asked(mode: CompilationMode) -> str:
        config: Any = SimpleNamespace(compilation_config=SimpleNamespace(mode=mode))
        return HeteroCpuPlatform.get_default_ir_op_priority(config).rms_norm[0]

    return gaps, [asked(CompilationMode.NONE), asked(CompilationMode.VLLM_COMPILE)]


def router() -> Any:
    """Checks experts and weights for each score, with and without a bias, against sums in plain Python."""
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

    torch.manual_seed(0)
    drawn, bias, factor = 4 * torch.randn(5, 8), torch.randn(8), 2.5
    cpu_router.install()
    cpu_router.install()
    gaps = {}
    for scoring, biased, normalize, dtype in product(
        ("softmax", "sigmoid"), (True, False), (True, False), (torch.float32, torch.bfloat16)
    ):
        given = drawn.to(dtype)
        logits = given.float()
        routes = CPURouter(
            top_k=3,
            global_num_experts=8,
            renormalize=normalize,
            scoring_func=scoring,
            routed_scaling_factor=factor if biased else 1.0,
            e_score_correction_bias=bias if biased else None,
        )
        weights, ids = routes._compute_routing(torch.zeros(5, 4), given, None)
        scores = logits.softmax(-1) if scoring == "softmax" else 1 / (1 + torch.exp(-logits))
        got, expected = torch.zeros(5, 8).scatter(-1, ids.long(), weights), torch.zeros(5, 8)
        for row, score in enumerate(scores):
            chosen = sorted(range(8), key=(score + bias * biased).tolist().__getitem__)[-3:]
            scale = (factor if biased else 1.0) / (float(score[chosen].sum()) if normalize else 1.0)
            expected[row, chosen] = score[chosen] * scale
        gaps[f"{scoring}, {biased}, {normalize}, {dtype}"] = float((got - expected).abs().max())
    revert("cpu_router")
    return gaps


def packing() -> dict[str, Any]:
    """Checks that 4-bit weights packed in slices equal weights packed in one call, and use less memory."""
    from vllm.model_executor.kernels.linear.mixed_precision.cpu import CPUWNA16LinearKernel
    from vllm.model_executor.layers.fused_moe.oracle import int_wna16
    from vllm.model_executor.layers.quantization import auto_awq
    from vllm.model_executor.layers.quantization.auto_gptq import AutoGPTQConfig
    from vllm.scalar_type import scalar_types

    from vllm_heteroinfer.patches import cpu_packing

    def words(*shape: int) -> torch.nn.Parameter:
        values = torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32)
        return torch.nn.Parameter(values, requires_grad=False)

    def numbers(*shape: int) -> torch.nn.Parameter:
        return torch.nn.Parameter(torch.rand(shape).bfloat16(), requires_grad=False)

    def linear_of(inputs: int, outputs: int, *, zeros: bool, amx: bool) -> list[torch.Tensor]:
        groups = inputs // 128
        layer = SimpleNamespace(q=words(inputs // 8, outputs), s=numbers(groups, outputs), bias=None)
        layer.z = words(groups, outputs // 8) if zeros else None
        kind = scalar_types.uint4 if zeros else scalar_types.uint4b8
        config = SimpleNamespace(weight_type=kind, zero_points=zeros)
        kernel = SimpleNamespace(w_q_name="q", w_s_name="s", w_zp_name="z", config=config)
        pack = CPUWNA16LinearKernel
        (pack._process_gptq_weights_w4a8 if amx else pack._process_gptq_weights_w4a16)(kernel, layer)
        return [layer.q, layer.s, *([] if layer.z is None else [layer.z])]

    def awq(inputs: int, outputs: int) -> list[torch.Tensor]:
        layer = SimpleNamespace(q=words(inputs, outputs // 8), z=words(inputs // 128, outputs // 8))
        auto_awq._convert_awq_to_standard_format(layer, "q", "z", 4)
        return [layer.q, layer.z]

    def experts_of(*, zeros: bool) -> list[torch.Tensor]:
        config = object.__new__(auto_awq.AutoAWQConfig if zeros else AutoGPTQConfig)
        config.desc_act = False
        if zeros:
            given = [words(8, 512, 64), words(8, 256, 64), numbers(8, 4, 512), numbers(8, 2, 512)]
            given += [words(8, 4, 64), words(8, 2, 64)]
        else:  # outputs first
            given = [words(8, 512, 64), words(8, 512, 32), numbers(8, 512, 4), numbers(8, 512, 2)]
        return [each for each in int_wna16._process_weights_cpu(config, *given) if each is not None]

    def peak(pack: Callable[[], Any]) -> int:
        def status(name: str) -> int:
            lines = Path("/proc/self/status").read_text().splitlines()
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

        Path("/proc/self/clear_refs").write_text("5")
        before = status("VmRSS")
        pack()
        return status("VmHWM") - before

    def everything() -> list[torch.Tensor]:
        torch.manual_seed(0)
        kernels = kernels_of_4_bits()
        shapes = product(((2048, 4128), (4096, 1056), (128, 96)), (False, True), kernels)
        found = [each for shape, z, amx in shapes for each in linear_of(*shape, zeros=z, amx=amx)]
        found += [*awq(2048, 4128), *awq(128, 96)]
        return [*found, *experts_of(zeros=False), *experts_of(zeros=True)] if True in kernels else found

    at_once, large = everything(), (4096, 14336)
    peaks = [peak(lambda: awq(*large))]
    cpu_packing.install()
    cpu_packing.install()
    in_slices = everything()
    peaks.append(peak(lambda: awq(*large)))
    revert("cpu_packing")
    same = [
        a.dtype == b.dtype and torch.equal(a, b) and a.is_contiguous() == b.is_contiguous()
        for a, b in zip(at_once, in_slices, strict=True)
    ]
    return {"same": same, "peaks": [each / (large[0] * large[1] // 2) for each in peaks]}


QUESTIONS = {
    f.__name__: f
    for f in (
        *(linear_layers, heads, patch, without, onednn_alone, experts, rope, router, norms),
        *(choice, mixture, patched_norms, packing, packed_bytes, attention),
    )
}


def main(arguments: str) -> None:
    """Runs checks in a process that is a rank of its own. `arguments` are words, as JSON."""
    name, *libraries = json.loads(arguments)
    import tempfile

    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.platforms import current_platform
    from vllm.v1.worker.workspace import init_workspace_manager

    for library in libraries:
        linear.prepare(Path(library))
    current_platform.import_kernels()
    with tempfile.TemporaryDirectory() as scratch, set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{scratch}/store", 0, "gloo")
        initialize_model_parallel(1)
        init_workspace_manager(torch.device("cpu"))  # vLLM's kernels for AMX check this
        print(json.dumps(QUESTIONS[name]()))
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(json.dumps(sys.argv[1:]))
