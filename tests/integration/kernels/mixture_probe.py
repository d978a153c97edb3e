"""Compares mixtures with the patch `cpu_mixture` to vLLM's own computation. `layers_probe` calls it."""

import contextlib
import copy
import dataclasses
from collections.abc import Callable
from itertools import product
from typing import Any
from unittest import mock

import torch

from tests.integration.kernels.fp8_weights import draw_fp8, draw_scales
from tests.integration.kernels.reverting import revert
from tests.shapes.kernels import cpu_with
from vllm_heteroinfer.kernels import linear
from vllm_heteroinfer.kernels.experts import PackedExperts
from vllm_heteroinfer.kernels.library import KernelLibrary
from vllm_heteroinfer.kernels.routing import SCORES, Chooser, ExpertChoice, Mixture
from vllm_heteroinfer.patches import cpu_experts, cpu_linear, cpu_mixture, cpu_router

HIDDEN, INNER, EXPERTS, TOPK = 64, 64, 20, 3
ROWS = (1, 5, 40, 300)


def build(
    name: str, *, weights: str = "bfloat16", gate: str = "", biased: bool = False, **options: Any
) -> Any:
    """Builds and loads a mixture as vLLM does, with random weights.

    Args:
        name: name of the layer.
        weights: dtype of the experts: bfloat16, float32 or fp8.
        gate: dtype of the gate's logits, or "" if the model passes logits.
        biased: whether a bias corrects the choice of experts.
        options: options of vLLM's factory.
    """
    from vllm.model_executor.layers.fused_moe import FusedMoEFactory
    from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config
    from vllm.utils.torch_utils import set_default_torch_dtype

    fp8 = weights == "fp8"
    inner = 256 if fp8 else INNER
    dtype = torch.bfloat16 if fp8 else getattr(torch, weights)
    with set_default_torch_dtype(dtype), cpu_with(amx=True) if fp8 else contextlib.nullcontext():
        runner = FusedMoEFactory(
            num_experts=EXPERTS,
            top_k=TOPK,
            hidden_size=HIDDEN,
            intermediate_size=inner,
            quant_config=Fp8Config(True, "dynamic", weight_block_size=[128, 128]) if fp8 else None,
            prefix=name,
            params_dtype=dtype,
            gate=GateLinear(HIDDEN, EXPERTS, out_dtype=getattr(torch, gate)) if gate else None,
            e_score_correction_bias=torch.nn.Parameter(torch.randn(EXPERTS).float()) if biased else None,
            **options,
        )
    part, draw = runner.routed_experts, torch.Generator().manual_seed(1)
    if fp8:
        part.w13_weight.data, part.w2_weight.data = (
            draw_fp8(draw, *weight.shape) for weight in (part.w13_weight, part.w2_weight)
        )
        halves = [draw_scales(draw, EXPERTS, inner, HIDDEN) for _ in range(2)]
        part.w13_weight_scale_inv.data.copy_(torch.cat(halves, 1))
        part.w2_weight_scale_inv.data.copy_(draw_scales(draw, EXPERTS, HIDDEN, inner))
    else:
        for parameter in part.parameters():
            torch.nn.init.normal_(parameter, std=HIDDEN**-0.5)
    part.quant_method.process_weights_after_loading(part)
    if gate:
        torch.nn.init.normal_(runner.gate.weight)
        runner.gate.quant_method.process_weights_after_loading(runner.gate)
    return runner


def taken() -> dict[str, Any]:
    """Returns for each kind whether one call computes it, and whether all results equal vLLM's bits."""
    found: dict[str, Any] = {}
    for gate, biased, scoring, normalize in product(
        ("bfloat16", "float32", ""), (False, True), ("softmax", "sigmoid"), (False, True)
    ):
        name = f"{gate or 'given'}, {biased}, {scoring}, {normalize}"
        kind: dict[str, Any] = {"scoring_func": scoring, "renormalize": normalize}
        runner = build(f"m.{len(found)}", gate=gate, biased=biased, **kind)
        for logits in ("",) if gate else ("bfloat16", "float32"):
            found[f"{name} {logits}"] = compared(runner, logits)
    found["fp8"] = compared(build("m.fp8", weights="fp8", gate="bfloat16"))
    runner = build("m.factor", biased=True, gate="bfloat16")
    runner.router.routed_scaling_factor = 2.5
    found["a factor with a bias"] = compared(runner)
    return found


