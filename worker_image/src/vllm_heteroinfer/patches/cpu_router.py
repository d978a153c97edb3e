"""The patch `cpu_router`: CPU ranks choose the same experts as GPU ranks.

For models without groups of experts, vLLM's router for CPUs has three faults:

- If scores are sigmoids (MiniMax-M2), the router fails in the first step.
- It ignores the bias that corrects a choice by softmax (ERNIE-4.5), and so chooses other experts without an
error.
- It computes softmax in the type of the logits, but GPUs use float32. Without normalization (OLMoE), bf16
  scaled all weights of a token by up to 6 %.

The patch is faster, too: eager ranks call our kernels once instead of five to nine operations of torch.
Imports vLLM.
Source: vllm/model_executor/layers/fused_moe/router/cpu_router.py::CPURouter._compute_routing@v0.32.0; the
GPU version is vllm/.../fused_moe/router/fused_topk_bias_router.py::fused_topk_bias.
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
"""Attribute of vLLM's router in which `_find_chooser` caches the address of the bias, and the `Chooser`."""
_SCORES: Final[dict[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "softmax": lambda logits: torch.softmax(logits, dim=-1),
    "sigmoid": torch.sigmoid,
}


def install() -> None:
    """Replaces the choice of experts in vLLM's CPU router in this process."""
    replace(CPU_ROUTER, _with_gpu_choice)


def routing_of(router: Any) -> ExpertChoice | None:
    """Returns the rule by which a router chooses experts, with a view of its bias.

    Returns None if our kernels do not support the rule.
    """
    bias = router.e_score_correction_bias
    has_own_choice = router.use_grouped_topk or router.custom_routing_function is not None
    chooses_by_hash = getattr(router, "_hash_indices_table", None) is not None
    if has_own_choice or chooses_by_hash or router.scoring_func not in SCORES:
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
        # vLLM's routers for GPUs apply the factor only if there is a bias; otherwise the model applies it.
        factor=1.0 if bias is None else router.routed_scaling_factor,
    )


def _with_gpu_choice(original: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> Callable[..., Any]:
    """Returns a compute_routing() that chooses the same experts as vLLM's GPU routers.

    It calls our kernels if they support the router, and otherwise operations of torch.
    """

    def compute_routing(
        self: Any,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        indices_type: torch.dtype | None,
        *,
        input_ids: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns weights and numbers of the chosen experts."""
        bias, scoring = self.e_score_correction_bias, self.scoring_func
        has_own_choice = self.use_grouped_topk or self.custom_routing_function is not None
        if has_own_choice or scoring not in _SCORES:
            return original(self, hidden_states, router_logits, indices_type, input_ids=input_ids)
        chooser = None if torch.compiler.is_compiling() else _find_chooser(self)
        if chooser is not None and chooser.supports(router_logits):
            return chooser.choose(router_logits)
        # vLLM's routers for GPUs apply the factor only if there is a bias; otherwise the model applies it.
        factor = 1.0 if bias is None else self.routed_scaling_factor
        scores = _SCORES[scoring](router_logits.float())
        return choose(scores, bias, self.top_k, normalize=self.renormalize, factor=factor)

    return compute_routing


def _find_chooser(router: Any) -> Chooser | None:
    """Returns the kernels' chooser for a router; None if torch must choose.

    The router caches the chooser. If the bias has moved, a new chooser is built, because the kernels have a
    raw pointer to the bias.
    """
    bias = router.e_score_correction_bias
    address = 0 if bias is None else bias.data_ptr()
    cached_address, chooser = router.__dict__.get(_CHOOSER, (None, None))
    if cached_address != address:
        library, routing = linear.find() if is_wanted(os.environ) else None, routing_of(router)
        chooser = None if library is None or routing is None else Chooser(library, routing)
        router.__dict__[_CHOOSER] = (address, chooser)
    result: Chooser | None = chooser
    return result


def choose(
    scores: torch.Tensor, bias: torch.Tensor | None, count: int, *, normalize: bool, factor: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns weights (float32) and ids (int32) of the experts with the highest corrected scores.

    Args:
        scores: (tokens, experts), float32.
        bias: (experts,), added to the scores for the choice, but not for the weights.
        count: number of experts for each token.
        normalize: whether a token's weights are scaled so that they add up to `factor`. If all weights are
            zero, they stay zero, as on GPUs.
        factor: multiplies all weights.

    Returns:
        Two tensors (tokens, count), contiguous.
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
