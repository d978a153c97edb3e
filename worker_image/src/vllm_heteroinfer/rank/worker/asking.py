"""The mode of a rank with attention, which asks feed-forward ranks for parts of its model. Imports vLLM."""

import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from vllm.config import CUDAGraphMode

from heteroinfer_contract.group_report import RankPhase
from vllm_heteroinfer.feed_forward import recording, remote, remote_parts
from vllm_heteroinfer.feed_forward.exchange import (
    FeedForwardWatch,
    HostExchange,
    LaneReady,
    no_description,
    open_slab,
    probe,
)
from vllm_heteroinfer.feed_forward.offered_weights import OfferedWeights, weights_key
from vllm_heteroinfer.feed_forward.recipe import Recipe, recipe_key
from vllm_heteroinfer.feed_forward.relay import Relay, connect_all, relay_cpus
from vllm_heteroinfer.feed_forward.slab import Slab, shape_of
from vllm_heteroinfer.feed_forward.slab_lanes import asking_lanes, relayed_lanes
from vllm_heteroinfer.feed_forward.spinning import spin_time_ns
from vllm_heteroinfer.kernels.weight_bytes import weight_bytes
from vllm_heteroinfer.rank.context import RankContext
from vllm_heteroinfer.rank.expert_meter import ExpertMeter
from vllm_heteroinfer.rank.worker.rank_mode import ModelLoad, RankMode

_logger = logging.getLogger(__name__)


class _RemoteLoad(ModelLoad):
    """Records the parts of feed-forward ranks during the load, and omits their tensors."""

    def __init__(
        self,
        config: Any,
        parts: Mapping[int, remote_parts.RemotePart],
        planned_layers: Collection[int],
        publish: Callable[[Recipe], None],
    ) -> None:
        self._config = config
        self._parts = parts
        self._planned_layers = planned_layers
        self._publish = publish
        self._remote: frozenset[str] = frozenset()

    def model_built(self, model: Any, loader: Any) -> None:
        """Records the recipe: the parts of the checkpoint that fill the remote layers.

        Publishes the recipe for the feed-forward ranks. Raises ContractError if a remote part lacks weights.
        """
        remote_parts.check_found(self._parts, self._planned_layers, self._config.model_config.model)
        recorded = recording.record(model, loader, self._config, self._parts)
        self._remote = recorded.tensors
        self._publish(recorded.recipe)

    def leaves_out(self, tensor: str) -> bool:
        """Returns whether only feed-forward ranks need a tensor."""
        return tensor in self._remote


