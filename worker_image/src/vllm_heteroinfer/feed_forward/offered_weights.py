"""Where a feed-forward rank has its packed weights, for a GPU of its pod that copies them. Imports torch.

The weights are in the rank's memfd. The GPU's process opens it through /proc, like the ranks open the slab.
w13 is vLLM's name for an expert's gates and ups, and w2 for its projection back to the hidden size.
"""

import mmap
import os
from dataclasses import asdict, dataclass, replace
from typing import Final

import torch

from heteroinfer_contract import codec
from heteroinfer_contract.errors import ContractError
from vllm_heteroinfer.feed_forward.held import LoadedParts
from vllm_heteroinfer.feed_forward.held_experts import PackedMatrix
from vllm_heteroinfer.kernels.coded import Code, Format, Scale
from vllm_heteroinfer.kernels.weight_memory import WeightMemory
from vllm_heteroinfer.pod.memory_files import open_memfd

SCALED: Final = 128
"""Number of columns, and of inputs, that share a block scale."""
_NOT_PACKED: Final = {"code": -1}
"""Format of an `OfferedMatrix` that is not packed."""


def dtype_of(name: str) -> torch.dtype:
    """Returns torch's type by its name, such as "bfloat16"; raises ContractError for another name."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ContractError(
            f"offered weights: dtype must be a type of torch (got {name!r}). Start all pods from one image"
        )
    return dtype


def weights_key(rank: int) -> str:
    """Returns the key of a feed-forward rank's offer of its weights, in the group's store."""
    return f"feed-forward/weights/{rank}"


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedMatrix:
    """The packed w13 or w2 of a layer's experts; see `PackedMatrix`.

    Attributes:
        offset: byte in the memfd at which the first expert begins.
        expert_bytes: size of one expert.
        block_scales_offset: byte in the memfd at which the first expert's block scales begin; None if the
            matrix has no block scales.
        scale_shape: rows and columns of an expert's block scales; None if the matrix has no block scales.
        dtype: type of the tensor's elements; for a matrix that is not packed, the type of its weights.
        code: `Format.code`; -1 if the matrix is not packed. The next three attributes are the other fields of
            `Format`.
    """

    offset: int
    expert_bytes: int
    columns: int
    inputs: int
    has_headers: bool
    block_scales_offset: int | None
    scale_shape: tuple[int, int] | None
    dtype: str
    code: int
    scale: int = 0
    group: int = 0
    zeros: bool = False

    @property
    def format(self) -> Format | None:
        """The format of codes and scales; None if the matrix is not packed."""
        if self.code < 0:
            return None
        return Format(code=Code(self.code), scale=Scale(self.scale), group=self.group, zeros=self.zeros)

    @property
    def scale_bytes(self) -> int:
        """Bytes of an expert's block scales."""
        return 0 if self.scale_shape is None else 4 * self.scale_shape[0] * self.scale_shape[1]

    @property
    def kind(self) -> "OfferedMatrix":
        """This matrix without its offsets. It is equal for matrices that are unpacked in the same way."""
        return replace(self, offset=0, block_scales_offset=None)

    def find_error(self, experts: int, num_bytes: int, *, gated: bool) -> str:
        """Returns the first error in this offer; "" if there is none.

        Args:
            experts: number of experts that the memory must have.
            num_bytes: size of the memory.
            gated: whether the columns are gates and then ups (w13). Each half has its own blocks of scales.
        """
        halves = 2 if gated else 1
        blocks_per_half = -(-self.columns // halves // SCALED)
        expected_shape = (halves * blocks_per_half, -(-self.inputs // SCALED))
        if (self.scale_shape is None) != (self.block_scales_offset is None):
            return "block scales must have an offset and a shape, or neither"
        if self.scale_shape is not None and tuple(self.scale_shape) != expected_shape:
            return f"block scales of an expert must be {expected_shape} (got {tuple(self.scale_shape)})"
        elements = self.columns * self.inputs
        if self.format is None and self.expert_bytes != elements * dtype_of(self.dtype).itemsize:
            return f"an expert must have {elements} numbers of {self.dtype} (got {self.expert_bytes} bytes)"
        end = self.offset + experts * self.expert_bytes
        if self.block_scales_offset is not None:
            end = max(end, self.block_scales_offset + experts * self.scale_bytes)
        if end > num_bytes:
            return f"weights must end within {num_bytes} bytes of memory (got {end})"
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedLayer:
    """A rank's part of a layer's experts.

    Attributes:
        first_expert: number of the rank's first expert in the layer.
        experts: number of the rank's experts. The rank has all columns or some columns of each expert.
        first_column: the rank's first intermediate column.
    """

    layer: int
    first_expert: int
    experts: int
    first_column: int
    w13: OfferedMatrix
    w2: OfferedMatrix


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedWeights(codec.JsonValue):
    """Location of a feed-forward rank's weights.

    Attributes:
        pid: process ID of the rank, in the PID namespace of the pod.
        fd: descriptor of the rank's memfd.
        name: name of the memfd, to detect another file with the same descriptor number.
        num_bytes: size of the memfd.
        layers: layers that a GPU can unpack.
    """

    pid: int
    fd: int
    name: str
    num_bytes: int
    layers: tuple[OfferedLayer, ...]


def offer_weights(held: LoadedParts) -> OfferedWeights:
    """Returns the location of the weights that this process holds."""
    memory = held.memory
    layers = tuple(
        OfferedLayer(
            layer=layer,
            first_expert=held.own_parts[layer].experts.first,
            experts=experts.count,
            first_column=held.own_parts[layer].columns.first,
            w13=_offer_matrix(memory, experts.matrices[0]),
            w2=_offer_matrix(memory, experts.matrices[1]),
        )
        for layer, experts in held.parts.items()
        if experts.matrices is not None
    )
    return OfferedWeights(
        pid=os.getpid(), fd=memory.fd, name=memory.name, num_bytes=memory.num_bytes, layers=layers
    )


def _offer_matrix(memory: WeightMemory, matrix: PackedMatrix) -> OfferedMatrix:
    """Returns the location of a packed matrix in this process's memory, with the data to unpack it."""
    form, scales = matrix.format, matrix.block_scales
    return OfferedMatrix(
        offset=memory.offset_of(matrix.packed),
        expert_bytes=matrix.packed.nbytes // len(matrix.packed),
        columns=matrix.columns,
        inputs=matrix.inputs,
        has_headers=matrix.has_headers,
        block_scales_offset=None if scales is None else memory.offset_of(scales),
        scale_shape=None if scales is None else (scales.shape[1], scales.shape[2]),
        dtype=str(matrix.packed.dtype).removeprefix("torch."),
        **(_NOT_PACKED if form is None else asdict(form)),
    )


def map_weights(offer: OfferedWeights, rank: int) -> torch.Tensor:
    """Maps the weights of feed-forward rank `rank`: uint8 [num_bytes].

    The memory stays valid after that rank has ended.

    Raises:
        ContractError: this process cannot map the rank's memory, or the offer does not fit the weights.
    """
    for layer in offer.layers:
        for name, matrix in (("w13", layer.w13), ("w2", layer.w2)):
            error = matrix.find_error(layer.experts, offer.num_bytes, gated=name == "w13")
            if error:
                raise ContractError(
                    f"feed-forward rank {rank}, layer {layer.layer}, {name}: {error}. This is a "
                    "defect of HeteroInfer. Report it, and name the model"
                )
    try:
        fd = open_memfd(offer.pid, offer.fd, offer.name, f"the weights of feed-forward rank {rank}")
    except OSError as error:
        raise ContractError(
            f"feed-forward rank {rank}: {error}. Report this error with the pod's log"
        ) from error
    try:
        return torch.frombuffer(mmap.mmap(fd, offer.num_bytes, flags=mmap.MAP_SHARED), dtype=torch.uint8)
    except (OSError, ValueError) as error:
        raise ContractError(
            f"feed-forward rank {rank}: {offer.num_bytes} bytes of its weights cannot be mapped ({error}). "
            "Report this error with the pod's log"
        ) from error
    finally:
        os.close(fd)
