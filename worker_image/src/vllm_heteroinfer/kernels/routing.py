"""Chooses each row's experts, and computes a whole mixture layer in one call. Imports torch, not vLLM."""

import ctypes
from dataclasses import dataclass
from typing import Final

import torch

from vllm_heteroinfer.kernels import linear
from vllm_heteroinfer.kernels.experts import MAX_CHOICES, PackedExperts
from vllm_heteroinfer.kernels.library import KernelLibrary

SCORES: Final = ("softmax", "sigmoid")
_LOGITS: Final = {torch.bfloat16: 1, torch.float32: 0}
"""The library's number for each type of logits."""


class _NativeRouting(ctypes.Structure):
    """`Routing` of source/linear.h."""

    _fields_ = (
        ("experts", ctypes.c_long),
        ("topk", ctypes.c_long),
        ("bias", ctypes.c_void_p),
        ("sigmoid", ctypes.c_long),
        ("normalize", ctypes.c_long),
        ("factor", ctypes.c_float),
    )


class _Layer(ctypes.Structure):
    """`Layer` of source/experts.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("w13", "w2", "scales13", "scales2", "gate")),
        ("hidden", ctypes.c_long),
        ("inner", ctypes.c_long),
        ("routing", _NativeRouting),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertChoice:
    """Rule by which a router chooses a row's experts from the row's logits.

    Attributes:
        topk: experts for each row, at most `experts`.
        bias: [experts], float32, contiguous; added to scores for the choice, but not for the weights.
        scoring: function that computes scores from logits, in float32: one of SCORES.
        normalize: whether a row's weights are scaled so that they add up to `factor`.
        factor: multiplies all weights.

    Raises:
        ValueError: a number, shape or dtype is out of range.
    """

    experts: int
    topk: int
    bias: torch.Tensor | None
    scoring: str
    normalize: bool
    factor: float

    def __post_init__(self) -> None:
        """Checks the rule, because the kernel reads raw pointers."""
        bias = self.bias
        is_valid_bias = bias is None or (
            bias.shape == (self.experts,) and bias.dtype == torch.float32 and bias.is_contiguous()
        )
        max_choices = min(self.experts, MAX_CHOICES)
        if not 0 < self.topk <= max_choices:
            raise ValueError(
                f"expert choice: topk must be 1 to {max_choices} of {self.experts} experts (got {self.topk})"
            )
        if self.scoring not in SCORES:
            raise ValueError(
                f"expert choice: scoring must be one of {', '.join(SCORES)} (got {self.scoring})"
            )
        if bias is not None and not is_valid_bias:
            raise ValueError(
                f"expert choice: bias must be None or a contiguous float32 tensor [{self.experts}] (got "
                f"{tuple(bias.shape)} {bias.dtype}, strides {bias.stride()})"
            )

    def _to_native(self) -> _NativeRouting:
        """Returns the rule for a call of the library. This object must outlive the result."""
        bias = None if self.bias is None else self.bias.data_ptr()
        sigmoid = self.scoring == "sigmoid"
        return _NativeRouting(self.experts, self.topk, bias, sigmoid, self.normalize, self.factor)


class Chooser:
    """Chooses experts by logits. Of two experts with equal scores, the lower number comes first."""

    def __init__(self, library: KernelLibrary, routing: ExpertChoice) -> None:
        self._call = library.calls.heteroinfer_choose_experts
        self._routing, self._native_routing = routing, routing._to_native()
        self._routing_address = ctypes.addressof(self._native_routing)

    def supports(self, logits: torch.Tensor) -> bool:
        """Returns whether `choose` supports these logits."""
        return supports_logits(logits, self._routing.experts)

    def choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns weights (float32) and numbers (int32) of the chosen experts, in the order of their scores.

        Args:
            logits: [rows, experts], bf16 or float32, cpu, contiguous.

        Returns:
            Each [rows, topk], contiguous.

        Raises:
            ValueError: the shape or dtype of the logits differs.
        """
        rows = _check_logits(logits, self._routing.experts)
        weights = logits.new_empty((rows, self._routing.topk), dtype=torch.float32)
        ids = logits.new_empty((rows, self._routing.topk), dtype=torch.int32)
        self._call(
            weights.data_ptr(),
            ids.data_ptr(),
            logits.data_ptr(),
            _LOGITS[logits.dtype],
            self._routing_address,
            rows,
        )
        return weights, ids


