"""vLLM's collectives of a tensor-parallel process group with CPU ranks, over the bridge. Imports vLLM."""

from typing import Any, NoReturn

import torch
from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase

from heteroinfer_contract.errors import ContractError
from vllm_heteroinfer.distributed.bridge import Bridge


class BridgeCommunicator(DeviceCommunicatorBase):
    """A process group's collectives over the bridge; call `connect` first.

    The constructor calls no collective, so that the other ranks may construct another class. Only the
    tensor-parallel process group is connected (a mixture-of-experts model has a second process group). The
    communicator refuses vLLM's calls on the other process groups.
    Source: vllm/distributed/parallel_state.py::GroupCoordinator@v0.32.0, the only caller.
    """

    bridge: Bridge | None = None
    _in_place = False

    def connect(self, bridge: Bridge, *, in_place: bool) -> None:
        """Sends every later collective over `bridge`.

        Args:
            bridge: must connect exactly this process group's ranks.
            in_place: whether a sum may overwrite its operand, as in vLLM's CpuCommunicator. Must be false if
                vLLM calls `all_reduce` in a torch operator, because an operator must not change its operand.
        """
        self.bridge = bridge
        self._in_place = in_place

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        """Returns the sum over the process group; every rank calls it in the same order."""
        return self._require_bridge("all_reduce").all_reduce(input_, in_place=self._in_place)

    def all_gather(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Concatenates the ranks' tensors along `dim`; every rank calls it in the same order."""
        return self._require_bridge("all_gather").all_gather(input_, dim)

    def all_gatherv(
        self, input_: torch.Tensor | list[torch.Tensor], dim: int = 0, sizes: list[int] | None = None
    ) -> torch.Tensor | list[torch.Tensor]:
        """Concatenates the ranks' tensors along `dim`; rank i's tensor has `sizes[i]` entries."""
        return self._require_bridge("all_gatherv").all_gatherv(input_, dim, sizes)

    def reduce_scatter(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Returns this rank's share of the sum over the process group.

        All ranks have equal shares, cut along `dim`.
        """
        return self._require_bridge("reduce_scatter").reduce_scatter(input_, dim)

    def reduce_scatterv(
        self, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None
    ) -> torch.Tensor:
        """Returns this rank's share of the sum over the process group.

        Rank i's share has `sizes[i]` entries along `dim`.
        """
        return self._require_bridge("reduce_scatterv").reduce_scatterv(input_, dim, sizes)

    def gather(self, input_: torch.Tensor, dst: int = 0, dim: int = -1) -> torch.Tensor | None:
        """Concatenates the ranks' tensors along `dim` on rank `dst`; returns None on other ranks."""
        return self._require_bridge("gather").gather(input_, dst, dim)

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
        """Overwrites `tensor` with the tensor of rank `src` of the process group, and returns it."""
        return self._require_bridge("broadcast").broadcast(tensor, src)

    def send(self, tensor: torch.Tensor, dst: int | None = None) -> None:
        """Sends to rank `dst` of the process group, by default the next rank."""
        self._require_bridge("send").send(
            tensor, (self.rank_in_group + 1) % self.world_size if dst is None else dst
        )

    def recv(self, size: torch.Size, dtype: torch.dtype, src: int | None = None) -> torch.Tensor:
        """Receives a tensor from rank `src` of the process group, by default the previous rank."""
        src = (self.rank_in_group - 1) % self.world_size if src is None else src
        return self._require_bridge("recv").recv(size, dtype, src)

    def batch_isend_irecv(self, p2p_ops: list[Any]) -> NoReturn:
        """Refuses the call. Only expert parallelism and connectors use it, and HeteroInfer refuses both."""
        self._refuse("batch_isend_irecv")

    def destroy(self) -> None:
        """Closes the bridge."""
        if self.bridge is not None:
            self.bridge.close()
            self.bridge = None

    def _require_bridge(self, operation: str) -> Bridge:
        """Returns the bridge; refuses `operation` if this process group has none."""
        if self.bridge is None:
            self._refuse(operation)
        return self.bridge

    def _refuse(self, operation: str) -> NoReturn:
        """Raises the ContractError for an operation that this process group does not support."""
        raise ContractError(
            f"process group {self.unique_name}: {operation} is not supported (between GPU and CPU ranks, "
            "only the tensor-parallel process group has collectives). Set spec.parallelism.mode: Pipeline"
        )
