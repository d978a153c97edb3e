"""Reads parameters of experts and MLPs from the checkpoint's files by a recipe. Imports torch."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

import torch

from heteroinfer_contract.errors import ContractError
from vllm_heteroinfer.feed_forward.file_tensors import MappedFiles
from vllm_heteroinfer.feed_forward.recipe import VALUES, ExpertParameter, LayerRecipe, Piece, Recipe

DUMMY_BLOCK: Final = 1 << 20
"""Dummy weights (vLLM's `--load-format dummy`) repeat after this number of elements."""
DUMMY_SPREAD: Final = 1e-3
"""Largest size of dummy weights, which are positive and negative."""
Range = tuple[int, int]
"""The first index of a range, and the index after its last."""


class _Region(NamedTuple):
    """A region of one expert's parameter, inside a piece of the recipe.

    Attributes:
        piece: the piece, which begins at this expert (dimension 0 counts experts).
        start: first index of the region in each other dimension.
        size: number of elements of the region in each other dimension.
    """

    piece: Piece
    start: list[int]
    size: list[int]


class ExpertReader:
    """Maps the files of a recipe, from which `LayerReader` reads experts."""

    def __init__(self, recipe: Recipe, model: Path) -> None:
        """Maps the files.

        Raises:
            ContractError: a file is not whole, or differs from the file of the rank that wrote the recipe.
        """
        self._mapped, self._dummy = MappedFiles(), recipe.dummy
        for file in recipe.files:
            mapped_file = self._mapped.add(model / file.name)
            if (mapped_file.num_bytes, mapped_file.digest) != (file.num_bytes, file.digest):
                raise ContractError(
                    f"{mapped_file.path}: the file differs from the file of the rank with attention (got "
                    f"{mapped_file.num_bytes} bytes and header {mapped_file.digest[:12]} instead of "
                    f"{file.num_bytes} bytes and {file.digest[:12]}). "
                    "Give all pods of the group the same model folder"
                )

    def check_unchanged(self) -> None:
        """Raises ContractError if a file changed since it was mapped."""
        for file in self._mapped.files:
            file.check_unchanged()

    def layer(self, layer: LayerRecipe) -> "LayerReader":
        """Returns a reader of a layer's parameters."""
        return LayerReader(self._mapped, layer, dummy=self._dummy)


class LayerReader:
    """Reads the parameters of a layer's experts.

    Attributes:
        read_bytes: bytes that were taken from files.
    """

    def __init__(self, mapped: MappedFiles, layer: LayerRecipe, *, dummy: bool) -> None:
        """Lists the pieces of each parameter by expert.

        Args:
            dummy: whether to return random numbers instead of reading files.
        """
        self._mapped, self.recipe, self._dummy = mapped, layer, dummy
        self._pieces: dict[str, list[list[Piece]]] = {}
        for name, parameter in layer.parameters.items():
            by_expert: list[list[Piece]] = [[] for _ in range(layer.experts)]
            for piece in parameter.pieces:
                for expert in range(piece.start[0], piece.start[0] + piece.size[0]):
                    by_expert[expert].append(piece)
            self._pieces[name] = by_expert
        self.read_bytes = 0

    def has(self, name: str) -> bool:
        """Returns whether the checkpoint has values of a parameter."""
        parameter = self.recipe.parameters.get(name)
        return parameter is not None and bool(parameter.pieces)

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a parameter of one expert."""
        return self.recipe.parameters[name].shape[1:]

    def dtype(self, name: str) -> torch.dtype:
        """Returns the type of a parameter."""
        dtype: torch.dtype = getattr(torch, self.recipe.parameters[name].dtype)
        return dtype

    def read(self, name: str, expert: int, *ranges: Range | None) -> torch.Tensor:
        """Returns a region of an expert's parameter, as a view of the file or as a copy.

        Elements that the checkpoint does not fill are 0.

        Args:
            ranges: range of indices for each dimension of the parameter; None or omitted for all indices.
        """
        wanted = [(0, count) for count in self.shape(name)]
        for dim, indices in enumerate(ranges):
            if indices is not None:
                wanted[dim] = indices
        dtype, size = self.dtype(name), [end - first for first, end in wanted]
        if self._dummy:
            return _random_weights(size, dtype)
        intersections = [_intersection(piece, expert, wanted) for piece in self._pieces[name][expert]]
        regions = [region for region in intersections if region is not None]
        if len(regions) == 1 and regions[0].size == size:  # one piece has all elements, so no copy is needed
            piece_values = self._view(regions[0])
            self.read_bytes += piece_values.nbytes
            return piece_values if piece_values.dtype == dtype else piece_values.to(dtype)
        values = torch.zeros(size, dtype=dtype)
        for region in regions:
            target = values
            for dim, (first, length) in enumerate(zip(region.start, region.size, strict=True)):
                target = target.narrow(dim, first - wanted[dim][0], length)
            piece_values = self._view(region)
            self.read_bytes += piece_values.nbytes
            target.copy_(piece_values)
        return values

    def _view(self, region: _Region) -> torch.Tensor:
        """Returns a view of a region of one expert, in the mapped file or in the recipe's own values."""
        piece, start, size = region
        dtype: torch.dtype = getattr(torch, piece.dtype)
        if piece.file == VALUES:
            # `_intersection` has cut the piece to the values of one expert.
            all_values = torch.frombuffer(bytearray.fromhex(piece.values), dtype=dtype).view(piece.size)
            view = all_values.select(0, 0)
            for dim, (first, length) in enumerate(zip(start, size, strict=True)):
                view = view.narrow(dim, first - piece.start[1 + dim], length)
            return view
        # Elements of the file between the beginning of the piece and the beginning of the region.
        skipped_elements = sum(
            (first - begin) * stride
            for first, begin, stride in zip(start, piece.start[1:], piece.strides[1:], strict=True)
        )
        offset = piece.offset + dtype.itemsize * skipped_elements
        return self._mapped.files[piece.file].view(offset, dtype, size, piece.strides[1:])


def _intersection(piece: Piece, expert: int, ranges: Sequence[Range]) -> _Region | None:
    """Returns the region of an expert that is inside both the piece and the ranges.

    Returns None if there is no such region.

    Args:
        ranges: range of indices for each dimension except dimension 0, which counts experts.
    """
    start, size = [], []
    for (first, end), begin, length in zip(ranges, piece.start[1:], piece.size[1:], strict=True):
        low, high = max(first, begin), min(end, begin + length)
        if low >= high:
            return None
        start.append(low)
        size.append(high - low)
    # The piece of a `_Region` must begin at the region's expert.
    experts_skipped = expert - piece.start[0]
    if not experts_skipped:
        return _Region(piece, start, size)
    if piece.file == VALUES:
        return _Region(_select_values(piece, experts_skipped), start, size)
    skipped_bytes = experts_skipped * piece.strides[0] * getattr(torch, piece.dtype).itemsize
    return _Region(replace(piece, offset=piece.offset + skipped_bytes), start, size)


def _select_values(piece: Piece, expert: int) -> Piece:
    """Returns a piece with the values of one expert only.

    Args:
        expert: number of the expert, counted from the piece's first expert.
    """
    digits_per_expert = 2 * math.prod(piece.size[1:]) * getattr(torch, piece.dtype).itemsize
    values = piece.values[expert * digits_per_expert : (expert + 1) * digits_per_expert]
    return replace(piece, size=(1, *piece.size[1:]), values=values)


def _random_weights(size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Returns small random numbers; zeros for integers.

    The numbers repeat after DUMMY_BLOCK elements, because drawing 30 GB of random numbers takes minutes.
    """
    if not dtype.is_floating_point:
        return torch.zeros(tuple(size), dtype=dtype)
    total = math.prod(size)
    block = (torch.rand(min(DUMMY_BLOCK, total)) * 2 - 1) * DUMMY_SPREAD
    repeats = -(-total // block.numel())
    return block.to(dtype).repeat(repeats)[:total].view(tuple(size))


def describe(parameter: ExpertParameter) -> str:
    """Returns the type and the shape of a parameter, for messages."""
    return f"{parameter.dtype} {list(parameter.shape)}"
