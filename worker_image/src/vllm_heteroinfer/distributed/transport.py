"""Hops of a pipeline: hidden states from one stage to the next, one message a hop.

What a hop carries is known at start (the schema), how many rows when the step arrives, so
that a message needs no header. Rows are sent as bytes over gloo from host memory; a GPU
rank stages them through pinned buffers. Sends and receives are asynchronous: a receive is
waited for where its tensors are used, a send when its buffer is needed again.
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
"""Columns of a row begin at multiples of this, so that each can be viewed as its dtype."""
_SLOTS = 2
"""Buffers of each direction: one under way while the next is filled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One tensor of a hop.

    Attributes:
        name: key in vLLM's IntermediateTensors.
        dtype: name of the torch dtype, as `float32`.
        shape: of one row.
        offset_bytes: where it begins in a row.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset_bytes: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HopSchema:
    """What one row (token) of a hop looks like; equal on both of its sides."""

    columns: tuple[Column, ...]
    row_bytes: int

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor]) -> "HopSchema":
        """Returns the schema of tensors that each have one row per token."""
        columns, offset = [], 0
        for name in sorted(tensors):
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
            offset += -(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        return cls(columns=tuple(columns), row_bytes=offset)

    def views(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns each column of `rows` as a tensor that shares its memory.

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
        """Returns the one JSON text of this schema, to compare with the neighbour's."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)


class _Slot:
    """One buffer: rows on the host, on a GPU rank pinned and doubled on the device."""

    def __init__(self, schema: HopSchema, max_rows: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        size = (max_rows, schema.row_bytes)
        self.host = torch.zeros(size, dtype=torch.uint8, pin_memory=on_gpu)
        self.staged = torch.zeros(size, dtype=torch.uint8, device=device) if on_gpu else self.host
        self.columns = schema.views(self.staged)
        self.copied = torch.cuda.Event(enable_timing=True) if on_gpu else None
        self.filled = torch.cuda.Event(enable_timing=True) if on_gpu else None
        self.wait_for_send: Callable[[float], object] | None = None
        """Waits for at most so many seconds."""


def _wait_for_gloo(work: Any, peer: int, timeout_s: float) -> None:
    with Conversation(peer, "a send"):
        work.wait(timedelta(seconds=timeout_s))


class PipelineTransport:
    """The hops of one rank, put on vLLM's process group of the pipeline as instance attributes.

    Every rank of a stage calls `isend_tensor_dict` once for each step with tokens, and the
    rank of equal tensor rank in the next stage `irecv_tensor_dict`, in the same order.
    Each sends all of its rows: vLLM's slicing over the tensor-parallel process group would need an
    all_gather on the other side, which a hop between devices does not have.
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
        """Makes the buffers.

        Args:
            max_rows: most rows of a step, padding for CUDA graphs included.
            timeout_s: after which a peer that sends or takes nothing is given up, in seconds.
            on_error: called by the sending thread of a GPU rank when a send fails.
        """
        self._group = group
        self._schema = schema
        self._timeout_s = timeout_s
        self._meter = meter
        self._on_error = on_error
        self._rows = 0
        on_gpu = device.type == "cuda"
        sends = 0 if group.is_last_rank else _SLOTS
        receives = 0 if group.is_first_rank else _SLOTS
        self._send_slots = itertools.cycle([_Slot(schema, max_rows, device) for _ in range(sends)])
        self._recv_slots = itertools.cycle([_Slot(schema, max_rows, device) for _ in range(receives)])
        self._copies = torch.cuda.Stream(device) if on_gpu and sends else None
        self._sender = ThreadPoolExecutor(1, "heteroinfer-send") if on_gpu and sends else None

    def attach(self) -> None:
        """Replaces the process group's own hops, on this instance only.

        Source: vllm/v1/worker/gpu_worker.py::Worker.execute_model@v0.32.0, the only caller.
        """
        self._group.isend_tensor_dict = self.isend_tensor_dict
        self._group.irecv_tensor_dict = self.irecv_tensor_dict

    def expect(self, rows: int) -> None:
        """Says how many rows the step has that comes now, as the scheduler decided."""
        self._rows = rows

    def irecv_tensor_dict(
        self, *_: object, **__: object
    ) -> tuple[dict[str, torch.Tensor], list[Any], list[Callable[[], None]]]:
        """Starts to receive this step's rows from the stage before.

        Returns:
            The tensors, the handles to wait for, and what to run after the wait, as
            vLLM's AsyncIntermediateTensors takes them. Tensors are large enough for `max_rows`,
            so that a GPU stage may read its padded size; rows past the step's are old.
        """
        slot = next(self._recv_slots)
        rows = self._rows
        if slot.copied is not None:
            slot.copied.synchronize()  # the copy to the device of the hop before the last
        peer = self._group.prev_rank
        message = slot.host[:rows]
        with Conversation(peer, "a receive"):
            work = dist.irecv(message, src=peer, group=self._group.cpu_group)
        return (
            dict(slot.columns),
            [_Receive(self, work, peer, message.nbytes)],
            [lambda: self._unstage(slot, rows)],
        )

    def isend_tensor_dict(
        self, tensor_dict: Mapping[str, torch.Tensor], *_: object, **__: object
    ) -> list[Any]:
        """Starts to send this step's rows to the stage after.

        The tensors may be overwritten by later work of this rank's stream: they are copied.

        Returns:
            No handles: a buffer is waited for before it is used again.
        """
        slot = next(self._send_slots)
        self._wait_for(slot)
        start = time.perf_counter()
        rows = self._rows
        if unknown := set(tensor_dict) - set(slot.columns):
            raise RuntimeError(
                f"it sends {', '.join(sorted(unknown))}, for which the next one has no buffer (not in "
                "make_empty_intermediate_tensors): this model cannot be split into stages"
            )
        for name, column in slot.columns.items():
            # A column that a step leaves out (Granite4Vision's features, where there is no image, or where
            # this stage has used them up) reads as zeros, as the next stage's own buffer does at first.
            if name in tensor_dict:
                column[:rows].copy_(tensor_dict[name][:rows])
            else:
                column[:rows].zero_()
        peer = self._group.next_rank
        if self._sender is None:
            with Conversation(peer, "a send"):
                work = dist.isend(slot.host[:rows], dst=peer, group=self._group.cpu_group)
            slot.wait_for_send = functools.partial(_wait_for_gloo, work, peer)
        else:
            self._stage(slot, rows)
            done = self._meter.runs_on()
            slot.wait_for_send = self._sender.submit(self._send_staged, slot, rows, peer, done).result
        self._meter.transferred("send", time.perf_counter() - start, rows * self._schema.row_bytes)
        return []

    def _wait_for(self, slot: _Slot) -> None:
        if slot.wait_for_send is None:
            return
        start = time.perf_counter()
        self._meter.waiting_for(self._group.next_rank)
        slot.wait_for_send(self._timeout_s)
        slot.wait_for_send = None
        self._meter.waiting_for(None)
        self._meter.waited(time.perf_counter() - start)

    def _stage(self, slot: _Slot, rows: int) -> None:
        """Copies rows to the host on a stream of its own, after what made them."""
        assert self._copies is not None
        assert slot.copied is not None
        assert slot.filled is not None
        self._copies.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._copies):
            slot.filled.record(self._copies)
            slot.host[:rows].copy_(slot.staged[:rows], non_blocking=True)
            slot.copied.record(self._copies)

    def _unstage(self, slot: _Slot, rows: int) -> None:
        """Copies received rows to the device, in the order of the stream that computes."""
        if slot.copied is None:
            return
        start = time.perf_counter()
        slot.staged[:rows].copy_(slot.host[:rows], non_blocking=True)
        slot.copied.record()
        self._meter.transferred("recv", time.perf_counter() - start, 0)

    def _send_staged(self, slot: _Slot, rows: int, peer: int, done: Callable[[float], None]) -> None:
        assert slot.copied is not None
        assert slot.filled is not None
        try:
            slot.copied.synchronize()
            done(slot.filled.elapsed_time(slot.copied) / 1e3)
            with Conversation(peer, "a send"):
                work = dist.isend(slot.host[:rows], dst=peer, group=self._group.cpu_group)
                work.wait(timedelta(seconds=self._timeout_s))
        except BaseException as error:  # nobody else would see it before the next hop
            self._on_error(error)
            raise

    def finish_receive(self, work: Any, peer: int, num_bytes: int) -> None:
        """Waits for a receive.

        Raises:
            PeerLostError: the stage before is gone or sent nothing in time.
        """
        start = time.perf_counter()
        self._meter.waiting_for(peer)
        try:
            work.wait(timedelta(seconds=self._timeout_s))
        except RuntimeError as error:
            raise PeerLostError(peer, time.perf_counter() - start, str(error)) from error
        self._meter.waiting_for(None)
        self._meter.waited(time.perf_counter() - start)
        self._meter.transferred("recv", 0.0, num_bytes)


class _Receive:
    """The handle that vLLM waits for where the tensors are used."""

    def __init__(self, transport: PipelineTransport, work: Any, peer: int, num_bytes: int) -> None:
        self._transport, self._work, self._peer, self._num_bytes = transport, work, peer, num_bytes

    def wait(self) -> None:
        self._transport.finish_receive(self._work, self._peer, self._num_bytes)

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())
