"""The interface of a link, which carries parts of tensors between the host memories of ranks."""

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from vllm_heteroinfer.distributed.bridge.stream_signal import StreamSignal

PART_BYTES = 4 << 20
"""Largest part of a tensor; a larger tensor travels in several parts, so that copies overlap."""
MESSAGE_BYTES = 4096
"""Maximum bytes of an announcement."""
AN_ANNOUNCEMENT = "the next announcement of the warm-up"
FREE_PLACE = "a free place for an announcement of the warm-up"
"""Names of two awaited things in error messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessGroupRanks:
    """The ranks of a process group that a bridge connects.

    Attributes:
        ranks: global ranks, in the process group's order.
        index: this rank's index in `ranks` (its rank in the process group).
        listeners: ranks in the process group that receive announcements.
    """

    group: str
    ranks: tuple[int, ...]
    index: int
    listeners: tuple[int, ...]

    @property
    def own_rank(self) -> int:
        """This process's global rank."""
        return self.ranks[self.index]

    @property
    def peers(self) -> tuple[int, ...]:
        """The other ranks, as ranks in the process group."""
        return tuple(peer for peer in range(len(self.ranks)) if peer != self.index)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Form:
    """Dtype and shape of a tensor.

    `form_of` returns the same object for the same form. Objects compare by identity, so lookups are cheap.
    """

    dtype: torch.dtype
    shape: torch.Size
    num_bytes: int


_MAX_FORMS = 4096
"""Number of cached forms, and of cached views of a buffer. A decode step looks up the same few
forms about 65 times."""


@functools.lru_cache(_MAX_FORMS)
def form_of(dtype: torch.dtype, shape: torch.Size) -> Form:
    """Returns the form with this dtype and shape."""
    return Form(dtype=dtype, shape=shape, num_bytes=shape.numel() * dtype.itemsize)


class Buffer:
    """Persistent memory, viewed with any dtype and shape; views are cached."""

    def __init__(self, memory: torch.Tensor) -> None:
        """Takes [num_bytes], uint8, on any device; num_bytes must be a multiple of 8."""
        self.memory = memory
        self._views = {torch.uint8: memory}
        self._shaped: dict[Form, torch.Tensor] = {}

    def view_as(self, form: Form) -> torch.Tensor:
        """Returns a view of the first elements as a tensor of this form."""
        view = self._shaped.get(form)
        if view is None:
            if len(self._shaped) == _MAX_FORMS:  # limits the memory of the cache
                self._shaped.clear()
            view = self._shaped[form] = self.first_elements(form.dtype, form.shape.numel()).view(form.shape)
        return view

    def first_elements(self, dtype: torch.dtype, count: int) -> torch.Tensor:
        """Returns a view of the first `count` elements of this dtype, [count]."""
        view = self._views.get(dtype)
        if view is None:
            view = self._views[dtype] = self._views[torch.uint8].view(dtype)
        return view[:count]


class BridgeLink(Protocol):
    """A connection between the ranks. The n-th parts that the ranks publish belong together.

    A rank publishes part n + 1 only after it has read all it needs from part n. So two buffers for
    each rank are enough, and ranks need not report what they have read.

    Attributes:
        timeout_s: longest wait for another rank, in seconds; may change between collectives.
    """

    timeout_s: float

    def buffers(self) -> Iterable[Buffer]:
        """Returns all buffers that `outgoing` and `collect` can return."""

    def outgoing(self) -> Buffer:
        """Returns the buffer to fill with the part that this rank publishes next."""

    def publish(self, header: bytes, num_bytes: int, signal: StreamSignal | None = None) -> None:
        """Makes the outgoing part of `num_bytes` bytes readable for the other ranks.

        With a signal, the device does this after its queued work. Otherwise it happens immediately.
        """

    def collect(self) -> Iterator[tuple[int, bytes, Buffer]]:
        """Yields (rank in the process group, header, part) of each other rank, in order of arrival.

        Raises:
            PeerLostError: a rank left or did not publish in time.
        """

    def announce(self, message: bytes) -> None:
        """Sends a message to each listener; waits only while 16 messages are unread.

        Raises:
            PeerLostError: a listener read nothing in time.
        """

    def listen(self, deadline_s: float) -> bytes:
        """Waits up to `deadline_s` seconds for the next announcement.

        Raises:
            PeerLostError: no announcement arrived.
        """

    def finish_sending(self, peer: int) -> None:
        """Waits until rank `peer` has received the published part, so that this rank can end."""

    def close(self) -> None:
        """Frees all resources; the other ranks see that this rank left."""
