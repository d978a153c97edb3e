"""The patch `cpu_mixture`: eager CPU ranks compute a layer's router, choice and routed experts in one call.

The result equals, bit by bit, the results of the patches `cpu_linear`, `cpu_router` and `cpu_experts` in
sequence. vLLM's own function still serves layers with shared experts, transforms of inputs or outputs,
experts split over ranks, other routers or weights that our kernels did not pack, and compiled models.
Imports vLLM.
Source: vllm/model_executor/layers/fused_moe/runner/moe_runner.py::MoERunner.forward@v0.32.0.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUExpertsFp8, CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.prepare_finalize.no_dp_ep import MoEPrepareAndFinalizeNoDPEPModular
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.linear import ReplicatedLinear, UnquantizedLinearMethod

from vllm_heteroinfer.kernels.linear_layers import is_wanted
from vllm_heteroinfer.kernels.routing import ExpertChoice, Mixture, supports_logits
from vllm_heteroinfer.patches.cpu_experts import check_limit, library_of, packed_experts
from vllm_heteroinfer.patches.cpu_router import routing_of
from vllm_heteroinfer.patches.registry import CPU_MIXTURE
from vllm_heteroinfer.patches.replacing import replace

_CHOICE: Final = "heteroinfer_mixture"
"""Attribute of a runner of vLLM, which computes a mixture layer, with the runner's `_KernelChoice`."""
_PACKED_AXES: Final = 4
"""Axes of a weight packed by `linear.pack`. vLLM's own weights have two axes or none."""


def install() -> None:
    """Replaces vLLM's MoE forward by `_with_mixture_kernel` in this process.

    Does nothing if HETEROINFER_CPU_LINEAR=onednn.
    """
    if is_wanted(os.environ):
        replace(CPU_MIXTURE, _with_mixture_kernel)


@dataclass(frozen=True, slots=True, kw_only=True)
class _KernelChoice:
    """The kernels chosen for a runner, and the state for which the choice is valid.

    Attributes:
        mixture: computes the layer; None if vLLM computes the layer.
        weights: for each tensor whose raw pointer `mixture` has: the mapping that contains the tensor, its
            key, and its address when the kernels were chosen.
        methods: mapping that contains the `quant_method` of the runner's experts.
        method: the `quant_method` for which the kernels were chosen.
        hidden: hidden size.
        num_logits: number of router logits that the model passes for each row; 0 if the runner computes the
            logits itself, by its gate.
    """

    mixture: Mixture | None
    weights: tuple[tuple[Mapping[str, Any], str, int], ...] = ()
    methods: Mapping[str, Any]
    method: Any
    hidden: int = 0
    num_logits: int = 0

    def is_valid(self) -> bool:
        """Returns whether the choice still holds for the runner.

        The weights must still be at the same addresses, and the experts must still have the same
        `quant_method`.
        """
        for owner, name, address in self.weights:
            tensor = owner.get(name)
            if tensor is None or tensor.data_ptr() != address:
                return False
        return self.methods.get("quant_method") is self.method


