"""The collectives of one process group of GPU and CPU ranks, over host memory.

Each rank publishes its own part, reads the parts of all other ranks, and combines the parts in the
process group's order. All ranks combine the same numbers in the same order, so all get the same bits.
"""

import functools
import logging
import math
import platform
from collections.abc import Sequence
from typing import Any, Literal

import torch

from heteroinfer_contract.errors import ContractError
from vllm_heteroinfer.distributed.bridge.bridge_exchange import Exchange
from vllm_heteroinfer.distributed.bridge.bridge_link import (
    MESSAGE_BYTES,
    PART_BYTES,
    BridgeLink,
    Buffer,
    Form,
    ProcessGroupRanks,
    form_of,
)
from vllm_heteroinfer.distributed.bridge.bridge_slab import (
    PROOF,
    WORDS,
    BridgeSlab,
    gather_values,
    share_slab,
)
from vllm_heteroinfer.distributed.bridge.gloo import GlooLink
from vllm_heteroinfer.distributed.bridge.header import (
    HeaderTemplate,
    Operation,
    header_of_part,
    num_parts,
    pack_header,
)
from vllm_heteroinfer.distributed.bridge.shared_memory import SharedMemoryLink, choose_path
from vllm_heteroinfer.distributed.bridge.staging import CudaStaging, Staging
from vllm_heteroinfer.distributed.bridge.stream_signal import StreamSignal, create_signal
from vllm_heteroinfer.distributed.meter import Meter

_logger = logging.getLogger(__name__)
_NARROW = (torch.bfloat16, torch.float16)
"""Dtypes that are summed in float32."""


