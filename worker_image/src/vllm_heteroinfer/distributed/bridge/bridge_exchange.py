"""The exchange under all collectives: sends each rank's part to all ranks and compares the headers."""

from collections.abc import Callable, Sequence

import torch

from vllm_heteroinfer.distributed.bridge.bridge_link import (
    PART_BYTES,
    BridgeLink,
    Form,
    ProcessGroupRanks,
    form_of,
)
from vllm_heteroinfer.distributed.bridge.header import describe, header_of_part, num_parts
from vllm_heteroinfer.distributed.bridge.staging import Staging
from vllm_heteroinfer.distributed.errors import CollectiveMismatchError
from vllm_heteroinfer.distributed.meter import Meter

Take = Callable[[int, int, Sequence[torch.Tensor]], None]
"""Uses elements [begin, end) of each rank's tensor, in process-group order; shorter tensors end early."""


class Exchange:
    """Publishes and reads parts in the order that `BridgeLink` requires.

    All methods raise the errors of collectives: see `Bridge`.
    """

    def __init__(
        self, process_group: ProcessGroupRanks, link: BridgeLink, staging: Staging, meter: Meter
    ) -> None:
        self._process_group, self._link, self._staging, self._meter = process_group, link, staging, meter

    def put(self, x: torch.Tensor, form: Form) -> None:
        """Starts to copy a tensor of at most PART_BYTES to the outgoing buffer."""
        self._staging.put(self._link.outgoing(), x, form, first=True)

    def swap(self, header: bytes, x: torch.Tensor, form: Form) -> list[torch.Tensor]:
        """Publishes the tensor that `put` copied. Returns each rank's tensor, valid until `taken`.

        The tensors are in the process group's order. A tensor of one part keeps its shape: `run` would
        create views, which takes longer than the rest of this method.
        """
        signal = self._staging.in_order()
        self._meter.transferred("send", self._staging.settle() if signal is None else 0.0, form.num_bytes)
        self._link.publish(header, form.num_bytes, signal)
        parts = [x] * len(self._process_group.ranks)
        for peer, theirs, buffer in self._link.collect():
            if theirs != header:
                self.compare(header, peer, theirs)
            parts[peer] = self._staging.fetch(peer, buffer, form)
        return parts

    def taken(self, form: Form) -> None:
        """Marks the tensors from `swap` as used: their last use is queued on the current stream."""
        self._staging.fetched()
        self._meter.transferred("recv", 0.0, form.num_bytes * (len(self._process_group.ranks) - 1))

    def run(
        self,
        header: bytes,
        mine: torch.Tensor,
        counts: Sequence[int],
        take: Take | None,
        window: tuple[int, int] | None = None,
    ) -> None:
        """Publishes this rank's elements part by part, and reads the parts of the other ranks.

        Args:
            mine: [n], contiguous.
            counts: number of elements that each rank sends; this rank sends the first ones of `mine`.
            take: called with every part, if given; on a GPU in the order of the current stream.
            window: [begin, end) of the elements that `take` needs; all elements if None.
        """
        per_part = PART_BYTES // mine.element_size()
        low, high = window or (0, max(counts))
        for part in range(num_parts(max(counts), per_part)):
            offset = part * per_part
            own = mine[offset : max(offset, min(offset + per_part, counts[self._process_group.index]))]
            if own.numel():
                self._staging.put(self._link.outgoing(), own, form_of(own.dtype, own.shape), first=part == 0)
            self._meter.transferred("send", self._staging.settle(), own.nbytes)
            ours = header_of_part(header, part)
            self._link.publish(ours, own.nbytes)
            begin, end = max(offset, low), min(offset + per_part, high)
            if take is None or begin >= end:
                for peer, theirs, _ in self._link.collect():
                    self.compare(ours, peer, theirs)
                continue
            parts = self._collect(ours, mine, [(offset, begin, min(end, count)) for count in counts])
            take(begin, end, parts)
            self._staging.fetched()
            self._meter.transferred("recv", 0.0, sum(part.nbytes for part in parts))

    def _collect(
        self, header: bytes, mine: torch.Tensor, spans: Sequence[tuple[int, int, int]]
    ) -> list[torch.Tensor]:
        """Returns each rank's elements [begin, end); `spans` has (offset of the part, begin, end) by rank."""
        parts = [mine[:0]] * len(spans)
        for peer, theirs, buffer in self._link.collect():
            self.compare(header, peer, theirs)
            offset, begin, end = spans[peer]
            if end > begin:
                whole = self._staging.fetch(peer, buffer, form_of(mine.dtype, torch.Size((end - offset,))))
                parts[peer] = whole[begin - offset :]
        _, begin, end = spans[self._process_group.index]
        parts[self._process_group.index] = mine[begin : max(begin, end)]
        return parts

    def compare(self, ours: bytes, peer: int, theirs: bytes) -> None:
        """Checks that another rank made the same call.

        Raises:
            CollectiveMismatchError: the calls differ. The other rank gets this rank's header first, so
                that it can raise the error too.
        """
        if theirs == ours:
            return
        self._link.finish_sending(peer)
        ranks = self._process_group.ranks
        raise CollectiveMismatchError(
            self._process_group.group,
            ranks[peer],
            f"rank {ranks[self._process_group.index]} is at {describe(ours)}",
            f"rank {ranks[peer]} is at {describe(theirs)}",
        )

    def settle(self) -> None:
        """Waits until all copies are done."""
        self._staging.settle()
