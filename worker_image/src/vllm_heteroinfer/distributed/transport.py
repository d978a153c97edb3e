"""Hops of a pipeline: hidden states from one stage to the next, one message for each hop.

Both sides know the schema of a hop from the start, and the number of rows when the step arrives, so a
message needs no header. Rows travel as bytes over gloo from host memory; a GPU rank stages them through
pinned buffers. Sends and receives are asynchronous: a rank waits for a receive when it uses the tensors,
and for a send when it needs the buffer again.
"""

import dataclasses
import functools
import itertools
import json
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from vllm_heteroinfer.distributed.errors import PeerLostError
from vllm_heteroinfer.distributed.meter import Meter
from vllm_heteroinfer.pod.lost_peer import Conversation

_ALIGNMENT_BYTES = 16
"""Alignment of the columns in a row, so that each column can be viewed with its dtype."""
_SLOTS = 2
"""Buffers for each direction: the rank fills one while the other is in transit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One tensor of a hop.

    Attributes:
        name: key in vLLM's IntermediateTensors.
        dtype: name of the torch dtype, such as `float32`.
        shape: shape of one row.
        offset_bytes: offset of the column in a row.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset_bytes: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HopSchema:
    """The layout of one row (token) of a hop; the same on both sides of the hop."""

    columns: tuple[Column, ...]
    row_bytes: int

    @classmethod
    def of_tensors(cls, tensors: Mapping[str, torch.Tensor]) -> "HopSchema":
        """Builds the schema of a hop with these tensors, which have one row for each token."""
        columns, offset = [], 0
        for name in sorted(tensors):  # both sides of the hop need the same order
            row = tensors[name][0]
            size = row.numel() * row.element_size()
            columns.append(
                Column(
                    name=name,
                    dtype=str(row.dtype).removeprefix("torch."),
                    shape=tuple(row.shape),
                    offset_bytes=offset,
                    num_bytes=size,
                )
            )
            offset += -(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES  # rounded up
        return cls(columns=tuple(columns), row_bytes=offset)

    def view_columns(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns a view of each column of `rows`, by name.

        Args:
            rows: [num_rows, row_bytes], uint8, contiguous, any device.
        """
        return {
            column.name: rows[:, column.offset_bytes : column.offset_bytes + column.num_bytes]
            .view(getattr(torch, column.dtype))
            .unflatten(1, column.shape)
            for column in self.columns
        }

    def to_json(self) -> str:
        """Returns the schema as JSON; equal schemas have equal texts, so that neighbours can compare them."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)


class _Slot:
    """A buffer for the rows of one hop.

    Attributes:
        host: the rows in host memory, where gloo reads and writes them; pinned on a GPU rank.
        staged: the rows on this rank's device; on a CPU rank the same tensor as `host`.
        copied: event after the last copy between `host` and `staged`; None on a CPU rank.
        filled: event before that copy, after the computation of the rows; None on a CPU rank.
    """

    def __init__(self, schema: HopSchema, max_rows: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        size = (max_rows, schema.row_bytes)
        self.host = torch.zeros(size, dtype=torch.uint8, pin_memory=on_gpu)
        self.staged = torch.zeros(size, dtype=torch.uint8, device=device) if on_gpu else self.host
        self.columns = schema.view_columns(self.staged)
        self.copied = torch.cuda.Event(enable_timing=True) if on_gpu else None
        self.filled = torch.cuda.Event(enable_timing=True) if on_gpu else None
        self.wait_for_send: Callable[[float], object] | None = None
        """Waits until the send is done, for at most the given seconds."""


def _wait_for_gloo(work: Any, peer: int, timeout_s: float) -> None:
    """Waits for a send over gloo. If the send fails, the error names the peer."""
    with Conversation(peer, "a send"):
        work.wait(timedelta(seconds=timeout_s))


class PipelineTransport:
    """The hops of one rank. Replaces the hops of vLLM's pipeline process group (see `attach`).

    For each step with tokens, every rank of a stage calls `isend_tensor_dict` once. The rank with the same
    tensor rank in the next stage calls `irecv_tensor_dict`, in the same order. Each rank sends all rows:
    vLLM's slicing over the tensor-parallel process group would need an all_gather on the other side, which
    a hop between devices does not have.
    """

    def __init__(
        self,
        *,
        group: Any,
        schema: HopSchema,
        max_rows: int,
        device: torch.device,
        timeout_s: float,
        meter: Meter,
        on_error: Callable[[BaseException], None],
    ) -> None:
        """Creates the buffers.

        Args:
            max_rows: largest number of rows in a step, including padding for CUDA graphs.
            timeout_s: longest wait for a peer, in seconds.
            on_error: called if a send fails in the sending thread of a GPU rank.
        """
        self._group = group
        self._schema = schema
        self._timeout_s = timeout_s
        self._meter = meter
        self._on_error = on_error
        self._rows = 0
        on_gpu = device.type == "cuda"
        # The last stage sends nothing, and the first stage receives nothing.
        num_sends = 0 if group.is_last_rank else _SLOTS
        num_receives = 0 if group.is_first_rank else _SLOTS
        self._send_slots = itertools.cycle([_Slot(schema, max_rows, device) for _ in range(num_sends)])
        self._recv_slots = itertools.cycle([_Slot(schema, max_rows, device) for _ in range(num_receives)])
        self._copy_stream = torch.cuda.Stream(device) if on_gpu and num_sends else None
        self._send_thread = ThreadPoolExecutor(1, "heteroinfer-send") if on_gpu and num_sends else None

    def attach(self) -> None:
        """Replaces the process group's own methods for hops, on this instance only.

        Source: vllm/v1/worker/gpu_worker.py::Worker.execute_model@v0.32.0, the only caller.
        """
        self._group.isend_tensor_dict = self.isend_tensor_dict
        self._group.irecv_tensor_dict = self.irecv_tensor_dict

    def expect_rows(self, rows: int) -> None:
        """Sets the number of rows of the next step, as the scheduler decided."""
        self._rows = rows

    def irecv_tensor_dict(
        self, *_: object, **__: object
    ) -> tuple[dict[str, torch.Tensor], list[Any], list[Callable[[], None]]]:
        """Starts to receive this step's rows from the previous stage.

        Returns:
            The arguments of vLLM's AsyncIntermediateTensors: the tensors, the handles to wait for, and
            the functions to run after the wait. Tensors have `max_rows` rows, so that a GPU stage can read
            its padded size. Rows after this step's rows contain old data.
        """
        slot = next(self._recv_slots)
        rows = self._rows
        if slot.copied is not None:
            slot.copied.synchronize()  # the slot's earlier rows must be on the device before new rows arrive
        peer = self._group.prev_rank
        message = slot.host[:rows]
        with Conversation(peer, "a receive"):
            work = dist.irecv(message, src=peer, group=self._group.cpu_group)
        return (
            dict(slot.columns),
            [_Receive(self, work, peer, message.nbytes)],
            [lambda: self._copy_to_device(slot, rows)],
        )

    def isend_tensor_dict(
        self, tensor_dict: Mapping[str, torch.Tensor], *_: object, **__: object
    ) -> list[Any]:
        """Starts to send a copy of this step's rows to the next stage.

        Later work on this rank's stream may overwrite the tensors.

        Returns:
            No handles: the transport waits for a buffer before it uses the buffer again.
        """
        slot = next(self._send_slots)
        self._wait_until_sent(slot)
        start = time.perf_counter()
        rows = self._rows
        self._fill(slot, tensor_dict, rows)
        self._start_send(slot, rows)
        self._meter.add_transfer("send", time.perf_counter() - start, rows * self._schema.row_bytes)
        return []

    def _fill(self, slot: _Slot, tensor_dict: Mapping[str, torch.Tensor], rows: int) -> None:
        """Copies this step's rows to a buffer.

        Raises:
            RuntimeError: the schema does not have a tensor that the model sends.
        """
        if unknown := set(tensor_dict) - set(slot.columns):
            raise RuntimeError(
                f"pipeline hop: the next stage has no buffer for {', '.join(sorted(unknown))}, which this "
                "stage sends (the model's make_empty_intermediate_tensors does not list every tensor). Use a "
                "spec.parallelism.mode other than Pipeline"
            )
        for name, column in slot.columns.items():
            # A step may omit a column (Granite4Vision's features, if there is no image or this stage was the
            # last to use them). The next stage must read zeros then, like the first content of its buffer.
            if name in tensor_dict:
                column[:rows].copy_(tensor_dict[name][:rows])
            else:
                column[:rows].zero_()

    def _start_send(self, slot: _Slot, rows: int) -> None:
        """Starts to send the rows of a buffer. Does not wait until they are sent."""
        peer = self._group.next_rank
        if self._send_thread is None:  # a CPU rank: the rows are in host memory already
            with Conversation(peer, "a send"):
                work = dist.isend(slot.host[:rows], dst=peer, group=self._group.cpu_group)
            slot.wait_for_send = functools.partial(_wait_for_gloo, work, peer)
        else:  # a GPU rank: the thread sends after the copy to the host, so this call does not wait
            self._copy_to_host(slot, rows)
            report_copy_time = self._meter.continue_on_device()  # the thread calls this after the copy
            slot.wait_for_send = self._send_thread.submit(
                self._send_after_copy, slot, rows, peer, report_copy_time
            ).result

    def _wait_until_sent(self, slot: _Slot) -> None:
        """Waits until the earlier send from this buffer is done, so that the buffer is free."""
        if slot.wait_for_send is None:
            return
        start = time.perf_counter()
        self._meter.set_awaited_rank(self._group.next_rank)
        slot.wait_for_send(self._timeout_s)
        slot.wait_for_send = None
        self._meter.set_awaited_rank(None)
        self._meter.add_wait(time.perf_counter() - start)

    def _copy_to_host(self, slot: _Slot, rows: int) -> None:
        """Copies rows to the host on a separate stream, after their computation."""
        assert self._copy_stream is not None
        assert slot.copied is not None
        assert slot.filled is not None
        self._copy_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._copy_stream):
            slot.filled.record(self._copy_stream)
            slot.host[:rows].copy_(slot.staged[:rows], non_blocking=True)
            slot.copied.record(self._copy_stream)

    def _copy_to_device(self, slot: _Slot, rows: int) -> None:
        """Copies received rows to the device, in the order of the stream that computes with them."""
        if slot.copied is None:
            return
        start = time.perf_counter()
        slot.staged[:rows].copy_(slot.host[:rows], non_blocking=True)
        slot.copied.record()
        # `wait_for_receive` counts the bytes.
        self._meter.add_transfer("recv", time.perf_counter() - start, 0)

    def _send_after_copy(
        self, slot: _Slot, rows: int, peer: int, report_copy_time: Callable[[float], None]
    ) -> None:
        """Sends a buffer's rows after their copy to the host, in the sending thread of a GPU rank."""
        assert slot.copied is not None
        assert slot.filled is not None
        try:
            slot.copied.synchronize()
            report_copy_time(slot.filled.elapsed_time(slot.copied) / 1e3)
            with Conversation(peer, "a send"):
                work = dist.isend(slot.host[:rows], dst=peer, group=self._group.cpu_group)
                work.wait(timedelta(seconds=self._timeout_s))
        except BaseException as error:  # without this report, only the next hop would show the error
            self._on_error(error)
            raise

    def wait_for_receive(self, work: Any, peer: int, num_bytes: int) -> None:
        """Waits for a receive and reports its cost to the meter.

        Raises:
            PeerLostError: the previous stage is gone or sent nothing in time.
        """
        start = time.perf_counter()
        self._meter.set_awaited_rank(peer)
        try:
            work.wait(timedelta(seconds=self._timeout_s))
        except RuntimeError as error:
            raise PeerLostError(peer, time.perf_counter() - start, str(error)) from error
        self._meter.set_awaited_rank(None)
        self._meter.add_wait(time.perf_counter() - start)
        self._meter.add_transfer("recv", 0.0, num_bytes)


class _Receive:
    """The handle that vLLM waits for when it uses the tensors."""

    def __init__(self, transport: PipelineTransport, work: Any, peer: int, num_bytes: int) -> None:
        self._transport, self._work, self._peer, self._num_bytes = transport, work, peer, num_bytes

    def wait(self) -> None:
        self._transport.wait_for_receive(self._work, self._peer, self._num_bytes)

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())
