"""Where a feed-forward rank has its packed weights, for a GPU of its pod that copies them. Imports torch.

The weights are in the rank's memfd. The GPU's process opens it through /proc, like the ranks open the slab.
"""

import mmap
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import torch

from heteroinfer_contract import codec
from heteroinfer_contract.errors import ContractError
from vllm_heteroinfer.feed_forward.held import LoadedParts
from vllm_heteroinfer.feed_forward.held_experts import PackedMatrix
from vllm_heteroinfer.kernels.coded import Code, Format, Scale
from vllm_heteroinfer.kernels.weight_memory import WeightMemory

_NOT_PACKED: Final = {"code": -1}


def weights_key(rank: int) -> str:
    """Returns the key of a feed-forward rank's offer of its weights, in the group's store."""
    return f"feed-forward/weights/{rank}"


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedMatrix:
    """The packed w13 or w2 of a layer's experts; see `PackedMatrix`.

    Attributes:
        offset: byte of the first expert in the memfd.
        expert_bytes: of one expert.
        block_scales: byte of the first expert's block scales in the memfd; None without.
        code: with `scale`, `group` and `zeros` the format; -1 if the matrix is not packed.
    """

    offset: int
    expert_bytes: int
    columns: int
    inputs: int
    has_headers: bool
    block_scales: int | None
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


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedLayer:
    """A rank's part of a layer's experts.

    Attributes:
        first_expert: number of its first expert in the layer.
        experts: number of its experts; of each, it has all columns or some.
        first_column: its first intermediate column.
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
        pid: of the rank's process, in the PID namespace of the pod.
        fd: descriptor of its memfd.
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
    """Returns the location of a matrix in this process's memory."""
    form, scales = matrix.format, matrix.block_scales
    return OfferedMatrix(
        offset=memory.offset_of(matrix.packed),
        expert_bytes=matrix.packed.nbytes // len(matrix.packed),
        columns=matrix.columns,
        inputs=matrix.inputs,
        has_headers=matrix.has_headers,
        block_scales=None if scales is None else memory.offset_of(scales),
        **(_NOT_PACKED if form is None else asdict(form)),
    )


def map_weights(offer: OfferedWeights, rank: int) -> torch.Tensor:
    """Maps the weights of feed-forward rank `rank`: uint8 [num_bytes], valid after that rank has ended, too.

    Raises:
        ContractError: this process cannot map the rank's memory.
    """
    path = Path(f"/proc/{offer.pid}/fd/{offer.fd}")
    try:
        opened = os.readlink(path)
        if opened != f"/memfd:{offer.name} (deleted)":
            raise OSError(f"{path} must be the weights of feed-forward rank {rank} (got {opened})")
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise ContractError(f"feed-forward rank {rank}: {error}. Run this rank in the GPU's pod") from error
    try:
        return torch.frombuffer(mmap.mmap(fd, offer.num_bytes, flags=mmap.MAP_SHARED), dtype=torch.uint8)
    finally:
        os.close(fd)
