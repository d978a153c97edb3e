"""A layer's routed experts in the memory of a feed-forward rank. Imports torch, not vLLM.

w13 is vLLM's name for an expert's gates and ups, and w2 for its projection back to the hidden size.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Final, Protocol

import torch
from torch.nn import functional

from heteroinfer_contract.column_shares import Span
from heteroinfer_contract.errors import ContractError
from vllm_heteroinfer.feed_forward.expert_formats import ExpertShape, ExpertWeights
from vllm_heteroinfer.feed_forward.expert_reader import LayerReader
from vllm_heteroinfer.feed_forward.recipe import LayerRecipe
from vllm_heteroinfer.kernels import linear, weight_memory
from vllm_heteroinfer.kernels.coded import ELEMENTS, SHARED_COLUMNS, Code, Format, register
from vllm_heteroinfer.kernels.coded_experts import (
    Activation,
    ActivationKind,
    CodedExperts,
    PackedPart,
    allocate_part,
    pack_expert_into,
)
from vllm_heteroinfer.kernels.experts import FP8, PackedExperts, experts, pack_expert
from vllm_heteroinfer.kernels.library import KernelLibrary, KernelsUnavailableError

_OAI_ALPHA, _OAI_LIMIT, _OAI_BETA = 1.702, 7.0, 1.0
"""Constants of gpt-oss' activation (vllm/model_executor/layers/activation.py::SwigluOAIAndMul@v0.32.0)."""
_STEP: Final = "swiglustep"
_STEP_LIMIT: Final = 7.0
"""Name and limit of Step-3.5's activation. vLLM's experts have no other limit for this activation
(vllm/model_executor/layers/activation.py::swiglustep_and_mul_triton@v0.32.0)."""
_KINDS: Final = {
    "silu": ActivationKind.SWISH,
    "gelu": ActivationKind.GELU,
    "gelu_tanh": ActivationKind.GELU_TANH,
    "relu2": ActivationKind.RELU2,
}
_UNGATED: Final = "_no_mul"
"""End of the name of an activation without a gate, in vLLM's MoEActivation."""
ALTERNATING: Final = "swigluoai"
"""The activation whose gates and ups alternate in the parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedMatrix:
    """The packed w13 or w2 of a rank's experts, with all that another process needs to unpack them.

    Attributes:
        packed: [experts, ...], contiguous.
        columns: number of this rank's columns. In a packed w13, blocks of 32 gates and 32 ups alternate.
        inputs: number of this rank's inputs.
        format: format of the codes, and of the scales in the headers of blocks; None if the matrix is not
            packed. Then w13 has all gates before all ups.
        has_headers: whether blocks of columns have headers (kernels/source/coded.h).
        block_scales: a float32 scale for each 128 columns x 128 inputs, if the scales are not in headers.
    """

    packed: torch.Tensor
    columns: int
    inputs: int
    format: Format | None
    has_headers: bool = False
    block_scales: torch.Tensor | None = None

    @classmethod
    def of(
        cls, weights: torch.Tensor, form: Format | None, *, block_scales: torch.Tensor | None = None
    ) -> "PackedMatrix":
        """Describes weights [experts, columns, inputs] without headers.

        Args:
            form: format of the codes; None if the weights are not packed.
        """
        _, columns, inputs = weights.shape
        return cls(packed=weights, columns=columns, inputs=inputs, format=form, block_scales=block_scales)


Matrices = tuple[PackedMatrix, PackedMatrix]
"""w13 and w2."""


class Experts(Protocol):
    """A rank's packed experts of one layer, and their computation.

    Attributes:
        count: number of experts that this rank has.
        packed: tensors of the weights; together they have `num_bytes` bytes.
        method: format and kernels, for the log.
        matrices: w13 and w2 for a GPU that computes the experts itself; None if no GPU can do this.
    """

    count: int
    packed: Sequence[torch.Tensor]
    num_bytes: int
    method: str
    matrices: Matrices | None

    def compute(self, y: torch.Tensor, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> None:
        """Writes each row's weighted sum of its experts into y. An id that is not an expert adds nothing.

        Args:
            y: [rows, hidden], must not share memory with x.
            x: [rows, hidden].
            weights: [rows, topk], float32.
            ids: [rows, topk], int32.
        """


def activation_of(recipe: LayerRecipe) -> Activation:
    """Returns the activation of a layer's experts; raises ContractError if no kernel supports it."""
    name = recipe.activation
    if name in {ALTERNATING, "swigluoai_uninterleave"}:  # gpt-oss; its config may replace the constants
        return Activation(
            alpha=_OAI_ALPHA if recipe.alpha is None else recipe.alpha,
            limit=_OAI_LIMIT if recipe.limit is None else recipe.limit,
            offset=_OAI_BETA if recipe.beta is None else recipe.beta,
        )
    if name == _STEP:
        return Activation(kind=ActivationKind.SWISH_LIMITED, limit=_STEP_LIMIT)
    kind = _KINDS.get(name.removesuffix(_UNGATED))
    if kind is None:
        raise ContractError(
            "experts: activation must be one that HeteroInfer's CPU kernels compute: "
            f"{', '.join(sorted(_KINDS))}, {_STEP}, {ALTERNATING} (got {name!r}). Use "
            "spec.parallelism.mode: Pipeline with GPU roles only"
        )
    gated = not name.endswith(_UNGATED) and name != "relu2"  # relu2 never has a gate
    return Activation(kind=kind, gated=gated, limit=inf if recipe.limit is None else recipe.limit)


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnPart:
    """This rank's part of a layer: columns of all experts, or all columns of some experts."""

    columns: Span
    experts: Span


