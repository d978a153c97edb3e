"""Chooses the mode of a rank, that is, its additions to vLLM's worker, by the plan. Imports vLLM."""

from typing import TYPE_CHECKING, Any

import torch
from vllm.config import CompilationMode
from vllm.distributed.parallel_state import get_pp_group, get_tp_group

from heteroinfer_contract.plan import Mode
from vllm_heteroinfer.distributed.bridge_communicator import BridgeCommunicator
from vllm_heteroinfer.distributed.transport import HopSchema, PipelineTransport
from vllm_heteroinfer.group.fingerprint import SAME_MODEL
from vllm_heteroinfer.rank.context import RankContext
from vllm_heteroinfer.rank.worker.rank_mode import RankMode

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def connect(context: RankContext, device: torch.device, config: "VllmConfig") -> RankMode:
    """Builds the mode of this rank. Every rank must call this once, after its process groups exist."""
    stages = PipelineHops(context, device) if get_pp_group().world_size > 1 else RankMode()
    if context.plan.mode is Mode.FEED_FORWARD:
        from vllm_heteroinfer.rank.worker.asking import Asking

        return Asking(context, device, config, stages=stages)
    group = get_tp_group()
    # A stage without the bridge, such as a stage of GPUs only, needs nothing besides the hops.
    if context.plan.mode is not Mode.TENSOR or not isinstance(group.device_communicator, BridgeCommunicator):
        return stages
    from vllm_heteroinfer.rank.worker.tensor_group import TensorGroup

    compiles = config.compilation_config.mode is not CompilationMode.NONE
    return TensorGroup.connect(context, group, device, stages=stages, compiles=compiles)


class PipelineHops(RankMode):
    """The hops of a group with several stages."""

    _transport: PipelineTransport

    def __init__(self, context: RankContext, device: torch.device) -> None:
        self._context, self._device = context, device

    def model_loaded(self, runner: Any) -> None:
        """Compares the tensors of the hop with the previous stage, and allocates the buffers of the hops.

        Raises:
            RuntimeError: the previous stage sends other tensors.
        """
        context, group = self._context, get_pp_group()
        empty = runner.get_model().make_empty_intermediate_tensors(
            batch_size=1, dtype=runner.vllm_config.model_config.dtype, device=self._device
        )
        schema = HopSchema.of_tensors(empty.tensors)
        self._compare_with_previous(schema)
        self._transport = PipelineTransport(
            group=group,
            schema=schema,
            max_rows=runner.max_num_tokens,
            device=self._device,
            timeout_s=context.step_timeout_s,
            meter=context.metrics,
            on_error=context.fail,
        )
        self._transport.attach()
        context.metrics.record_path("stages", "gloo")

    def begin_step(self, rows: int, *, for_client: bool) -> None:
        """Sets how many rows the stages exchange in this step. Steps that serve no client need this, too."""
        self._transport.expect_rows(rows)

    def _compare_with_previous(self, schema: HopSchema) -> None:
        """Publishes this stage's hop schema, and compares it with the previous stage's schema."""
        context, group = self._context, get_pp_group()
        own_schema = schema.to_json()
        context.store.put(f"hop/{context.rank.rank}", own_schema)
        if group.is_first_rank:
            return
        peer = group.prev_rank
        peer_schema = context.store.get(
            f"hop/{peer}",
            context.startup,
            awaited=f"description of the hidden states of rank {peer}",
            rank=peer,
        )
        if peer_schema != own_schema:
            raise RuntimeError(
                f"rank {context.rank.rank} expects hidden states {own_schema}, but rank {peer} sends "
                f"{peer_schema}. {SAME_MODEL}"
            )
