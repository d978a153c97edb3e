"""A layer's routed experts in the memory of a feed-forward rank. Imports torch, not vLLM."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Final, Protocol

import torch
from torch.nn import functional

from heteroinfer_contract.column_shares import Span
from heteroinfer_contract.errors import ContractError
from vllm_heteroinfer.feed_forward.expert_formats import ExpertShape, ExpertWeights
from vllm_heteroinfer.feed_forward.expert_reader import LayerReader
from vllm_heteroinfer.feed_forward.recipe import LayerRecipe
from vllm_heteroinfer.kernels import linear, weight_memory
from vllm_heteroinfer.kernels.coded import ELEMENTS, SHARED_COLUMNS, register
from vllm_heteroinfer.kernels.coded_experts import Activation, ActivationKind, CodedExperts, empty_part, put
from vllm_heteroinfer.kernels.experts import FP8, PackedExperts, experts, pack_expert
from vllm_heteroinfer.kernels.library import KernelLibrary, KernelsUnavailableError

_OAI_ALPHA, _OAI_LIMIT, _OAI_BETA = 1.702, 7.0, 1.0
"""gpt-oss' activation (vllm/model_executor/layers/activation.py::SwigluOAIAndMul@v0.32.0)."""
_KINDS: Final = {
    "silu": ActivationKind.SWISH,
    "gelu": ActivationKind.GELU,
    "gelu_tanh": ActivationKind.GELU_TANH,
    "relu2": ActivationKind.RELU2,
}
_UNGATED: Final = "_no_mul"
ALTERNATING: Final = "swigluoai"
"""The activation whose gates and ups alternate in the parameters."""