def _with_mixture_kernel(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Returns a forward() that computes a layer in one call of our kernels.

    It calls vLLM's `original` for layers and inputs that our kernels do not support.
    """

    def forward(
        self: Any,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        input_ids: torch.Tensor | None = None,
        shared_experts_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns the output of the experts. Chooses the kernels again if the weights have moved."""
        if torch.compiler.is_compiling():
            return original(self, hidden_states, router_logits, input_ids, shared_experts_input)
        kept_choice = self.__dict__.get(_CHOICE)
        if kept_choice is None or not kept_choice.is_valid():
            kept_choice = self.__dict__[_CHOICE] = _choose_kernels(self)
        mixture, router = kept_choice.mixture, self.router
        records_choices = router.capture_fn is not None or router._routing_replay_out is not None
        if (
            mixture is None
            or shared_experts_input is not None
            or records_choices  # our kernels do not return the chosen experts
            or not _supports_inputs(kept_choice, hidden_states, router_logits)
        ):
            return original(self, hidden_states, router_logits, input_ids, shared_experts_input)
        return mixture.compute(hidden_states, router_logits)

    return forward


def _supports_inputs(kept_choice: _KernelChoice, x: torch.Tensor, logits: torch.Tensor) -> bool:
    """Returns whether our kernels support these inputs.

    If the runner's gate computes the logits, `logits` does not matter.
    """
    supports_rows = (
        x.dtype is torch.bfloat16
        and x.ndim == 2
        and x.shape[0] > 0
        and x.shape[1] == kept_choice.hidden
        and x.stride(1) == 1
    )
    if not supports_rows or not kept_choice.num_logits:
        return supports_rows
    return len(logits) == len(x) and supports_logits(logits, kept_choice.num_logits)


def _choose_kernels(runner: Any) -> _KernelChoice:
    """Chooses the kernels for a runner, for its current weights.

    Stores the address of each weight, because the kernels read the weights by raw pointers.
    """
    routed = runner.routed_experts
    # torch keeps an attribute that is a module in `_modules`, and every other attribute in `__dict__`.
    methods = routed._modules if "quant_method" in routed._modules else routed.__dict__
    method = routed.quant_method
    routing = _find_routing(runner) if _consists_of_supported_parts(runner) else None
    library, gate = library_of(routed), runner.gate
    supports_gate = gate is None or _has_packed_weight(gate)
    if library is None or routing is None or not supports_gate:
        return _KernelChoice(mixture=None, methods=methods, method=method)
    experts = packed_experts(method.moe_kernel.fused_experts, routed.w13_weight.data, routed.w2_weight.data)
    mixture = Mixture(library, routing, experts, None if gate is None else gate.weight.data)
    parameters = routed._parameters
    owners: list[tuple[Any, str]] = [(parameters, "w13_weight"), (parameters, "w2_weight")]
    if gate is not None:
        owners.append((gate._parameters, "weight"))
    if routing.bias is not None:
        owners.append((runner.router.__dict__, "e_score_correction_bias"))
    return _KernelChoice(
        mixture=mixture,
        weights=tuple((owner, name, owner[name].data_ptr()) for owner, name in owners),
        methods=methods,
        method=method,
        hidden=experts.w2.shape[1],
        num_logits=0 if gate is not None else routing.experts,
    )


def _find_routing(runner: Any) -> ExpertChoice | None:
    """Returns the rule by which the router chooses experts; None if our kernels do not support the router."""
    router = runner.router
    # With `eplb_state`, vLLM moves experts between ranks to balance the load.
    if type(router) is not CPURouter or router.eplb_state is not None:
        return None
    return routing_of(router)


def _consists_of_supported_parts(runner: Any) -> bool:
    """Returns whether a runner has only a router and experts of classes that our kernels support.

    Raises:
        ContractError: the model limits its experts' activations, and no CPU kernel applies the limit.
    """
    routed, config = runner.routed_experts, runner.moe_config
    kernel = getattr(routed.quant_method, "moe_kernel", None)
    other_parts = (
        runner._shared_experts,
        runner.shared_expert_gate,
        runner.routed_input_transform,
        runner.routed_output_transform,
        routed.expert_map,
    )
    parallel_sizes = {config.tp_size, config.ep_size, config.dp_size, config.pcp_size}
    if (
        type(runner) is not MoERunner
        or type(routed) is not RoutedExperts
        or any(each is not None for each in other_parts)
        or parallel_sizes != {1}  # ranks divide the experts
        or config.is_sequence_parallel
        or runner.routed_scaling_factor != 1.0
        or routed.apply_router_weight_on_input
        or kernel is None
        or type(kernel.prepare_finalize) is not MoEPrepareAndFinalizeNoDPEPModular
        or not isinstance(kernel.fused_experts, CPUUnquantizedExperts | CPUExpertsFp8)
    ):
        return False
    check_limit(kernel.fused_experts)
    return True


def _has_packed_weight(gate: Any) -> bool:
    """Returns whether a router's layer is a plain product with a weight that our kernels packed.

    Output in float32 is allowed, because it has no more digits than bf16: `GateLinear.forward` rounds logits
    to bf16 before it widens them.
    """
    return (
        type(gate) in {GateLinear, ReplicatedLinear}
        and type(gate.quant_method) is UnquantizedLinearMethod
        and gate.bias is None
        and gate.weight.ndim == _PACKED_AXES
        and getattr(gate, "out_dtype", None) in {None, torch.bfloat16, torch.float32}
        and hasattr(gate, "cpu_linear")  # the attribute exists once a kernel was chosen for the layer
    )
