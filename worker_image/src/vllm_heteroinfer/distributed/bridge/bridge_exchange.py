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

UseParts = Callable[[int, int, Sequence[torch.Tensor]], None]
"""Called with begin, end, and elements [begin, end) of each rank's tensor, in the process group's order.

A rank whose tensor is shorter than `end` contributes fewer elements, or none.
"""


class Exchange:
    """Publishes and reads parts in the order that `BridgeLink` requires.

    All methods raise the errors of collectives: see `Bridge`.
    """

    def __init__(
        self, process_group: ProcessGroupRanks, link: BridgeLink, staging: Staging, meter: Meter
    ) -> None:
        self._process_group, self._link, self._staging, self._meter = process_group, link, staging, meter

    def copy_out(self, x: torch.Tensor, form: Form) -> None:
        """Starts to copy a tensor of at most PART_BYTES to the outgoing buffer."""
        self._staging.copy_out(self._link.outgoing(), x, form, first=True)

    def publish_and_collect(self, header: bytes, x: torch.Tensor, form: Form) -> list[torch.Tensor]:
        """Publishes the tensor that `copy_out` copied, and returns the tensors of all ranks.

        The tensors are in the process group's order and valid until `mark_used`. The own tensor is `x`.
        This method takes tensors of at most one part. For these, `exchange_parts` would be slower, because it
        creates flat views.
        """
        signal = self._staging.publishing_signal()
        # With a signal, the device publishes the part after the copy, so the host does not wait.
        self._meter.add_transfer(
            "send", self._staging.wait_for_copies() if signal is None else 0.0, form.num_bytes
        )
        self._link.publish(header, form.num_bytes, signal)
        parts = [x] * len(self._process_group.ranks)
        for peer, peer_header, buffer in self._link.collect():
            if peer_header != header:
                self.compare(header, peer, peer_header)
            parts[peer] = self._staging.fetch(peer, buffer, form)
        return parts

    def mark_used(self, form: Form) -> None:
        """Marks the tensors of `publish_and_collect` as used.

        Call this method after the last use of the tensors is queued on the stream.
        """
        self._staging.end_fetches()
        # The next `wait_for_copies` returns the time of these fetches.
        self._meter.add_transfer("recv", 0.0, form.num_bytes * (len(self._process_group.ranks) - 1))

    def exchange_parts(
        self,
        header: bytes,
        own_elements: torch.Tensor,
        counts: Sequence[int],
        use_parts: UseParts | None,
        needed: tuple[int, int] | None = None,
    ) -> None:
        """Publishes this rank's elements part by part, and reads the parts of the other ranks.

        Args:
            own_elements: [n], contiguous.
            counts: number of elements that each rank sends; this rank sends its first elements.
            use_parts: called for every part; on a GPU in the order of the current stream. None: only headers
                are compared, as this rank needs no data.
            needed: [begin, end) of the elements that `use_parts` needs; all elements if None.
        """
        part_elements = PART_BYTES // own_elements.element_size()
        needed_begin, needed_end = needed or (0, max(counts))
        for part in range(num_parts(max(counts), part_elements)):
            offset = part * part_elements
            own_end = min(offset + part_elements, counts[self._process_group.index])
            own_part = own_elements[offset : max(offset, own_end)]  # may be empty: ranks' counts differ
            if own_part.numel():
                self._staging.copy_out(
                    self._link.outgoing(), own_part, form_of(own_part.dtype, own_part.shape), first=part == 0
                )
            self._meter.add_transfer("send", self._staging.wait_for_copies(), own_part.nbytes)
            own_header = header_of_part(header, part)
            self._link.publish(own_header, own_part.nbytes)
            begin, end = max(offset, needed_begin), min(offset + part_elements, needed_end)
            if use_parts is None or begin >= end:  # this rank needs no data of this part
                for peer, peer_header, _ in self._link.collect():
                    self.compare(own_header, peer, peer_header)
                continue
            parts = self._collect(
                own_header, own_elements, [(offset, begin, min(end, count)) for count in counts]
            )
            use_parts(begin, end, parts)
            self._staging.end_fetches()
            self._meter.add_transfer("recv", 0.0, sum(part.nbytes for part in parts))

    def _collect(
        self, header: bytes, own_elements: torch.Tensor, ranges: Sequence[tuple[int, int, int]]
    ) -> list[torch.Tensor]:
        """Returns elements [begin, end) of each rank's current part.

        Args:
            ranges: for each rank, the offset of the part in the rank's tensor, and begin and end in that
                tensor.
        """
        parts = [own_elements[:0]] * len(ranges)
        for peer, peer_header, buffer in self._link.collect():
            self.compare(header, peer, peer_header)
            offset, begin, end = ranges[peer]
            if end > begin:  # fetches the part's first elements, up to the last one that is needed
                peer_part = self._staging.fetch(
                    peer, buffer, form_of(own_elements.dtype, torch.Size((end - offset,)))
                )
                parts[peer] = peer_part[begin - offset :]
        _, begin, end = ranges[self._process_group.index]
        parts[self._process_group.index] = own_elements[begin : max(begin, end)]
        return parts

    def compare(self, own_header: bytes, peer: int, peer_header: bytes) -> None:
        """Checks that another rank made the same call.

        Raises:
            CollectiveMismatchError: the calls differ. Before the error, this method waits until the other
                rank has this rank's header, so that the other rank finds the difference, too.
        """
        if peer_header == own_header:
            return
        self._link.finish_sending(peer)
        ranks = self._process_group.ranks
        raise CollectiveMismatchError(
            self._process_group.group,
            ranks[peer],
            f"rank {ranks[self._process_group.index]} is at {describe(own_header)}",
            f"rank {ranks[peer]} is at {describe(peer_header)}",
        )

    def wait_for_copies(self) -> None:
        """Waits until all copies are done."""
        self._staging.wait_for_copies()
