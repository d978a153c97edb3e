"""The slab: shared memory for asks and answers of feed-forward ranks.

A nonce proves that the asking rank and a feed-forward rank map the same memory. The slab is a memfd of the
asking rank. Its feed-forward ranks open it through /proc, like the bridge's slab
(distributed/bridge/bridge_slab.py). So nothing remains after the processes end, and /dev/shm is not used. The
ranks share a PID namespace, because they run in one pod.
"""

import ctypes
import mmap
import os
import secrets
import struct
from dataclasses import dataclass
from typing import Final

import torch

from heteroinfer_contract import codec
from heteroinfer_contract.errors import ContractError
from heteroinfer_contract.plan import MAX_LANES
from vllm_heteroinfer.feed_forward import slab_library
from vllm_heteroinfer.feed_forward.recipe import Recipe
from vllm_heteroinfer.group.fingerprint import remedy_for_slab
from vllm_heteroinfer.pod.memory_files import open_memfd

MAGIC: Final = 0x464F_4657_4545_4446
VERSION: Final = 2
CONTROL_BYTES: Final = 4096
ASK_OFFSET, BELL_OFFSET, END_OFFSET, LANES_OFFSET, LANE_BYTES = 128, 256, 384, 512, 128
"""The same as in kernels/source/feed_forward_slab.h and kernels.cu."""
ASK_LAYER_OFFSET, ASK_ROWS_OFFSET, STEPS_OFFSET = ASK_OFFSET + 8, ASK_OFFSET + 12, BELL_OFFSET + 4
FAILED_OFFSET, CHECKS_OFFSET, GIVEN_UP_OFFSET = END_OFFSET + 4, END_OFFSET + 8, END_OFFSET + 12
"""Offsets of the fields of `Ask`, `Bell` and `End` in kernels/source/feed_forward_slab.h."""
NONCE_OFFSET: Final = 16
NONCE_BYTES: Final = 16
DTYPES: Final = {"float32": 0, "bfloat16": 1, "float16": 2}
_HEADER: Final = struct.Struct("=QIQIIIII")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes and types of a slab. The asking rank and its feed-forward ranks must use the same.

    Attributes:
        hidden: elements per row.
        topk: experts per row; 0 for dense models.
        max_rows: number of rows of the longest ask.
        dtype: type of rows and answers: `float32`, `bfloat16` or `float16`.
        lanes: number of lanes.
    """

    epoch: int
    hidden: int
    topk: int
    max_rows: int
    dtype: str
    lanes: int

    def __post_init__(self) -> None:
        """Raises ContractError for a shape that cannot be laid out."""
        if self.dtype not in DTYPES:
            raise ContractError(
                f"feed-forward: dtype must be one of {', '.join(DTYPES)} (got {self.dtype}). Change "
                "engine.dtype"
            )
        if not 0 < self.lanes <= MAX_LANES:
            raise ContractError(
                f"feed-forward: a GPU rank must have 1 to {MAX_LANES} lanes (got {self.lanes}: one for each "
                "feed-forward rank of its pod, and one for each pod of a CPU role). Change feedForward.ranks"
            )
        if self.row_bytes % 16:
            raise ContractError(
                f"feed-forward: a row must be a multiple of 16 bytes (got {self.row_bytes}: this model's "
                f"hidden size is {self.hidden}). Use spec.parallelism.mode: Pipeline"
            )

    @property
    def row_bytes(self) -> int:
        """Size of a row, in bytes."""
        return self.hidden * (4 if self.dtype == "float32" else 2)

    @property
    def layout(self) -> slab_library.Layout:
        """Offsets of the control words, rows, choices and answers of the slab."""
        rows_bytes = _round_up_to_pages(self.max_rows * self.row_bytes)
        choices_bytes = _round_up_to_pages(self.max_rows * max(1, self.topk) * 4)  # ids, and also weights
        x = CONTROL_BYTES
        ids = x + rows_bytes
        weights = ids + choices_bytes
        return slab_library.Layout(
            x=x,
            ids=ids,
            weights=weights,
            y=weights + choices_bytes,
            y_stride=rows_bytes,
            hidden=self.hidden,
            topk=self.topk,
            dtype=DTYPES[self.dtype],
            lanes=self.lanes,
        )

    @property
    def num_bytes(self) -> int:
        """Size of the slab, in bytes."""
        layout = self.layout
        return int(layout.y + self.lanes * layout.y_stride)

    def header(self) -> bytes:
        """Returns the slab's first bytes, by which a rank checks that the slab has the expected shape."""
        return _HEADER.pack(
            MAGIC,
            VERSION,
            self.epoch,
            self.hidden,
            self.topk,
            self.max_rows,
            DTYPES[self.dtype],
            self.lanes,
        )


