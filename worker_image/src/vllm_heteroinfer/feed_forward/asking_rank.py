"""The rank with attention: its model lacks the parts that are elsewhere, and asks for them. Imports vLLM."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

from heteroinfer_contract.plan import Mode
from vllm_heteroinfer.feed_forward import remote, remote_parts
from vllm_heteroinfer.feed_forward.exchange import HostExchange, Watch, open_slab, probe
from vllm_heteroinfer.feed_forward.remote_parts import RemoteParts, check_one_size
from vllm_heteroinfer.feed_forward.slab import Shape

if TYPE_CHECKING:
    from vllm_heteroinfer.feed_forward.rank_port import RankPort

_logger = logging.getLogger(__name__)


class Asking:
    """This rank's side of the slab, from before its model is built."""

    def __init__(self, context: "RankPort") -> None:
        self._context = context
        self._lanes = context.plan.feed_forward_ranks(context.rank.stage)
        share = self._lanes[0].feed_forward
        assert share is not None
        self._layers = frozenset(share.layers)
        self._exchange: Any = None
        self._watch: Watch | None = None

    @classmethod
    def of(cls, context: "RankPort") -> "Asking | None":
        """Returns this rank's, None in other modes."""
        return cls(context) if context.plan.mode is Mode.FEED_FORWARD else None

    @contextmanager
    def loading(self, config: Any) -> Iterator[RemoteParts]:
        """Has the model that is built inside leave the plan's parts out; yields what it left out.

        vLLM keeps compiled graphs by its configuration: what is left out becomes a part of that.
        """
        config.additional_config = {
            **config.additional_config,
            "heteroinfer_feed_forward": sorted(self._layers),
        }
        with remote.replacing(self._layers) as found:
            yield found
        remote_parts.check_found(found, self._layers, self._context.plan.engine.model)

    def start(self, model: torch.nn.Module, config: Any, device: torch.device) -> None:
        """Opens the slab, waits until every lane can answer, and asks each once.

        Raises:
            ContractError: layers differ in size, or a lane does not see the slab.
            TimeoutError: a lane was not ready by the start-up deadline.
            RuntimeError: the probe came back wrong.
        """
        context = self._context
        shape = self._shape(model, config)
        slab, ready = open_slab(shape, context.rank, self._lanes, context.store, context.startup)
        if device.type == "cuda":
            from vllm_heteroinfer.feed_forward.cuda_exchange import CudaExchange

            self._exchange = CudaExchange(slab, device, limit_s=context.step_timeout_s)
        else:
            self._exchange = HostExchange(slab, self._lanes, ready)
        remote.connect(self._exchange)
        probe(self._exchange, shape, device)
        self._watch = Watch(slab, self._lanes, ready, context.fail)
        _logger.info(
            "rank %d asks feed-forward ranks %s for %d layers, %d rows of %d at most",
            context.rank.rank,
            [lane.rank for lane in self._lanes],
            len(self._layers),
            shape.max_rows,
            shape.hidden,
        )

    def begin_step(self) -> None:
        """Wakes the lanes: a step's asks follow."""
        if self._exchange is not None:
            self._exchange.begin_step()

    def check_steps(self) -> None:
        """Returns if the steps so far gave what may be used; see `Watch.check_steps`."""
        if self._watch is not None:
            self._watch.check_steps()

    def _shape(self, model: torch.nn.Module, config: Any) -> Shape:
        hidden, topk = {int(config.model_config.get_hidden_size())}, {0}
        parts = [
            module
            for module in model.modules()
            if isinstance(module, RoutedExperts) and isinstance(module.quant_method, remote.RemoteMethod)
        ]
        if parts:
            hidden, topk = {int(p.hidden_size) for p in parts}, {int(p.top_k) for p in parts}
        check_one_size(hidden, topk)
        return Shape(
            epoch=self._context.launch.epoch,
            hidden=hidden.pop(),
            topk=topk.pop(),
            max_rows=config.scheduler_config.max_num_batched_tokens,
            dtype=str(config.model_config.dtype).removeprefix("torch."),
            lanes=len(self._lanes),
        )