class Mixture:
    """A layer's router and routed experts in one call.

    The result is bit-identical to the results of the linear layer, `Chooser` and `experts` in turn. The
    object references its parts, because the kernel has only their addresses.
    """

    def __init__(
        self, library: KernelLibrary, routing: ExpertChoice, packed: PackedExperts, gate: torch.Tensor | None
    ) -> None:
        """Checks the parts, and builds the struct that the kernel reads by raw pointers.

        Args:
            gate: the router's weight, packed by `linear.pack`; None if callers pass logits.

        Raises:
            ValueError: the parts do not belong to one layer.
        """
        num_experts, hidden, inner = packed.w2.shape
        gate_fits = gate is None or (
            gate.shape == linear.packed_shape(num_experts, hidden)
            and gate.dtype == torch.bfloat16
            and gate.is_contiguous()
        )
        if routing.experts != num_experts or not gate_fits:
            raise ValueError(
                f"mixture: gate and routing must be for {num_experts} experts of {hidden} inputs (got gate "
                f"{None if gate is None else tuple(gate.shape)}, routing to {routing.experts} experts)"
            )
        self._referenced = (routing, packed, gate)  # so that their memory stays valid
        self._experts, self._hidden, self._gated = num_experts, hidden, gate is not None
        scales13, scales2 = (scale.data_ptr() for scale in packed.scales) if packed.scales else (None, None)
        self._layer = _Layer(
            packed.w13.data_ptr(),
            packed.w2.data_ptr(),
            scales13,
            scales2,
            None if gate is None else gate.data_ptr(),
            hidden,
            inner,
            routing._to_native(),
        )
        self._call, self._layer_address = library.calls.heteroinfer_mixture, ctypes.addressof(self._layer)

    def compute(self, x: torch.Tensor, logits: torch.Tensor | None) -> torch.Tensor:
        """Returns each row's weighted sum of its experts, contiguous, with the shape and dtype of x.

        Args:
            x: [rows, hidden], bf16, cpu, rows contiguous.
            logits: [rows, experts], bf16 or float32, contiguous; ignored if the layer has a gate.

        Raises:
            ValueError: a shape or dtype differs.
        """
        rows = x.shape[0]
        if x.dtype is not torch.bfloat16 or x.shape[1:] != (self._hidden,) or x.stride(1) != 1:
            raise ValueError(
                f"mixture: x must be [rows, {self._hidden}] bf16 with contiguous rows "
                f"(got {tuple(x.shape)} {x.dtype}, strides {x.stride()})"
            )
        if self._gated:  # the kernel computes the logits itself, and ignores their type
            logits_address, logits_type = None, _LOGITS[torch.bfloat16]
        elif logits is not None and _check_logits(logits, self._experts) == rows:
            logits_address, logits_type = logits.data_ptr(), _LOGITS[logits.dtype]
        else:
            shape = None if logits is None else tuple(logits.shape)
            raise ValueError(f"mixture: logits must have {rows} rows, as x has (got {shape})")
        y = x.new_empty((rows, self._hidden))
        self._call(
            self._layer_address,
            y.data_ptr(),
            self._hidden,
            x.data_ptr(),
            x.stride(0),
            logits_address,
            logits_type,
            rows,
        )
        return y


def supports_logits(logits: torch.Tensor, experts: int) -> bool:
    """Returns whether logits are [rows, experts], bf16 or float32, cpu, contiguous."""
    return (
        logits.ndim == 2
        and logits.shape[1] == experts
        and logits.dtype in _LOGITS
        and logits.device.type == "cpu"
        and logits.is_contiguous()
    )


def _check_logits(logits: torch.Tensor, experts: int) -> int:
    """Returns the number of rows of the logits; raises ValueError for unsupported logits."""
    if not supports_logits(logits, experts):
        raise ValueError(
            f"expert choice: logits must be [rows, {experts}] bf16 or float32, contiguous, on the CPU "
            f"(got {tuple(logits.shape)} {logits.dtype} on {logits.device}, strides {logits.stride()})"
        )
    return logits.shape[0]