def _describe_header(header: bytes) -> str:
    """Returns a slab's header in words, for messages."""
    _, version, epoch, hidden, topk, max_rows, dtype_number, lanes = _HEADER.unpack(header)
    dtype = {number: name for name, number in DTYPES.items()}.get(dtype_number, dtype_number)
    return (
        f"version {version}, epoch {epoch}, hidden size {hidden}, {topk} experts per token, {max_rows} "
        f"tokens, type {dtype}, {lanes} lanes"
    )


def _round_up_to_pages(num_bytes: int) -> int:
    """Rounds a size up to whole pages of 4,096 bytes."""
    return -(-num_bytes // 4096) * 4096


def shape_of(recipe: Recipe, epoch: int, lanes: int) -> Shape:
    """Returns the shape of the slab for the asks of a recipe's layers."""
    return Shape(
        epoch=epoch,
        hidden=recipe.hidden,
        topk=recipe.topk,
        max_rows=recipe.max_rows,
        dtype=recipe.dtype,
        lanes=lanes,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer(codec.JsonValue):
    """Location of the asking rank's slab.

    Attributes:
        pid: process ID of the asking rank, in the PID namespace of the pod.
        fd: descriptor of the slab's memfd in the asking rank.
        name: name of the memfd, to detect another file with the same descriptor number.
    """

    pid: int
    fd: int
    name: str
    shape: Shape


class Slab:
    """A mapped slab.

    Attributes:
        address: address of its first byte in this process.
        x: input rows, [max_rows, hidden].
        ids: experts of each row, [max_rows, topk] int32.
        weights: weights of these experts, [max_rows, topk] float32.
        y: answers by lane, each [max_rows, hidden].
    """

    def __init__(self, fd: int, shape: Shape) -> None:
        """Maps the memory; raises ContractError if its header does not match the shape."""
        self._memory = mmap.mmap(fd, shape.num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        header = self._memory[: _HEADER.size]
        if header != shape.header():
            raise ContractError(
                f"feed-forward ranks: the shared memory must have {_describe_header(shape.header())} (got "
                f"{_describe_header(header)}). Restart the group. If the error repeats, report it"
            )
        self.shape, self.layout = shape, shape.layout
        self.bytes = torch.frombuffer(self._memory, dtype=torch.uint8)
        self.address = self.bytes.data_ptr()
        dtype = getattr(torch, shape.dtype)
        layout, topk = self.layout, max(1, shape.topk)
        self.x = self._view(layout.x, dtype, (shape.max_rows, shape.hidden))
        self.ids = self._view(layout.ids, torch.int32, (shape.max_rows, topk))
        self.weights = self._view(layout.weights, torch.float32, (shape.max_rows, topk))
        self.y = [
            self._view(layout.y + lane * layout.y_stride, dtype, (shape.max_rows, shape.hidden))
            for lane in range(shape.lanes)
        ]
        self._words = memoryview(self._memory)[:CONTROL_BYTES]

    def _view(self, offset: int, dtype: torch.dtype, size: tuple[int, int]) -> torch.Tensor:
        """Returns a tensor of this size at an offset of the slab."""
        count = size[0] * size[1]
        return torch.frombuffer(self._memory, dtype=dtype, count=count, offset=offset).view(size)

    def _read_word(self, offset: int, kind: str) -> int:
        """Returns the control word at an offset; `kind` is its format for `struct`."""
        size = struct.calcsize(kind)
        return int(struct.unpack_from(kind, self._words[offset : offset + size])[0])

    @property
    def asked(self) -> int:
        """Number of the last ask."""
        return self._read_word(ASK_OFFSET, "=Q")

    @property
    def asked_rows(self) -> int:
        """Rows of the last ask."""
        return self._read_word(ASK_ROWS_OFFSET, "=I")

    @property
    def asked_layer(self) -> int:
        """Layer of the last ask."""
        return self._read_word(ASK_LAYER_OFFSET, "=I")

    @property
    def steps(self) -> int:
        """Number of steps that the asking rank has begun."""
        return self._read_word(STEPS_OFFSET, "=I")

    @property
    def device_gave_up(self) -> bool:
        """Whether the GPU stopped waiting for an answer."""
        return bool(self._read_word(FAILED_OFFSET, "=I"))

    @property
    def given_up_lane(self) -> int | None:
        """The lane for which the GPU waited when it gave up; None if it never gave up."""
        word = self._read_word(GIVEN_UP_OFFSET, "=I")  # 1 + the lane, or 0
        return word - 1 if word else None

    def read_lane(self, lane: int) -> "LaneView":
        """Reads a lane's current words."""
        return LaneView(*_LANE.unpack_from(self._words, LANES_OFFSET + lane * LANE_BYTES))

    @property
    def checks(self) -> int:
        """Number of checks that the asking rank's `FeedForwardWatch` has made."""
        return self._read_word(CHECKS_OFFSET, "=I")

    def add_check(self) -> None:
        """Adds 1 to the count of checks of the asking rank's `FeedForwardWatch`.

        If the count does not grow, the host may be stopped, so the GPU keeps waiting for answers.
        """
        ctypes.c_uint32.from_address(self.address + CHECKS_OFFSET).value = self.checks + 1

    def write_nonce(self, lane: int, nonce: bytes) -> None:
        """Writes a lane's nonce, which proves to the asking rank that this process maps its slab."""
        start = LANES_OFFSET + lane * LANE_BYTES + NONCE_OFFSET
        self._memory[start : start + NONCE_BYTES] = nonce

    def stop(self) -> None:
        """Ends every wait on this slab, in every process that maps the slab."""
        slab_library.load().heteroinfer_ff_stop(ctypes.c_void_p(self.address))

    def wake_lanes(self) -> None:
        """Wakes the feed-forward ranks before the first ask of a step, so that they are awake in time."""
        slab_library.load().heteroinfer_ff_wake(ctypes.c_void_p(self.address))


_LANE: Final = struct.Struct("=QiI16sQQQQQQ")


@dataclass(frozen=True, slots=True)
class LaneView:
    """The control words of a lane.

    Attributes:
        answered: number of the last answered ask.
        status: status of that answer; 0 means success.
        sleeps: whether the asking process sleeps until the answer comes.
        nonce: proof that the feed-forward rank maps this memory.
        busy_ns: total nanoseconds of computing.
        idle_ns: total nanoseconds of waiting for asks.
        asks: total number of answered asks.
        rows: total number of computed rows.
        experts: total number of experts whose weights the rank read; an MLP counts as one expert per ask.
        seen: number of the ask in progress.
    """

    answered: int
    status: int
    sleeps: int
    nonce: bytes
    busy_ns: int
    idle_ns: int
    asks: int
    rows: int
    experts: int
    seen: int


def create(shape: Shape) -> tuple[Slab, Offer]:
    """Creates a slab of this process, and an offer with the slab's location for other processes.

    The slab's descriptor stays open as long as this process runs.

    Raises:
        OSError: the memory is not available.
    """
    name = f"heteroinfer-feed-forward-{secrets.token_hex(16)}"
    fd = os.memfd_create(name)
    try:
        os.posix_fallocate(fd, 0, shape.num_bytes)
        os.pwrite(fd, shape.header(), 0)
        slab = Slab(fd, shape)
    except ContractError:
        os.close(fd)
        raise
    except OSError as error:
        os.close(fd)
        raise OSError(
            f"feed-forward ranks: cannot allocate {shape.num_bytes} bytes of shared memory ({error}). Raise "
            "the memory limit of this role"
        ) from error
    return slab, Offer(pid=os.getpid(), fd=fd, name=name, shape=shape)


def check_offer(offered: Shape, expected: Shape, reader: str) -> None:
    """Raises ContractError if a slab has another shape than the rank `reader` expects.

    The slab may have a larger topk than expected: a rank that computes MLPs expects topk 0, because it does
    not read the choices of experts.

    Args:
        reader: name of the rank that maps the slab, for the message.
    """
    differing = [
        name
        for name in ("epoch", "hidden", "topk", "max_rows", "dtype", "lanes")
        if getattr(offered, name) != getattr(expected, name)
    ]
    if offered.topk > expected.topk:
        differing.remove("topk")
    if differing:
        required = ", ".join(f"{name} {getattr(expected, name)}" for name in differing)
        got = ", ".join(str(getattr(offered, name)) for name in differing)
        raise ContractError(
            f"{reader}: the shared memory must have {required} (got {got}). {remedy_for_slab(differing)}"
        )


def connect(offer: Offer, lane: int, expected: Shape) -> tuple[Slab, bytes]:
    """Maps the slab of another process, and writes a nonce into it as proof.

    Args:
        lane: lane of this rank.
        expected: shape that this rank expects; the slab's `topk` may be larger.

    Raises:
        ContractError: the offer has another shape, or this process cannot map its memory.
    """
    check_offer(offer.shape, expected, f"feed-forward rank (lane {lane})")
    try:
        fd = open_memfd(offer.pid, offer.fd, offer.name, "the shared memory of the pod")
    except OSError as error:
        raise ContractError(
            f"feed-forward rank (lane {lane}): cannot open the shared memory of its pod ({error}). Run all "
            "ranks of the pod in one PID namespace"
        ) from error
    try:
        slab = Slab(fd, offer.shape)
    finally:
        os.close(fd)
    nonce = secrets.token_bytes(NONCE_BYTES)
    slab.write_nonce(lane, nonce)
    return slab, nonce