def load_experts(reader: LayerReader, part: OwnPart, dtype: torch.dtype) -> Experts:
    """Reads and packs this rank's part of a layer's experts, for the fastest kernel that supports it.

    Args:
        dtype: type of inputs and outputs.

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
    has_supported_sizes = recipe.hidden % SHARED_COLUMNS == 0 and part.columns.count % SHARED_COLUMNS == 0
    has_biases = any(reader.has(name) for name in ("w13_bias", "w2_bias"))
    if (
        library is None  # no kernel supports this CPU
        or dtype not in ELEMENTS
        or not has_supported_sizes
        or weights.unquantized_dtype == torch.float32
    ):
        # torch computes the layer without our kernels, but only unquantized weights.
        if weights.unquantized_dtype is None:
            raise _build_refusal(library, weights, recipe, part, dtype)
        return _TorchExperts(weights, part, activation, biased=has_biases)
    # The kernels for bf16 and FP8 with SiLU are faster than the kernels for any format. They need AVX-512.
    has_avx512 = bool(library.paths)
    is_plain_silu = activation == Activation() and not has_biases
    has_swish_format = weights.unquantized_dtype == torch.bfloat16 or weights.has_fp8_blocks
    if has_avx512 and is_plain_silu and dtype == torch.bfloat16 and has_swish_format:
        return _SwishExperts(library, weights, part, shape)
    return _CodedFormatExperts(library, weights, part, activation, dtype, biased=has_biases)


def _build_refusal(
    library: KernelLibrary | None,
    weights: ExpertWeights,
    recipe: LayerRecipe,
    part: OwnPart,
    dtype: torch.dtype,
) -> ContractError:
    """Returns the error for quantized experts that no kernel of this CPU computes."""
    if library is None:
        reason = "the kernels were not compiled, or do not support this CPU"
    elif dtype not in ELEMENTS:
        types = ", ".join(str(each).removeprefix("torch.") for each in ELEMENTS)
        reason = f"engine.dtype must be one of {types} (got {str(dtype).removeprefix('torch.')})"
    else:
        reason = (
            f"hidden size and columns per rank must be multiples of {SHARED_COLUMNS} (got {recipe.hidden} "
            f"and {part.columns.count})"
        )
    return ContractError(
        f"experts: HeteroInfer's CPU kernels cannot compute this layer in {weights.name}: {reason}. Use the "
        "bf16 version of the model, or lower feedForward.layers, so that the GPU computes the layer"
    )


def _describe_part(part: PackedPart) -> PackedMatrix:
    """Describes a matrix that `kernels.coded_experts` packed, so that another process can unpack it."""
    return PackedMatrix(
        packed=part.packed, columns=part.columns, inputs=part.inputs, format=part.format, has_headers=True
    )


def _find_kernels() -> KernelLibrary | None:
    """Returns the kernels, or None if this process cannot use any.

    On a CPU without AVX-512F, the library has only kernels for coded weights.
    """
    with contextlib.suppress(KernelsUnavailableError):
        return linear.find() or register()
    return None


class _SwishExperts:
    """Experts in bf16 or FP8 blocks with SiLU, for the kernels of `kernels.experts`."""

    def __init__(
        self, library: KernelLibrary, weights: ExpertWeights, part: OwnPart, shape: ExpertShape
    ) -> None:
        """Reads this rank's part of each expert, and packs it."""
        self._library, self.count = library, part.experts.count
        inner, hidden = part.columns.count, shape.hidden
        is_unquantized = weights.unquantized_dtype is not None
        dtype = torch.bfloat16 if is_unquantized else FP8
        w13 = weight_memory.empty((self.count, 2 * inner, hidden), dtype)
        w2 = weight_memory.empty((self.count, hidden, inner), dtype)
        for packed in (w13, w2):
            library.calls.heteroinfer_ask_for_huge_pages(packed.data_ptr(), packed.nbytes)
        w13_scales: list[torch.Tensor] = []
        w2_scales: list[torch.Tensor] = []
        for local in range(self.count):
            expert = part.experts.first + local
            for packed, is_w13 in ((w13, True), (w2, False)):
                floats = weights.read_floats(expert, w13=is_w13)
                pack_expert(library, packed[local], floats, gates=is_w13)
            if not is_unquantized:
                w13_scales.append(weights.block_scales(expert, w13=True))
                w2_scales.append(weights.block_scales(expert, w13=False))
        scales = None if is_unquantized else (_join_scales(w13_scales), _join_scales(w2_scales))
        self._packed = PackedExperts(w13=w13, w2=w2, scales=scales)
        self.packed: Sequence[torch.Tensor] = (w13, w2, *(scales or ()))
        self.num_bytes = sum(tensor.nbytes for tensor in self.packed)
        self.method = f"{weights.name} ({', '.join(library.paths)})"
        form = Format(code=Code.BF16 if is_unquantized else Code.FP8)
        joined13, joined2 = scales or (None, None)
        self.matrices: Matrices | None = (
            PackedMatrix.of(w13, form, block_scales=joined13),
            PackedMatrix.of(w2, form, block_scales=joined2),
        )

    def compute(self, y: torch.Tensor, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> None:
        experts(self._library, y, x, self._packed, weights=weights, ids=ids)


class _MatrixPacker:
    """Packs the w13 or the w2 of a rank's experts one by one, and collects their biases."""

    def __init__(
        self, library: KernelLibrary, weights: ExpertWeights, num_experts: int, *, w13: bool, gated: bool
    ) -> None:
        self._library, self._weights, self._num_experts = library, weights, num_experts
        self._w13, self._gated = w13, gated
        self._part: PackedPart | None = None
        self._biases: list[torch.Tensor] = []

    def pack(self, local: int, expert: int, *, biased: bool) -> None:
        """Reads the matrix of an expert, and packs the matrix.

        The first call allocates memory for all experts, because all have the first expert's format and size.

        Args:
            local: number of the expert among this rank's experts.
            expert: number of the expert in the layer.
            biased: whether the layer's experts have biases.
        """
        weight = self._weights.read_coded(expert, w13=self._w13)
        if self._part is None:
            self._part = allocate_part(
                self._library, weight.format, self._num_experts, weight.columns, weight.inputs
            )
        pack_expert_into(self._library, self._part, local, weight, gated=self._w13 and self._gated)
        bias = self._weights.read_bias(expert, w13=self._w13) if biased else None
        if bias is not None:
            self._biases.append(bias)

    @property
    def part(self) -> PackedPart:
        """The packed matrices of all experts. `pack` must have been called."""
        assert self._part is not None
        return self._part

    @property
    def biases(self) -> torch.Tensor | None:
        """The biases of all experts, [experts, columns]; None without biases."""
        return torch.stack(self._biases) if self._biases else None


class _CodedFormatExperts:
    """Experts in any format, for the kernels of `kernels.coded_experts`."""

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
        """Reads this rank's part of each expert, and packs the part without a change of its format."""
        self.count = part.experts.count
        w13 = _MatrixPacker(library, weights, self.count, w13=True, gated=activation.gated)
        w2 = _MatrixPacker(library, weights, self.count, w13=False, gated=activation.gated)
        for local in range(self.count):
            expert = part.experts.first + local
            w13.pack(local, expert, biased=biased)
            w2.pack(local, expert, biased=biased)
        biases = (w13.biases, w2.biases)
        self._experts = CodedExperts(library, w13.part, w2.part, activation, dtype=dtype, biases=biases)
        self.packed: Sequence[torch.Tensor] = [w13.part.packed, w2.part.packed]
        self.num_bytes = sum(each.nbytes for each in self.packed)
        self.method = f"{weights.name} ({', '.join(library.coded_paths)})"
        # A GPU may compute some of these experts in long prompts. Its kernels need gated experts without
        # biases.
        self.matrices: Matrices | None = None
        if activation.gated and not biased:
            self.matrices = (_describe_part(w13.part), _describe_part(w2.part))

    def compute(self, y: torch.Tensor, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> None:
        self._experts.compute(y, x, weights, ids)


class _TorchExperts:
    """Unquantized experts that no kernel supports. torch computes them one expert at a time."""

    def __init__(
        self, weights: ExpertWeights, part: OwnPart, activation: Activation, *, biased: bool
    ) -> None:
        """Reads this rank's part of each expert. All w13 become one tensor, and all w2 another."""
        self._activation, self.count = activation, part.experts.count
        own_experts = range(part.experts.first, part.experts.end)
        w13, self._w13_biases = _read_all(weights, own_experts, w13=True, biased=biased)
        w2, self._w2_biases = _read_all(weights, own_experts, w13=False, biased=biased)
        self._weights = (w13, w2)
        self.packed: Sequence[torch.Tensor] = self._weights
        # A GPU may compute some of these experts in long prompts. Its kernels need gated experts without
        # biases.
        self.matrices: Matrices | None = None
        if activation.gated and not biased:
            self.matrices = (PackedMatrix.of(w13, None), PackedMatrix.of(w2, None))
        self.num_bytes = sum(each.nbytes for each in self.packed)
        self.method = f"{weights.name} (torch)"

    def compute(self, y: torch.Tensor, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> None:
        """Computes the experts one by one, each for the rows that chose it."""
        total = torch.zeros(y.shape, dtype=torch.float32)
        all_experts = zip(*self._weights, self._w13_biases, self._w2_biases, strict=True)
        for expert, (w13, w2, bias13, bias2) in enumerate(all_experts):
            # The rows that chose the expert; `choices` is the expert's place among the choices of each row.
            rows, choices = (ids == expert).nonzero(as_tuple=True)
            if not len(rows):
                continue
            sums = functional.linear(
                x[rows].to(w13.dtype), w13, None if bias13 is None else bias13.to(w13.dtype)
            )
            inner = self._activate(sums)
            out = functional.linear(inner, w2, None if bias2 is None else bias2.to(w2.dtype))
            total.index_add_(0, rows, out.float() * weights[rows, choices].unsqueeze(1))
        y.copy_(total)

    def _activate(self, sums: torch.Tensor) -> torch.Tensor:
        """Returns the input of w2: the activation of the sums of w13."""
        activation = self._activation
        if not activation.gated:
            return self._activate_gate(sums)
        gate, up = sums.chunk(2, -1)
        limited_up = up.clamp(-activation.limit, activation.limit)
        return self._activate_gate(gate) * (limited_up + activation.offset)

    def _activate_gate(self, gate: torch.Tensor) -> torch.Tensor:
        """Returns the function of the gate. SWISH_LIMITED limits its values, other kinds limit the gate."""
        activation = self._activation
        if activation.kind is ActivationKind.SWISH_LIMITED:
            values = gate * torch.sigmoid(activation.alpha * gate)
            return values.clamp(max=activation.limit)
        gate = gate.clamp(max=activation.limit)
        if activation.kind is ActivationKind.SWISH:
            return gate * torch.sigmoid(activation.alpha * gate)
        if activation.kind is ActivationKind.RELU2:
            return torch.relu(gate).square()
        approximate = "tanh" if activation.kind is ActivationKind.GELU_TANH else "none"
        return functional.gelu(gate, approximate=approximate)


def _read_all(
    weights: ExpertWeights, own_experts: range, *, w13: bool, biased: bool
) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """Reads w13 or w2 of a rank's experts. Returns [experts, columns, inputs], and each expert's bias."""
    sample = weights.read_floats(own_experts[0], w13=w13)
    all_experts = weight_memory.empty((len(own_experts), *sample.shape), sample.dtype)
    for local, expert in enumerate(own_experts):
        # A copy, because `read_floats` may return a view of a file.
        all_experts[local].copy_(weights.read_floats(expert, w13=w13))
    biases = [weights.read_bias(expert, w13=w13) if biased else None for expert in own_experts]
    return all_experts, biases


def _join_scales(scales: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the scales of all experts as one tensor in the memory for packed weights."""
    joined = torch.stack(tuple(scales))
    return weight_memory.empty(joined.shape, joined.dtype).copy_(joined)
