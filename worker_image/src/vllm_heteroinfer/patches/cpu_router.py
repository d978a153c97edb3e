"""The patch `cpu_router`: CPU ranks choose experts as GPUs do where vLLM's router for CPUs does not.

Without groups of experts that router knows softmax alone: with a sigmoid (MiniMax-M2) it ends at its first
step, and the bias that corrects a choice by softmax (ERNIE-4.5) it leaves out, which gives other experts
without an error. And it computes softmax in the type of the logits, where GPUs do in float32: without
normalization (OLMoE) that scaled all of a token's weights by up to 6 % in bf16. Eager ranks
have a call of our kernels for it, instead of five to nine operations of torch. Imports vLLM.
Source: vllm/model_executor/layers/fused_moe/router/cpu_router.py::CPURouter._compute_routing@v0.32.0; what
GPUs do: vllm/.../fused_moe/router/fused_topk_bias_router.py::fused_topk_bias.
"""

import os
from collections.abc import Callable
from typing import Any, Final

import torch

from vllm_heteroinfer.kernels import linear
from vllm_heteroinfer.kernels.linear_layers import is_wanted
from vllm_heteroinfer.kernels.routing import SCORES, Chooser, ExpertChoice
from vllm_heteroinfer.patches.registry import CPU_ROUTER
from vllm_heteroinfer.patches.replacing import replace

_CHOOSER: Final = "heteroinfer_chooser"
"""Attribute of a router."""
_SCORES: Final[dict[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "softmax": lambda logits: torch.softmax(logits, dim=-1),
    "sigmoid": torch.sigmoid,
}


def install() -> None:
    """Has this process's routers choose so from now on."""
    replace(CPU_ROUTER, _routing)


def routing_of(router: Any) -> ExpertChoice | None:
    """Returns how a router chooses, with its bias as it lies there; None if our kernels do not choose so."""
    bias = router.e_score_correction_bias
    by_itself = router.use_grouped_topk or router.custom_routing_function is not None
    if (
        by_itself
        or router.scoring_func not in SCORES
        or getattr(router, "_hash_indices_table", None) is not None
    ):
        return None
    if bias is not None and (
        bias.dtype != torch.float32 or bias.device.type != "cpu" or not bias.is_contiguous()
    ):
        return None
    return ExpertChoice(
        experts=router.global_num_experts,
        topk=router.top_k,
        bias=None if bias is None else bias.data,
        scoring=router.scoring_func,
        normalize=router.renormalize,
        # Only where there is a bias vLLM's routers for GPUs apply the factor; else the model does.
        factor=1.0 if bias is None else router.routed_scaling_factor,
    )


def _routing(original: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> Callable[..., Any]:
    def compute_routing(
        self: Any,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        indices_type: torch.dtype | None,
        *,
        input_ids: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        bias, scoring = self.e_score_correction_bias, self.scoring_func
        by_itself = self.use_grouped_topk or self.custom_routing_function is not None
        if by_itself or scoring not in _SCORES:
            return original(self, hidden_states, router_logits, indices_type, input_ids=input_ids)
        chooser = None if torch.compiler.is_compiling() else _chooser(self)
        if chooser is not None and chooser.takes(router_logits):
            return chooser.choose(router_logits)
        # Only where there is a bias vLLM's routers for GPUs apply the factor; else the model does.
        factor = 1.0 if bias is None else self.routed_scaling_factor
        scores = _SCORES[scoring](router_logits.float())
        return choose(scores, bias, self.top_k, normalize=self.renormalize, factor=factor)

    return compute_routing


def _chooser(router: Any) -> Chooser | None:
    """Returns what chooses a router's experts in one call; None where torch does."""
    bias = router.e_score_correction_bias
    address = 0 if bias is None else bias.data_ptr()
    held = router.__dict__.get(_CHOOSER)
    if held is None or held[0] != address:
        library, routing = linear.find() if is_wanted(os.environ) else None, routing_of(router)
        chooser = None if library is None or routing is None else Chooser(library, routing)
        held = router.__dict__[_CHOOSER] = (address, chooser)
    found: Chooser | None = held[1]
    return found


def choose(
    scores: torch.Tensor, bias: torch.Tensor | None, count: int, *, normalize: bool, factor: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns weights (float32) and numbers (int32) of the experts with the highest corrected scores.

    Args:
        scores: (tokens, experts), float32.
        bias: (experts,), that corrects which are chosen but not what they weigh.
        normalize: whether a token's weights add up to `factor`; where all are zero they stay so, as on GPUs.

    Returns:
        Each (tokens, count), contiguous.
    """
    if bias is None:
        weights, ids = torch.topk(scores, count, dim=-1, sorted=False)
    else:
        ids = torch.topk(scores + bias, count, dim=-1, sorted=False).indices
        weights = scores.gather(-1, ids)
    if normalize:
        total = weights.sum(dim=-1, keepdim=True)
        weights = weights / total.where(total != 0, 1.0)
    if factor != 1.0:
        weights = weights * factor
    return weights.contiguous(), ids.to(torch.int32).contiguous()