def left() -> dict[str, Any]:
    """Returns the same for kinds that vLLM's own code computes."""
    found: dict[str, Any] = {"float32": compared(build("l.wide", weights="float32"))}
    shared = torch.nn.Linear(HIDDEN, HIDDEN, bias=False, dtype=torch.bfloat16)
    found["shared experts"] = compared(build("l.shared", gate="bfloat16", shared_experts=shared))
    found["groups"] = compared(
        build("l.groups", gate="bfloat16", use_grouped_topk=True, num_expert_group=4, topk_group=2)
    )
    found["activation"] = compared(build("l.gelu", gate="bfloat16", activation="gelu"))
    runner = build("l.changed", gate="bfloat16")
    for what, owner, name, value in (
        ("captured", runner.router, "capture_fn", lambda ids: None),
        ("factor", runner, "routed_scaling_factor", 2.0),
        ("split", runner, "moe_config", split(runner.moe_config)),
    ):
        kept = getattr(owner, name)
        runner.__dict__.pop("heteroinfer_mixture", None)
        setattr(owner, name, value)
        found[what] = compared(runner)
        setattr(owner, name, kept)
    runner.__dict__.pop("heteroinfer_mixture", None)
    strided = torch.randn(EXPERTS, 5).bfloat16().t()
    found["logits in a view"] = compared(build("l.view"), strided)
    return found


def split(config: Any) -> Any:
    """Returns a configuration with experts split over two ranks. No rank adds the parts."""
    changed = copy.copy(config)
    changed.skip_final_all_reduce = True
    changed.moe_parallel_config = dataclasses.replace(config.moe_parallel_config, tp_size=2)
    return changed


def followed() -> list[bool]:
    """Replaces a layer's weights, and returns by their memory whether the outputs use the new weights."""
    answer = []
    for where in ("w13_weight", "w2_weight", "gate", "e_score_correction_bias", "quant_method"):
        runner = build(f"f.{where}", gate="bfloat16", biased=True)
        compared(runner)
        part = runner.routed_experts
        if where == "gate":
            weight = torch.randn_like(runner.gate.weight)
            runner.gate.weight = torch.nn.Parameter(weight, requires_grad=False)
        elif where == "e_score_correction_bias":
            runner.router.e_score_correction_bias.data = torch.randn(EXPERTS)
        elif where == "quant_method":
            part.quant_method = copy.copy(part.quant_method)
        else:
            getattr(part, where).data = torch.randn_like(getattr(part, where))
        answer.append(compared(runner) == [len(ROWS), True])
    return answer


def compared(runner: Any, logits: str | torch.Tensor = "") -> list[Any]:
    """Returns in how many of ROWS one call computed the mixture, and whether all outputs equal vLLM's."""
    gated = runner.gate is not None
    same, calls, compute = [], [], Mixture.compute

    def count(*given: Any) -> torch.Tensor:
        calls.append(given)
        return compute(*given)

    dtype = runner.moe_config.in_dtype
    for rows in ROWS:
        x = torch.randn(rows, HIDDEN).to(dtype)
        given = x
        if isinstance(logits, torch.Tensor):
            x, given = x[:5], logits[: len(x)]
        elif not gated:
            given = torch.randn(rows, EXPERTS).to(getattr(torch, logits) if logits else dtype)
        revert("cpu_mixture")
        expected = runner(hidden_states=x.clone(), router_logits=given)
        cpu_mixture.install()
        with mock.patch.object(Mixture, "compute", count):
            got = runner(hidden_states=x.clone(), router_logits=given)
        same.append(torch.equal(got, expected) and bool(got.isfinite().all()))
    return [len(calls), all(same)]


def choice() -> Any:
    """Compares the choice of experts by one call with torch: weights, experts, ties and NaN."""
    library = linear.prepare()
    gaps, others = {}, []
    for experts, topk, dtype in product(
        (1, 8, 16, 20, 128, 200, 512), (1, 3, 8, 22), ("bfloat16", "float32")
    ):
        if topk > experts:
            continue
        torch.manual_seed(experts)
        for scoring, biased, normalize in product(SCORES, (False, True), (False, True)):
            kind = f"{experts} {topk} {dtype} {scoring} {biased} {normalize}"
            bias = torch.randn(experts) if biased else None
            routing = ExpertChoice(
                experts=experts, topk=topk, bias=bias, scoring=scoring, normalize=normalize, factor=2.5
            )
            logits = (3 * torch.randn(300, experts)).to(getattr(torch, dtype))
            gaps[kind], is_best = compared_choice(library, routing, logits)
            if not is_best:
                others.append(kind)
    plain = ExpertChoice(experts=20, topk=3, bias=None, scoring="softmax", normalize=True, factor=1.0)
    odd = torch.randn(4, 20)
    odd[1, 7], odd[2], odd[3, 19] = float("nan"), 1.0, float("inf")
    weights, ids = Chooser(library, plain).choose(odd)
    return {
        "gaps": gaps,
        "others": others,
        "finite": weights.isfinite().all(-1).tolist(),
        "differ": all_differ(ids) and int(ids.min()) >= 0 and int(ids.max()) < 20,
        "ties": ids[2].tolist(),
        "none": scoreless(library),
        "refused": refused(library),
    }