class Bridge:
    """Collectives of one process group. Every rank must call the same collectives in the same order.

    The arguments `src` and `dst` are ranks in the process group, as in vLLM's
    DeviceCommunicatorBase. Errors name global ranks. Only one thread may call a bridge. Returned
    GPU tensors are ordered on the current stream. The caller may overwrite arguments after a call.

    Every collective raises:
        CollectiveMismatchError: another rank called a different collective, or the same collective
            with a different shape, dtype, step, count or history.
        PeerLostError: another rank did not call the collective within the time-out.

    Attributes:
        path: how parts travel between the ranks: `shared_memory` or `gloo`.
        listeners: global ranks that receive announcements: all CPU ranks except the first rank.
    """

    def __init__(  # noqa: PLR0913 - a rank needs them all to connect
        self,
        *,
        group: str,
        ranks: Sequence[int],
        rank: int,
        device: torch.device,
        cpu_group: Any,
        share_host: bool,
        timeout_s: float,
        meter: Meter,
    ) -> None:
        """Connects the ranks. All ranks must call the constructor at the same time.

        Args:
            group: name of the process group for logs and errors, such as `tp:0`.
            ranks: global ranks, in the process group's order.
            rank: this process's global rank.
            device: this rank's device; a GPU needs its index.
            cpu_group: gloo ProcessGroup of exactly these ranks.
            share_host: whether the plan puts the ranks on one host. If so, the constructor tests that they
                can share memory.
            timeout_s: longest wait for another rank, in seconds.

        Raises:
            ContractError: the ranks got different arguments, or cannot share memory although
                the plan puts them on one host.
        """
        rank_facts = gather_values((share_host, device.type, platform.machine()), cpu_group)
        share_flags, device_types, machines = zip(*rank_facts, strict=True)
        if len(set(share_flags)) > 1:
            raise ContractError(
                f"process group {group}: share_host must be the same on ranks {list(ranks)} "
                f"(got {list(share_flags)}). Start every rank with the same plan"
            )
        self._process_group = ProcessGroupRanks(
            group=group,
            ranks=tuple(ranks),
            index=tuple(ranks).index(rank),
            listeners=tuple(i for i, kind in enumerate(device_types) if i > 0 and kind == "cpu"),
        )
        self.listeners = tuple(ranks[i] for i in self._process_group.listeners)
        self.path: Literal["shared_memory", "gloo"]
        self.path, reason = choose_path(share_host, set(machines))
        self._device = device
        self._send_link = GlooLink(cpu_group, self._process_group, device, timeout_s=timeout_s, meter=meter)
        self._link: BridgeLink = self._send_link
        signal, publisher = None, "by the host"
        if self.path == "shared_memory":
            slab = share_slab(self._process_group, cpu_group, device)
            self._link = SharedMemoryLink(slab, self._process_group, timeout_s=timeout_s, meter=meter)
            if device.type == "cuda":
                signal, publisher = self._create_signal(slab)
        staging = self._create_staging(signal)
        self._exchange = Exchange(self._process_group, self._link, staging, meter)
        # Twice a part, because numbers of 16 bits are summed in float32.
        self._sum_buffer = Buffer(torch.empty(2 * PART_BYTES, dtype=torch.uint8, device=device))
        self._step = self._count = self._history = 0
        self._send_counts: dict[tuple[int, int], int] = {}
        text = (
            "process group %s (ranks %s): the bridge uses %s, because %s. Buffers in host memory: %s. Parts "
            "for other ranks are published %s"
        )
        _logger.info(text, group, list(ranks), self.path, reason, staging.description, publisher)

    def _create_signal(self, slab: BridgeSlab) -> tuple[StreamSignal | None, str]:
        """Creates the signal with which the GPU publishes small parts itself, by a write on its stream.

        If the driver does not support such writes, returns None and the reason for the log. Then the host
        publishes all parts, after it has waited for the stream.
        """
        # The constructor of a signal tests it with a word of this rank that nothing else uses.
        proof_word = self._process_group.index * WORDS + PROOF
        return create_signal(slab.words, slab.bytes.data_ptr(), self._device, proof_word)

    def _create_staging(self, signal: StreamSignal | None) -> Staging:
        """Creates the copies between this rank's device and the link's buffers in host memory.

        Args:
            signal: with which a GPU publishes small parts itself, or None.
        """
        if self._device.type != "cuda":
            return Staging()
        return CudaStaging(self._device, self._process_group.peers, self._link.buffers(), signal)

    def set_timeout(self, timeout_s: float) -> None:
        """Sets the longest wait for another rank, in seconds."""
        self._send_link.timeout_s = self._link.timeout_s = timeout_s

    def begin_step(self, step: int) -> None:
        """Starts a step of the engine.

        The ranks compare the step's number. The count of collectives starts again at 0.
        """
        self._step, self._count = step, 0

    def set_history(self, digest: int) -> None:
        """Sets the checksum of all tokens sampled so far, which the ranks compare; 64 bits are used."""
        self._history = digest & 0xFFFFFFFFFFFFFFFF

    def all_reduce(self, x: torch.Tensor, *, in_place: bool = False) -> torch.Tensor:
        """Returns the sum over the ranks, with the same bits on each rank.

        bf16 and fp16 are summed in float32 and rounded once.

        Args:
            x: any shape; shape and dtype must be the same on each rank.
            in_place: whether the sum may overwrite and return `x`.
        """
        if x.nbytes <= PART_BYTES:
            return self._all_reduce_one_part(x, x if in_place else None)
        header = self._next_header(Operation.ALL_REDUCE, x, x.shape)
        source = x.contiguous()
        target = x if in_place and source is x else torch.empty_like(source)
        flat_target = target.view(-1)
        self._exchange.exchange_parts(
            header,
            source.view(-1),
            [x.numel()] * len(self._process_group.ranks),
            lambda begin, end, parts: self._sum(flat_target[begin:end], parts),
        )
        return target

    def _all_reduce_one_part(self, x: torch.Tensor, target: torch.Tensor | None) -> torch.Tensor:
        """Sums a tensor that fits in one part, without flat views of it.

        A view takes about 1 us, and a decode step of a model with 32 layers makes 65 calls.
        """
        form = form_of(x.dtype, x.shape)
        self._exchange.copy_out(x, form)
        self._count += 1
        # The copy to the host runs while this thread fills the header.
        header = _all_reduce_template(form).fill(self._step, self._count, self._history)
        parts = self._exchange.publish_and_collect(header, x, form)
        if len(parts) == 2:  # torch adds two narrow floats in float32 and rounds once, as in `_sum`
            result = torch.add(*parts, out=target)
        else:
            result = torch.empty_like(parts[self._process_group.index]) if target is None else target
            self._sum(result, parts)
        self._exchange.mark_used(form)
        return result

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Concatenates the ranks' tensors along `dim`, in the process group's order."""
        header = self._next_header(Operation.ALL_GATHER, x, x.shape)
        return self._gather(header, x, dim, [x.shape[dim]] * len(self._process_group.ranks))

    def all_gatherv(
        self, x: torch.Tensor | list[torch.Tensor], dim: int = 0, sizes: Sequence[int] | None = None
    ) -> torch.Tensor | list[torch.Tensor]:
        """Concatenates the ranks' tensors along `dim`. The tensors' sizes along `dim` may differ.

        Args:
            x: this rank's tensor, or several tensors.
            sizes: each rank's size along `dim`; None if all sizes are equal.
        """
        if isinstance(x, list):
            return [self._gather_unequal(each, dim, sizes) for each in x]
        return self._gather_unequal(x, dim, sizes)

    def _gather_unequal(self, x: torch.Tensor, dim: int, sizes: Sequence[int] | None) -> torch.Tensor:
        """Concatenates the ranks' tensors along `dim`; rank i's tensor has `sizes[i]` entries."""
        if sizes is None:
            return self.all_gather(x, dim)
        dim %= x.dim()
        self._check_sizes(sizes, x.shape[dim], dim)
        shape = (*x.shape[:dim], -1, *x.shape[dim + 1 :])  # headers must not contain the rank's own size
        return self._gather(self._next_header(Operation.ALL_GATHERV, x, shape, sizes=sizes), x, dim, sizes)

    def gather(self, x: torch.Tensor, dst: int = 0, dim: int = -1) -> torch.Tensor | None:
        """Concatenates the ranks' tensors along `dim` on rank `dst`. Returns None on other ranks."""
        header = self._next_header(Operation.GATHER, x, x.shape, root=dst)
        sizes = [x.shape[dim]] * len(self._process_group.ranks)
        if self._process_group.index == dst:
            return self._gather(header, x, dim, sizes)
        self._exchange.exchange_parts(header, x.movedim(dim, 0).reshape(-1), [x.numel()] * len(sizes), None)
        return None

    def reduce_scatter(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Returns this rank's share along `dim` of the sum over the ranks.

        Raises:
            ValueError: `x` cannot be divided into equal shares.
        """
        world, size = len(self._process_group.ranks), x.shape[dim]
        if size % world:
            raise ValueError(
                f"reduce_scatter: size along dim {dim} must be a multiple of {world} (got {size}). "
                "Use reduce_scatterv for unequal shares"
            )
        return self._scatter(
            self._next_header(Operation.REDUCE_SCATTER, x, x.shape), x, dim, [size // world] * world
        )

    def reduce_scatterv(
        self, x: torch.Tensor, dim: int = -1, sizes: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Returns this rank's share of the sum over the ranks.

        Rank i's share has `sizes[i]` entries along `dim`.
        """
        if sizes is None:
            return self.reduce_scatter(x, dim)
        self._check_sizes(sizes, sizes[self._process_group.index], dim)
        if sum(sizes) != x.shape[dim]:
            raise ValueError(
                f"reduce_scatterv: sizes must add up to {x.shape[dim]} (got {list(sizes)}). Pass the size of "
                "each rank's share"
            )
        return self._scatter(
            self._next_header(Operation.REDUCE_SCATTERV, x, x.shape, sizes=sizes), x, dim, sizes
        )

    def broadcast(self, x: torch.Tensor, src: int = 0) -> torch.Tensor:
        """Overwrites `x` with the tensor of rank `src`. Returns `x`."""
        # Only rank `src` publishes elements. `flat` is a copy if `x` is not contiguous.
        header = self._next_header(Operation.BROADCAST, x, x.shape, root=src)
        counts = [x.numel() if index == src else 0 for index in range(len(self._process_group.ranks))]
        flat = x.contiguous().view(-1)
        if self._process_group.index == src:
            self._exchange.exchange_parts(header, flat, counts, None)
            return x
        self._exchange.exchange_parts(
            header, flat, counts, lambda begin, end, parts: flat[begin:end].copy_(parts[src])
        )
        if flat.data_ptr() != x.data_ptr():
            x.copy_(flat.view(x.shape))
        return x

    def send(self, x: torch.Tensor, dst: int) -> None:
        """Sends a tensor to rank `dst`, which must call `recv`. Uses gloo even with shared memory."""
        flat = x.contiguous().view(-1)
        header = self._next_send_header(self._process_group.index, dst, x.shape, x.dtype)
        part_elements = PART_BYTES // x.element_size()
        for part in range(num_parts(flat.numel(), part_elements)):
            elements = flat[part * part_elements : (part + 1) * part_elements]
            self._send_link.send(dst, header_of_part(header, part), elements)

    def recv(self, shape: Sequence[int], dtype: torch.dtype, src: int) -> torch.Tensor:
        """Receives a tensor from rank `src`, on this rank's device.

        Raises:
            CollectiveMismatchError: rank `src` sends a different shape or dtype.
        """
        target = torch.empty(tuple(shape), dtype=dtype, device=self._device)
        flat = target.view(-1)
        header = self._next_send_header(src, self._process_group.index, shape, dtype)
        part_elements = PART_BYTES // target.element_size()
        for part in range(num_parts(flat.numel(), part_elements)):
            peer_header, buffer = self._send_link.receive(src)
            self._exchange.compare(header_of_part(header, part), src, peer_header)
            target_part = flat[part * part_elements : (part + 1) * part_elements]
            target_part.copy_(buffer.first_elements(dtype, target_part.numel()))
        return target

    def announce(self, message: bytes) -> None:
        """Sends a message to every listener without waiting; listeners must call `listen`.

        Only the first rank may call it.

        Raises:
            ValueError: the message is longer than 4096 bytes, or this is not the first rank.
            PeerLostError: a listener left 16 messages unread for the whole time-out.
        """
        if self._process_group.index:
            raise ValueError(
                f"announce: the sender must be rank {self._process_group.ranks[0]}, the first of its process "
                f"group (got rank {self._process_group.own_rank}). Call `listen` on other ranks"
            )
        if len(message) > MESSAGE_BYTES:
            raise ValueError(
                f"announce: the message must have at most {MESSAGE_BYTES} bytes (got {len(message)}). "
                "Shorten the message"
            )
        self._link.announce(message)

    def listen(self, deadline_s: float) -> bytes:
        """Waits for the next announcement of the first rank; only listeners may call it.

        Raises:
            PeerLostError: no announcement arrived within `deadline_s` seconds.
        """
        return self._link.listen(deadline_s)

    def close(self) -> None:
        """Frees the buffers and connections; ranks that wait for this rank see immediately that it left."""
        self._exchange.wait_for_copies()
        self._link.close()
        self._send_link.close()

    def _gather(self, header: bytes, x: torch.Tensor, dim: int, sizes: Sequence[int]) -> torch.Tensor:
        """Concatenates the ranks' tensors along `dim`; `sizes` has each rank's size along `dim`."""
        dim %= x.dim()
        rows = x.movedim(dim, 0).contiguous()
        row_elements = math.prod(rows.shape[1:])
        whole = torch.empty((sum(sizes), *rows.shape[1:]), dtype=x.dtype, device=x.device)
        flat = whole.view(-1)
        counts = [size * row_elements for size in sizes]
        starts = [sum(counts[:index]) for index in range(len(counts))]

        def copy_parts(begin: int, end: int, parts: Sequence[torch.Tensor]) -> None:
            """Copies elements [begin, end) of each rank's tensor to their places in the result."""
            for start, part in zip(starts, parts, strict=True):
                flat[start + begin : start + begin + part.numel()].copy_(part)

        self._exchange.exchange_parts(header, rows.view(-1), counts, copy_parts)
        return whole.movedim(0, dim).contiguous()

    def _scatter(self, header: bytes, x: torch.Tensor, dim: int, sizes: Sequence[int]) -> torch.Tensor:
        """Returns this rank's share of the sum along `dim`; `sizes` has the size of each rank's share."""
        dim %= x.dim()
        rows = x.movedim(dim, 0).contiguous()
        index = self._process_group.index
        share = torch.empty((sizes[index], *rows.shape[1:]), dtype=x.dtype, device=x.device)
        flat = share.view(-1)
        first_element = sum(sizes[:index]) * math.prod(rows.shape[1:])

        def sum_parts(begin: int, end: int, parts: Sequence[torch.Tensor]) -> None:
            """Sums elements [begin, end), which are in this rank's share."""
            self._sum(flat[begin - first_element : end - first_element], parts)

        counts = [x.numel()] * len(sizes)  # each rank publishes its whole tensor
        self._exchange.exchange_parts(
            header, rows.view(-1), counts, sum_parts, needed=(first_element, first_element + flat.numel())
        )
        return share.movedim(0, dim).contiguous()

    def _sum(self, target: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
        """Writes the sum of the parts in the given order; `target` may be one of the parts."""
        if len(parts) == 2:  # torch adds narrow floats in float32 and rounds once, on CPUs and GPUs
            torch.add(parts[0], parts[1], out=target)
            return
        wide = torch.float32 if target.dtype in _NARROW else target.dtype
        total = self._sum_buffer.view_as(form_of(wide, target.shape))
        total.copy_(parts[0])
        for part in parts[1:]:
            total.add_(part)
        target.copy_(total)

    def _next_header(
        self,
        operation: Operation,
        x: torch.Tensor,
        shape: Sequence[int],
        *,
        root: int = -1,
        sizes: Sequence[int] | None = None,
    ) -> bytes:
        """Counts a collective of this step, and packs its header."""
        self._count += 1
        return pack_header(
            operation,
            shape=shape,
            dtype=str(x.dtype),
            root=root,
            step=self._step,
            count=self._count,
            history=self._history,
            sizes=sizes,
        )

    def _next_send_header(self, src: int, dst: int, shape: Sequence[int], dtype: torch.dtype) -> bytes:
        """Counts a tensor that rank `src` sends to rank `dst`, and packs its header."""
        count = self._send_counts[src, dst] = self._send_counts.get((src, dst), 0) + 1
        return pack_header(
            Operation.SEND,
            shape=shape,
            dtype=str(dtype),
            root=src,
            step=self._step,
            count=count,
            history=self._history,
        )

    def _check_sizes(self, sizes: Sequence[int], own: int, dim: int) -> None:
        """Raises ValueError unless `sizes` has an entry for each rank, and this rank's entry is `own`."""
        if len(sizes) != len(self._process_group.ranks) or sizes[self._process_group.index] != own:
            raise ValueError(
                f"sizes along dim {dim}: must have {len(self._process_group.ranks)} entries, and the entry "
                f"of rank {self._process_group.index} of the process group must be {own} (got "
                f"{list(sizes)}). Pass the size of each rank's tensor or share"
            )


@functools.lru_cache(1024)
def _all_reduce_template(form: Form) -> HeaderTemplate:
    """Returns the message header for an all-reduce of tensors of this form.

    Step, count and history differ in each call, so the caller fills them in.
    """
    return HeaderTemplate(Operation.ALL_REDUCE, shape=form.shape, dtype=str(form.dtype))