class Experts(Protocol):
    """Computes routed experts.

    Attributes:
        count: experts that this rank has.
        packed: tensors of the weights, of `num_bytes` in all.
        method: format and kernels, for the log.
    """

    count: int
    packed: Sequence[torch.Tensor]
    num_bytes: int
    method: str

    def compute(self, y: torch.Tensor, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> None:
        """Writes each row's weighted sum of its experts into y; an id that is not an expert adds nothing.

        Args:
            y: [rows, hidden], must not share memory with x.
            x: [rows, hidden].
            weights: [rows, topk], float32.
            ids: [rows, topk], int32.
        """


def activation_of(recipe: LayerRecipe) -> Activation:
    """Returns the activation; raises ContractError if no kernel supports it."""
    name = recipe.activation
    if name in {ALTERNATING, "swigluoai_uninterleave"}:
        return Activation(
            alpha=_OAI_ALPHA if recipe.alpha is None else recipe.alpha,
            limit=_OAI_LIMIT if recipe.limit is None else recipe.limit,
            offset=_OAI_BETA if recipe.beta is None else recipe.beta,
        )
    kind = _KINDS.get(name.removesuffix(_UNGATED))
    if kind is None:
        raise ContractError(
            f"experts: HeteroInfer's CPU kernels do not compute the activation {name!r} "
            f"(known: {', '.join(sorted(_KINDS))}, {ALTERNATING}). Leave these layers to the GPU"
        )
    gated = not name.endswith(_UNGATED) and name != "relu2"
    return Activation(kind=kind, gated=gated, limit=inf if recipe.limit is None else recipe.limit)


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnPart:
    """This rank's part of a layer: columns of all experts, or all columns of some experts."""

    columns: Span
    experts: Span


def load(reader: LayerReader, part: OwnPart, dtype: torch.dtype) -> Experts:
    """Reads and packs this rank's part of a layer's experts.

    Args:
        dtype: of inputs and outputs.

    Raises:
        ContractError: no kernel computes the format or the activation.
    """
    recipe = reader.recipe
    activation = activation_of(recipe)
    shape = ExpertShape(
        hidden=recipe.hidden,
        own=part.columns,
        padded=recipe.inner,
        gated=activation.gated,
        alternate=recipe.activation == ALTERNATING,
    )
    weights = ExpertWeights(reader, shape)
    library = _find_kernels()
    even = recipe.hidden % SHARED_COLUMNS == part.columns.count % SHARED_COLUMNS == 0
    biased = any(reader.has(name) for name in ("w13_bias", "w2_bias"))
    if library is None or dtype not in ELEMENTS or not even or weights.dense == torch.float32:
        if weights.dense is None:
            raise ContractError(
                f"experts: HeteroInfer's CPU kernels do not compute {weights.name} here (hidden "
                f"{recipe.hidden}, {part.columns.count} columns, {dtype}, "
                f"{'no kernels for this CPU' if library is None else 'sizes must be multiples of 32'}). Take "
                "the model in bf16, or leave these layers to the GPU"
            )
        return _Floats(weights, part, activation, biased=biased)
    plain = library.paths and activation == Activation() and not biased and dtype == torch.bfloat16
    if plain and (weights.dense == torch.bfloat16 or weights.in_blocks):
        return _Swish(library, weights, part, shape)
    return _InAnyFormat(library, weights, part, activation, dtype, biased=biased)


def _find_kernels() -> KernelLibrary | None:
    """Returns the kernels; on a CPU without AVX-512F, only the kernels for coded weights."""
    with contextlib.suppress(KernelsUnavailableError):
        return linear.find() or register()
    return None


class _Swish:
    """Experts in bf16 or FP8 blocks with SiLU."""

    def __init__(
        self, library: KernelLibrary, weights: ExpertWeights, part: OwnPart, shape: ExpertShape
    ) -> None:
        self._library, self.count = library, part.experts.count
        inner, hidden = part.columns.count, shape.hidden
        dense = weights.dense is not None
        dtype = torch.bfloat16 if dense else FP8
        w13 = weight_memory.empty((self.count, 2 * inner, hidden), dtype)
        w2 = weight_memory.empty((self.count, hidden, inner), dtype)
        for packed in (w13, w2):
            library.calls.heteroinfer_ask_for_huge_pages(packed.data_ptr(), packed.nbytes)
        of_w13, of_w2 = [], []
        for local in range(self.count):
            expert = part.experts.first + local
            for packed, gates in ((w13, True), (w2, False)):
                pack_expert(library, packed[local], weights.floats(expert, w13=gates), gates=gates)
            if not dense:
                of_w13.append(weights.block_scales(expert, w13=True))
                of_w2.append(weights.block_scales(expert, w13=False))
        scales = None if dense else (torch.stack(of_w13).contiguous(), torch.stack(of_w2).contiguous())
        self._packed = PackedExperts(w13=w13, w2=w2, scales=scales)
        self.packed: Sequence[torch.Tensor] = (w13, w2, *(scales or ()))
        self.num_bytes = sum(each.nbytes for each in self.packed)
        self.method = f"{weights.name} ({', '.join(library.paths)})"

    def compute(self, y: torch.Tensor, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> None:
        experts(self._library, y, x, self._packed, weights=weights, ids=ids)


class _InAnyFormat:
    """Experts in any format of the coded kernels."""

    def __init__(
        self,
        library: KernelLibrary,
        weights: ExpertWeights,
        part: OwnPart,
        activation: Activation,
        dtype: torch.dtype,
        *,
        biased: bool,
    ) -> None:
        self.count = part.experts.count
        packed: dict[bool, Any] = {}
        biases: dict[bool, list[torch.Tensor]] = {True: [], False: []}
        for local in range(self.count):
            expert = part.experts.first + local
            for w13 in (True, False):
                weight = weights.part(expert, w13=w13)
                if local == 0:
                    packed[w13] = empty_part(
                        library, weight.format, self.count, weight.columns, weight.inputs
                    )
                put(library, packed[w13], local, weight, gated=w13 and activation.gated)
                bias = weights.bias(expert, w13=w13) if biased else None
                if bias is not None:
                    biases[w13].append(bias)
        both = [torch.stack(found) if found else None for found in (biases[True], biases[False])]
        self._experts = CodedExperts(
            library, packed[True], packed[False], activation, dtype=dtype, biases=both
        )
        self.packed: Sequence[torch.Tensor] = [each.packed for each in packed.values()]
        self.num_bytes = sum(each.nbytes for each in self.packed)
        self.method = f"{weights.name} ({', '.join(library.coded_paths)})"

    def compute(self, y: torch.Tensor, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> None:
        self._experts.compute(y, x, weights, ids)


class _Floats:
    """Unquantized experts of sizes and types without kernels, computed by torch one expert at a time."""

    def __init__(
        self, weights: ExpertWeights, part: OwnPart, activation: Activation, *, biased: bool
    ) -> None:
        self._activation, self.count = activation, part.experts.count
        self._layers: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]] = []
        tensors: list[torch.Tensor] = []
        for expert in range(part.experts.first, part.experts.end):
            w13, w2 = (_copy_in_own_memory(weights.floats(expert, w13=which)) for which in (True, False))
            bias13, bias2 = (weights.bias(expert, w13=w) if biased else None for w in (True, False))
            self._layers.append((w13, w2, bias13, bias2))
            tensors += (w13, w2)
        self.packed: Sequence[torch.Tensor] = tensors
        self.num_bytes = sum(each.nbytes for each in self.packed)
        self.method = f"{weights.name} (torch)"

    def compute(self, y: torch.Tensor, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> None:
        total = torch.zeros(y.shape, dtype=torch.float32)
        for expert, (w13, w2, bias13, bias2) in enumerate(self._layers):
            rows, choices = (ids == expert).nonzero(as_tuple=True)
            if not len(rows):
                continue
            inner = self._activate(
                functional.linear(
                    x[rows].to(w13.dtype), w13, None if bias13 is None else bias13.to(w13.dtype)
                )
            )
            out = functional.linear(inner, w2, None if bias2 is None else bias2.to(w2.dtype))
            total.index_add_(0, rows, out.float() * weights[rows, choices].unsqueeze(1))
        y.copy_(total)

    def _activate(self, sums: torch.Tensor) -> torch.Tensor:
        how = self._activation
        gate, up = sums.chunk(2, -1) if how.gated else (sums, None)
        gate = gate.clamp(max=how.limit)
        if how.kind is ActivationKind.SWISH:
            made = gate * torch.sigmoid(how.alpha * gate)
        elif how.kind is ActivationKind.RELU2:
            made = torch.relu(gate).square()
        else:
            approximate = "tanh" if how.kind is ActivationKind.GELU_TANH else "none"
            made = functional.gelu(gate, approximate=approximate)
        return made if up is None else made * (up.clamp(-how.limit, how.limit) + how.offset)


def _copy_in_own_memory(tensor: torch.Tensor) -> torch.Tensor:
    return weight_memory.empty(tensor.shape, tensor.dtype).copy_(tensor)