def compared_choice(
    library: KernelLibrary, routing: ExpertChoice, logits: torch.Tensor
) -> tuple[float, bool]:
    """Returns the largest relative error of the weights, and whether the best experts are chosen.

    The bias corrects the choice, but not the weights.
    """
    weights, ids = Chooser(library, routing).choose(logits)
    wide = logits.double()
    scores = wide.softmax(-1) if routing.scoring == "softmax" else wide.sigmoid()
    corrected = scores if routing.bias is None else scores + routing.bias
    best = corrected.topk(routing.topk, -1).values
    found = corrected.gather(-1, ids.long())
    is_best = torch.allclose(found, best, rtol=1e-6, atol=1e-6) and all_differ(ids)
    expected = scores.gather(-1, ids.long())
    if routing.normalize:
        expected = expected / expected.sum(-1, keepdim=True)
    return float((weights / (routing.factor * expected) - 1).abs().max()), is_best


def scoreless(library: KernelLibrary) -> list[list[float]]:
    """Returns the weights of experts if all scores are zero, and if one of two is, by us and by torch."""
    far, odd = torch.full((1, 20), -200.0), torch.full((1, 20), -200.0)
    odd[0, 4] = 200.0
    kept = []
    for scoring, logits in (
        ("sigmoid", far),
        ("sigmoid", -torch.inf + far),
        ("sigmoid", odd),
        ("softmax", odd),
    ):
        routing = ExpertChoice(
            experts=20, topk=2, bias=torch.zeros(20), scoring=scoring, normalize=True, factor=1.0
        )
        scores = logits.softmax(-1) if scoring == "softmax" else logits.sigmoid()
        kept += Chooser(library, routing).choose(logits)[0].tolist()
        kept += cpu_router.choose(scores, routing.bias, 2, normalize=True, factor=1.0)[0].tolist()
    return kept


def all_differ(ids: torch.Tensor) -> bool:
    """Returns whether no row has an expert twice."""
    return all(len(set(row)) == len(row) for row in ids.tolist())


def refused(library: KernelLibrary) -> list[str]:
    """Returns the errors for arguments that must not become raw pointers."""
    fits: dict[str, Any] = {
        "experts": 4, "topk": 2, "bias": None, "scoring": "softmax", "normalize": True, "factor": 1.0
    }  # fmt: skip
    routing = ExpertChoice(**fits)
    packed = PackedExperts(w13=torch.zeros(4, 64, 64).bfloat16(), w2=torch.zeros(4, 64, 32).bfloat16())
    gate = torch.zeros(1, 32, 32, 2).bfloat16()
    x, logits = torch.zeros(2, 64).bfloat16(), torch.zeros(2, 4)
    gated, given = Mixture(library, routing, packed, gate), Mixture(library, routing, packed, None)
    output = []
    wrong_ones: tuple[Callable[[], Any], ...] = (
        *(lambda changed=changed: ExpertChoice(**{**fits, **changed}) for changed in (
            {"topk": 5}, {"scoring": "tanh"}, {"bias": torch.zeros(5)}, {"bias": torch.zeros(4).double()}
        )),
        lambda: Chooser(library, routing).choose(logits.double()),
        lambda: Chooser(library, routing).choose(torch.zeros(2, 5)),
        lambda: Chooser(library, routing).choose(torch.zeros(4, 2).t()),
        lambda: Mixture(library, dataclasses.replace(routing, experts=5), packed, gate),
        lambda: Mixture(library, routing, packed, gate.float()),
        lambda: Mixture(library, routing, packed, gate[:, :16]),
        lambda: gated.compute(x.float(), None),
        lambda: gated.compute(x[:, :32], None),
        lambda: gated.compute(torch.zeros(64, 2).bfloat16().t(), None),
        lambda: given.compute(x, None),
        lambda: given.compute(x, logits[:1]),
        lambda: given.compute(x, logits.double()),
    )  # fmt: skip
    for wrong in wrong_ones:
        try:
            wrong()
        except ValueError as error:
            output.append(str(error))
        else:
            output.append("nothing")
    return output


def mixture() -> Any:
    """Runs all checks with the patches of a rank, and reverts the patch."""
    from vllm.config import get_current_vllm_config
    from vllm.forward_context import set_forward_context
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

    torch.manual_seed(0)
    original = MoERunner.forward
    for patch in (cpu_linear, cpu_experts, cpu_router, cpu_mixture, cpu_mixture):
        patch.install()
    applied = MoERunner.forward is not original
    with torch.inference_mode(), set_forward_context(None, get_current_vllm_config()):
        answer = {"taken": taken(), "left": left(), "followed": followed()}
    revert("cpu_mixture")
    return {**answer, "applied": applied, "reverted": MoERunner.forward is original}
