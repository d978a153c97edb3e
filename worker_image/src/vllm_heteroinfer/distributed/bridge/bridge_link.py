"""What carries parts of tensors between the hosts' memories of a process group's ranks."""

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from vllm_heteroinfer.distributed.bridge.stream_signal import StreamSignal

PART_BYTES = 4 << 20
"""Most bytes of a tensor that go at once; a larger one goes in parts, so that copies overlap."""
MESSAGE_BYTES = 4096
"""Most bytes of an announcement."""
AN_ANNOUNCEMENT, READING = "an announcement", "the reading of announcements"
"""What a rank waits for, in the words of an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessGroupRanks:
    """The ranks of a process group that a bridge connects.

    Attributes:
        ranks: global ranks, in the process group's order.
        index: this rank's index among them (its rank in the process group).
        listeners: rank in the process group of each one that `announce` reaches.
    """

    group: str
    ranks: tuple[int, ...]
    index: int
    listeners: tuple[int, ...]

    @property
    def own_rank(self) -> int:
        """Returns this process's global rank."""
        return self.ranks[self.index]

    @property
    def peers(self) -> tuple[int, ...]:
        """Returns the other ranks, by their rank in the process group."""
        return tuple(peer for peer in range(len(self.ranks)) if peer != self.index)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Form:
    """What tensors of a collective look like; one object for each, so that looking up by it is cheap."""

    dtype: torch.dtype
    shape: torch.Size
    num_bytes: int


_MOST_FORMS = 4096
"""Forms, and views of a buffer, that are remembered; a decode step asks for the same few 65 times."""


@functools.lru_cache(_MOST_FORMS)
def form_of(dtype: torch.dtype, shape: torch.Size) -> Form:
    """Returns the form of tensors of this dtype and shape."""
    return Form(dtype=dtype, shape=shape, num_bytes=shape.numel() * dtype.itemsize)


class Buffer:
    """Persistent bytes seen as elements of any dtype and shape, mostly without making a view."""

    def __init__(self, memory: torch.Tensor) -> None:
        """Takes `memory`: [num_bytes], uint8, any device, num_bytes a multiple of 8."""
        self.memory = memory
        self._views = {torch.uint8: memory}
        self._shaped: dict[Form, torch.Tensor] = {}

    def shaped(self, form: Form) -> torch.Tensor:
        """Returns the first elements as a tensor of this form, sharing this memory."""
        view = self._shaped.get(form)
        if view is None:
            if len(self._shaped) == _MOST_FORMS:
                self._shaped.clear()
            view = self._shaped[form] = self.elements(form.dtype, form.shape.numel()).view(form.shape)
        return view

    def elements(self, dtype: torch.dtype, count: int) -> torch.Tensor:
        """Returns the first `count` elements, sharing this memory."""
        view = self._views.get(dtype)
        if view is None:
            view = self._views[dtype] = self._views[torch.uint8].view(dtype)
        return view[:count]


class BridgeLink(Protocol):
    """One way between the ranks; the n-th publish of each belongs together.

    A rank publishes n + 1 only after it has read all that it wants of part n: two
    buffers of each rank then suffice, without a word of who has read what.

    Attributes:
        timeout_s: for which a rank is waited for, in seconds; may be set between collectives.
    """

    timeout_s: float

    def buffers(self) -> Iterable[Buffer]:
        """Returns every buffer that the link will ever give."""

    def outgoing(self) -> Buffer:
        """Returns where this rank puts the part that it publishes next."""

    def publish(self, header: bytes, num_bytes: int, signal: StreamSignal | None = None) -> None:
        """Lets the others see the outgoing part, of `num_bytes` bytes: now, or when `signal` says so."""

    def collect(self) -> Iterator[tuple[int, bytes, Buffer]]:
        """Yields (rank in the process group, header, part) of each other rank as they come.

        Raises:
            PeerLostError: one is gone or did not publish in time.
        """

    def announce(self, message: bytes) -> None:
        """Sends bytes to each listener; waits only when 16 messages are not yet read.

        Raises:
            PeerLostError: a listener read nothing in time.
        """

    def listen(self, deadline_s: float) -> bytes:
        """Returns the next announcement, waiting for at most `deadline_s` seconds.

        Raises:
            PeerLostError: none came.
        """

    def finish_sending(self, peer: int) -> None:
        """Lets one rank have what was published, before this one ends."""

    def close(self) -> None:
        """Gives back what it holds; the others see that this rank is gone."""
