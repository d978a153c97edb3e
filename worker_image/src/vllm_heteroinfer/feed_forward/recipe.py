"""The recipe of a stage's experts and MLPs: the regions of files that fill their parameters. Pure.

The rank with attention writes the recipe, because only that rank builds the model's class. Feed-forward ranks
read the experts by the recipe and need neither the class, nor its configuration, nor the names of tensors.
"""

import base64
import json
import math
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from heteroinfer_contract.errors import ContractError

VALUES: Final = -1
"""File number of a piece whose values are in the recipe."""


def recipe_key(rank: int) -> str:
    """Returns the key of a rank's recipe in the group's store."""
    return f"feed-forward/recipe/{rank}"


@dataclass(frozen=True, slots=True)
class Piece:
    """A region of a parameter, and the region of a file that fills it.

    Attributes:
        start: first index of the region in each dimension of the parameter.
        size: number of elements of the region in each dimension.
        file: index of the file in the recipe, or VALUES.
        offset: byte of the region's first element in the file.
        dtype: type of the elements in the file, such as "bfloat16".
        strides: distance of neighbours in the file, in elements, for each dimension of the parameter.
        values: bytes of all elements in hexadecimal digits, for VALUES.
    """

    start: tuple[int, ...]
    size: tuple[int, ...]
    file: int
    offset: int
    dtype: str
    strides: tuple[int, ...]
    values: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertParameter:
    """A parameter of a layer's experts, as vLLM's method creates it. The first dimension counts experts."""

    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[Piece, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRecipe:
    """A layer's experts, or its MLP.

    Attributes:
        experts: 1 for an MLP.
        topk: experts per row; 0 for an MLP.
        activation: value of vLLM's MoEActivation.
        limit: upper limit of gate values, and of the magnitude of up values; None without a limit.
        alpha: factor in the sigmoid of the gate; None for the activation's own factor.
        beta: number that is added to up values; None for the activation's own number.
        method: name of vLLM's method that created the parameters.
    """

    experts: int
    topk: int
    hidden: int
    inner: int
    activation: str
    method: str
    parameters: Mapping[str, ExpertParameter]
    limit: float | None = None
    alpha: float | None = None
    beta: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeFile:
    """A file of the checkpoint.

    Attributes:
        name: relative to the model's folder.
        digest: SHA-256 of the header, which lists all tensors and their places.
    """

    name: str
    num_bytes: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The layers that feed-forward ranks compute for a rank with attention, and the files with their weights.

    Attributes:
        dtype: type of rows and answers, such as "bfloat16".
        max_rows: number of rows of the longest ask.
        unit: number of neighbouring columns of an expert or MLP that must be on the same rank.
        dummy: whether the weights are random numbers (`--load-format dummy`).
    """

    layers: Mapping[int, LayerRecipe]
    dtype: str
    max_rows: int
    unit: int
    files: Sequence[RecipeFile] = ()
    dummy: bool = False

    @property
    def hidden(self) -> int:
        """Number of elements in a row, which is the same in all layers."""
        return self._row_sizes[0]

    @property
    def topk(self) -> int:
        """Number of experts that each row chooses, which is the same in all layers; 0 for MLPs."""
        return self._row_sizes[1]

    @property
    def _row_sizes(self) -> tuple[int, int]:
        """Number of elements of a row, and number of experts that a row chooses.

        Both are the same in all layers, because all layers use one slab, whose rows have one size.

        Raises:
            ContractError: the numbers differ between layers.
        """
        rows = {(layer.hidden, layer.topk) for layer in self.layers.values()}
        if len(rows) != 1:
            raise ContractError(
                "feed-forward ranks: all layers must have the same hidden size and the same number of "
                f"experts per token (got {_describe_rows(rows)}). Use spec.parallelism.mode: Pipeline"
            )
        return rows.pop()

    def to_text(self) -> str:
        """Returns the recipe as compressed text (JSON, zlib, base64) for the group's store."""
        document = {
            **{name: getattr(self, name) for name in ("dtype", "max_rows", "unit", "dummy")},
            "files": [asdict(file) for file in self.files],
            "layers": {str(number): _layer_to_json(layer) for number, layer in self.layers.items()},
        }
        packed = zlib.compress(json.dumps(document, separators=(",", ":")).encode(), level=3)
        return base64.b64encode(packed).decode()

    @classmethod
    def from_text(cls, text: str) -> "Recipe":
        """Reads the text of `to_text`."""
        document = json.loads(zlib.decompress(base64.b64decode(text)))
        files = tuple(RecipeFile(**file) for file in document.pop("files"))
        layers = {int(number): _layer_from_json(layer) for number, layer in document.pop("layers").items()}
        return cls(layers=layers, files=files, **document)


def _describe_rows(rows: Collection[tuple[int, int]]) -> str:
    """Describes sizes of rows, such as "4096 elements of an MLP, 4096 elements with 8 experts"."""
    return ", ".join(f"{hidden} elements {_describe_topk(topk)}" for hidden, topk in sorted(rows))


def _describe_topk(topk: int) -> str:
    """Describes the experts of a row, such as "with 8 experts"."""
    if not topk:
        return "of an MLP"
    return f"with {topk} expert{'' if topk == 1 else 's'}"


def _layer_to_json(layer: LayerRecipe) -> dict[str, Any]:
    """Returns a layer's recipe as JSON. To save space, parameters and pieces have no names."""
    plain = {name: getattr(layer, name) for name in LayerRecipe.__slots__ if name != "parameters"}
    parameters = {
        name: [each.shape, each.dtype, [_piece_to_json(piece) for piece in each.pieces]]
        for name, each in layer.parameters.items()
    }
    return {**plain, "parameters": parameters}


def _piece_to_json(piece: Piece) -> list[Any]:
    """Returns a piece as a list of its fields."""
    return [piece.start, piece.size, piece.file, piece.offset, piece.dtype, piece.strides, piece.values]


def _layer_from_json(document: dict[str, Any]) -> LayerRecipe:
    """Reads the result of `_layer_to_json`."""
    parameters = {
        name: ExpertParameter(
            shape=tuple(shape),
            dtype=dtype,
            pieces=tuple(
                Piece(tuple(start), tuple(size), file, offset, kind, tuple(strides), values)
                for start, size, file, offset, kind, strides, values in pieces
            ),
        )
        for name, (shape, dtype, pieces) in document.pop("parameters").items()
    }
    return LayerRecipe(parameters=parameters, **document)


def contiguous_strides(shape: Sequence[int]) -> list[int]:
    """Returns the strides of a contiguous tensor, in elements."""
    strides = [1] * len(shape)
    for dim in reversed(range(len(shape) - 1)):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    return strides


def locate_view(
    shape: Sequence[int], offset: int, size: Sequence[int], strides: Sequence[int], source: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Finds the region of a contiguous tensor that a view of it covers.

    Args:
        shape: shape of the contiguous tensor.
        offset: number of the tensor's element at which the view begins.
        size: shape of the view.
        strides: strides of the view, in elements.
        source: strides of the tensor whose values are copied into the view, in elements, for each dimension
            of the view.

    Returns:
        For each dimension of the contiguous tensor: start and size of the region, and the stride of the
        copied tensor. A dimension in which the view has one element gets size 1 and stride 0.

    Raises:
        ContractError: the view does not cover a rectangular region of the tensor.
    """
    tensor_strides = contiguous_strides(shape)
    start, remaining = [], offset
    for tensor_stride in tensor_strides:
        start.append(remaining // tensor_stride)
        remaining %= tensor_stride
    region_size, source_strides = [1] * len(shape), [0] * len(shape)

    def fits(dim: int, count: int, stride: int) -> bool:
        """Returns whether a dimension of the view can lie along dimension `dim` of the tensor.

        The strides must be equal. If the tensor has dimensions of length 1, several dimensions may have this
        stride, so the dimension must also be unused and long enough.
        """
        is_unused = region_size[dim] == 1
        return tensor_strides[dim] == stride and is_unused and start[dim] + count <= shape[dim]

    for count, stride, source_stride in zip(size, strides, source, strict=True):
        if count == 1:  # the stride of a single element has no meaning
            continue
        dims = [dim for dim in range(len(shape)) if fits(dim, count, stride)]
        if not dims:
            raise ContractError(
                f"a view of a parameter must be a rectangular region (got a view {tuple(size)} with strides "
                f"{tuple(strides)} of a parameter {tuple(shape)}). Use spec.parallelism.mode: Pipeline"
            )
        region_size[dims[0]], source_strides[dims[0]] = count, source_stride
    return tuple(start), tuple(region_size), tuple(source_strides)


def find_missing_values(layer: LayerRecipe) -> list[str]:
    """Returns the parameters and experts of a layer that get no value, or only a part of their values.

    vLLM's method may pad a parameter, so elements of the padding rightly stay empty. An expert counts as
    incomplete if another expert has more values, or if at most half of the parameter has values in each
    expert: padding never takes half.

    The biases of all experts may be missing, because vLLM creates biases for some checkpoints without them.
    The kernels need neither scales or shapes of inputs nor orders of inputs (`g_idx`).
    """
    missing = []
    for name, parameter in layer.parameters.items():
        has_no_biases = "bias" in name and layer.topk and not parameter.pieces
        is_unneeded = any(part in name for part in ("input", "shape", "g_idx"))
        if has_no_biases or is_unneeded:
            continue
        num_filled = [0] * layer.experts
        for piece in parameter.pieces:
            piece_elements = math.prod(piece.size[1:])
            for expert in range(piece.start[0], piece.start[0] + piece.size[0]):
                num_filled[expert] += piece_elements
        most_filled, expert_elements = max(num_filled), math.prod(parameter.shape[1:])
        missing += [
            f"{name} of expert {expert}"
            for expert, count in enumerate(num_filled)
            if count < most_filled or 2 * most_filled <= expert_elements
        ]
    return missing