class Asking(RankMode):
    """Sends layers to the feed-forward ranks through the slab. Created before the model is built.

    Each feed-forward rank of this pod, and each other pod, has a lane (a place) in the slab.
    """

    _recipe: Recipe
    _slab: Slab
    _watch: FeedForwardWatch

    def __init__(self, context: RankContext, device: torch.device, config: Any, *, stages: RankMode) -> None:
        """Reads this rank's feed-forward ranks and their layers from the plan.

        Args:
            stages: the hops to other stages.
        """
        self._context, self._device, self._config, self._stages = context, device, config, stages
        self._ranks = context.plan.feed_forward_ranks_of(context.rank)
        self._lanes = asking_lanes(context.plan, context.rank)
        share = self._lanes[0].feed_forward
        assert share is not None
        self._layers = frozenset(share.layers)
        self._meter = ExpertMeter(context.metrics)

    @contextmanager
    def loading(self) -> Iterator[ModelLoad]:
        """Replaces the parts of feed-forward ranks in the model that is built inside this context.

        Publishes the recipe before this rank reads its own weights, so that all ranks read at the same time.
        Dummy weights have no checkpoint to record, so their recipe follows after the load.

        vLLM caches compiled graphs by its configuration, so the configuration must name the replaced layers.
        """
        self._config.additional_config = {
            **self._config.additional_config,
            "heteroinfer_feed_forward": sorted(self._layers),
        }
        has_dummy_weights = self._config.load_config.load_format == "dummy"
        with remote.replace_remote_parts(
            self._layers, records=not has_dummy_weights, first_layer=self._context.rank.first_layer
        ) as parts:
            yield _RemoteLoad(self._config, parts, self._layers, self._publish)
        if has_dummy_weights:
            remote_parts.check_found(parts, self._layers, self._context.plan.engine.model)
            self._publish(recording.describe_dummy(self._config, parts))

    def _publish(self, recipe: Recipe) -> None:
        """Keeps the recipe, and publishes it for feed-forward ranks."""
        self._recipe = recipe
        self._context.store.put(recipe_key(self._context.rank.rank), recipe.to_text())

    def model_loaded(self, runner: Any) -> None:
        """Opens the slab, waits for the feed-forward ranks, tests each with an ask, and watches them.

        From then on, the model's remote parts send their asks. If the plan gives the GPU memory for experts,
        the GPU computes a part of the experts.

        Raises:
            ContractError: a feed-forward rank mapped other memory than the slab.
            TimeoutError: a feed-forward rank was not ready before the start-up deadline.
            RuntimeError: a feed-forward rank answered the test with wrong values.
        """
        self._stages.model_loaded(runner)
        context = self._context
        shape = shape_of(self._recipe, context.launch.epoch, len(self._lanes))
        slab, ready = open_slab(shape, context.rank, self._lanes, context.store, context.startup)
        describe_ask, ready = self._start_relay(slab, ready)
        exchange = self._open_exchange(slab, ready, describe_ask)
        probe(exchange, shape, self._device, len(self._ranks))
        self._slab, self._watch = slab, FeedForwardWatch(slab, self._lanes, ready, context.fail, describe_ask)
        remote.connect(self._let_gpu_compute_experts(exchange, runner))
        _logger.info(
            "rank %d: feed-forward ranks %s compute the experts or MLPs of %d layers for this rank, at most "
            "%d rows of %d elements at once",
            context.rank.rank,
            [rank.rank for rank in self._ranks],
            len(self._layers),
            shape.max_rows,
            shape.hidden,
        )

    def _open_exchange(
        self, slab: Slab, ready: tuple[LaneReady, ...], describe_ask: Callable[[int], str]
    ) -> remote.Asks:
        """Returns the exchange for this rank's device."""
        if self._device.type != "cuda":
            return HostExchange(slab, self._lanes, ready, describe_ask)
        from vllm_heteroinfer.feed_forward.cuda_exchange import CudaExchange

        return CudaExchange(slab, self._device, limit_s=self._context.step_timeout_s)

    def _let_gpu_compute_experts(self, exchange: remote.Asks, runner: Any) -> remote.Asks:
        """Returns an exchange with which the GPU also computes experts; otherwise returns `exchange`.

        The plan must give the GPU memory for experts (ring_bytes), and all feed-forward ranks must be in its
        pod, because the GPU copies only from memory of its own pod.
        """
        context = self._context
        own, ranks = context.rank, self._ranks
        all_in_own_pod = all(rank.pod == own.pod for rank in ranks)
        if self._device.type != "cuda" or not own.ring_bytes or not all_in_own_pod:
            return exchange
        from vllm_heteroinfer.feed_forward.shared_exchange import let_gpu_compute_experts

        offers = {}
        for rank in ranks:
            key = weights_key(rank.rank)
            awaited = f"message that locates the weights of rank {rank.rank} in shared memory"
            text = context.store.get(key, context.startup, awaited=awaited, rank=rank.rank)
            offers[rank.rank] = OfferedWeights.from_json(text)
        loaded = weight_bytes(runner.get_model())
        context.reporter.set_phase(RankPhase.WARMING_UP, loaded, loaded)  # the measurement takes seconds
        self._wait_for_gpus_of_stage()
        return let_gpu_compute_experts(
            exchange,
            self._recipe,
            offers,
            context.reporter.set_gpu_experts_from,
            ring_bytes=own.ring_bytes,
            captured_rows=self._max_captured_rows(),
            device=self._device,
            meter=self._meter,
        )

    def _wait_for_gpus_of_stage(self) -> None:
        """Waits until all GPUs of the stage are ready to measure how fast they copy experts.

        They measure at the same time, as they later serve at the same time. Their copies share the bandwidth
        of the host's memory, so a GPU that measures alone would get too high a rate.

        Raises:
            TimeoutError: another GPU was not ready before the start-up deadline.
        """
        context = self._context
        context.store.put(f"feed-forward/measures/{context.rank.rank}", "")
        for other in context.plan.stage(context.rank.stage):
            key = f"feed-forward/measures/{other.rank}"
            awaited = f'"ready to measure" message from rank {other.rank}'
            context.store.get(key, context.startup, awaited=awaited, rank=other.rank)

    def _max_captured_rows(self) -> int:
        """Returns the number of rows of the largest captured CUDA graph; 0 if vLLM captures none."""
        compilation = self._config.compilation_config
        if compilation.cudagraph_mode == CUDAGraphMode.NONE:
            return 0
        return max(compilation.cudagraph_capture_sizes or [0])

    def _start_relay(
        self, slab: Slab, ready: tuple[LaneReady, ...]
    ) -> tuple[Callable[[int], str], tuple[LaneReady, ...]]:
        """Connects to feed-forward ranks of other pods, if there are any, and starts the relay.

        Returns:
            A function that describes how far an ask in a lane got, and the reports of all lanes, which now
            include the time of the network.
        """
        context = self._context
        relayed = relayed_lanes(self._lanes, context.rank)
        if not relayed:
            return no_description, ready
        connections, ready = connect_all(relayed, ready, slab.shape, context.launch, context.rank)
        relay = Relay(
            slab,
            connections,
            spin_ns=spin_time_ns(os.environ),
            cpus=relay_cpus(os.environ),
            fail=context.fail,
        )
        return relay.describe_ask, ready

    def begin_step(self, rows: int, *, for_client: bool) -> None:
        """Wakes the feed-forward ranks before a client's step, so that they are awake at its first ask.

        This also counts the step in the ranks' metrics. The steps of the group's own first request must not
        count, so they do not wake the ranks.
        """
        self._stages.begin_step(rows, for_client=for_client)
        self._meter.is_users_step = for_client
        if for_client:
            self._slab.wake_lanes()

    def check_steps(self) -> None:
        """Raises RuntimeError if the device gave up waiting for an answer, which makes the result invalid."""
        self._watch.check_steps()
