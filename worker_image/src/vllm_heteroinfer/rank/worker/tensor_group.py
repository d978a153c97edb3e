"""What a rank of a tensor-parallel group with CPU ranks does besides its layers.

The first rank of the group leads: it samples, and its warm-up is what the CPU ranks follow.
Other GPU ranks run their own warm-up, which is the leader's. Imports vLLM; see `GroupWorkerMixin`.
"""

import contextlib
import logging
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import CompilationMode, set_current_vllm_config

from heteroinfer_contract.plan import Device, Mode, eager_reason
from vllm_heteroinfer.distributed import communicators
from vllm_heteroinfer.distributed.bridge import Bridge
from vllm_heteroinfer.distributed.bridge_communicator import BridgeCommunicator
from vllm_heteroinfer.distributed.meter import Meter
from vllm_heteroinfer.rank.worker.following import follow, leading
from vllm_heteroinfer.rank.worker.sampling import SharedSamples

if TYPE_CHECKING:
    from vllm_heteroinfer.rank.context import RankContext

_logger = logging.getLogger(__name__)


class StepMeter:
    """Passes on what collectives cost inside of steps; those of the warm-up belong to no step."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self.inside = False

    def waited(self, seconds: float) -> None:
        """As Meter."""
        if self.inside:
            self._meter.waited(seconds)

    def transferred(self, direction: str, seconds: float, num_bytes: int) -> None:
        """As Meter."""
        if self.inside:
            self._meter.transferred(direction, seconds, num_bytes)

    def waiting_for(self, rank: int | None) -> None:
        """As Meter."""
        if self.inside:
            self._meter.waiting_for(rank)


class TensorGroup:
    """This rank's tensor-parallel group, where its collectives go over the bridge."""

    def __init__(self, context: "RankContext", group: Any, device: torch.device, *, compiles: bool) -> None:
        """Connects the bridge; every rank of the group calls it once.

        Args:
            context: of this rank.
            group: vLLM's GroupCoordinator of the tensor-parallel group, with a BridgeCommunicator.
            device: of this rank.
            compiles: whether this rank compiles its forward pass.
        """
        self._context = context
        self._meter = StepMeter(context.metrics)
        self._steps = 0
        self._device = device
        self.leads = context.rank.tensor_rank == 0
        self.follows = not self.leads and context.rank.device is Device.CPU
        self._bridge = Bridge(
            group=group.unique_name,
            ranks=group.ranks,
            rank=context.rank.rank,
            device=device,
            cpu_group=group.cpu_group,
            share_host=communicators.shares_host(
                context.plan, context.launch, context.rank.stage, os.environ
            ),
            timeout_s=context.startup.left_s,
            meter=self._meter,
        )
        context.metrics.travels("ranks", self._bridge.path)
        # A traced forward must not look into the bridge: vLLM's own op is opaque, and on GPUs its default.
        # Source: vllm/distributed/parallel_state.py::GroupCoordinator.all_reduce@v0.32.0.
        group.use_custom_op_call = group.use_custom_op_call or compiles
        group.device_communicator.connect(self._bridge, in_place=not group.use_custom_op_call)
        reason = eager_reason(context.plan)
        if reason is not None and context.rank.device is Device.GPU:
            _logger.info("rank %d: %s", context.rank.rank, reason)

    @classmethod
    def of(
        cls, context: "RankContext", group: Any, device: torch.device, config: Any
    ) -> "TensorGroup | None":
        """Returns the group of this rank, or None where vLLM's own communicators serve."""
        if context.plan.mode is not Mode.TENSOR or not isinstance(
            group.device_communicator, BridgeCommunicator
        ):
            return None
        compiles = config.compilation_config.mode is not CompilationMode.NONE
        return cls(context, group, device, compiles=compiles)

    def share_samples(self, runner: Any) -> None:
        """Makes this rank go on with the leader's tokens; called once, on the last stage."""
        SharedSamples(runner, self._bridge, leads=self.leads)

    @contextlib.contextmanager
    def warming_up(self, runner: Any, phase: str) -> Iterator[None]:
        """Announces what this rank runs inside if it leads; follows first if it follows."""
        model = runner.get_model()
        if self.leads:
            with leading(self._bridge, model, phase):
                yield
            return
        if self.follows:
            self._follow(runner, model, phase)
        yield

    def agree_on_order(self, runner: Any) -> None:
        """Has every rank keep the requests of a batch in the leader's order; called with a KV cache.

        Some attention backends of GPUs put decodes before prefills; those of CPUs take any order.
        Rows of different requests would be summed up otherwise.
        Source: vllm/v1/worker/gpu_model_runner.py::GPUModelRunner._may_reorder_batch@v0.32.0.

        Raises:
            RuntimeError: this rank's attention needs another order.
        """
        context, ours = self._context, runner.reorder_batch_threshold
        key = f"order/{context.rank.stage}"
        if self.leads:
            context.store.put(key, str(ours))
            return
        theirs = context.store.get(key, context.startup, what="order of requests from the stage's first rank")
        if ours is None and theirs != "None":
            runner.reorder_batch_threshold = int(theirs)
        elif str(ours) != theirs:
            raise RuntimeError(
                f"rank {context.rank.rank} orders a batch by {ours}, but its stage's first rank by {theirs}; "
                "choose one attention backend for all ranks (engine.args: --attention-backend)"
            )

    def ready(self) -> None:
        """From now on a silent peer is given up after the time-out of a step."""
        self._bridge.set_timeout(self._context.step_timeout_s)

    def begin_step(self) -> None:
        """Begins a step with tokens; the ranks compare its number."""
        self._steps += 1
        self._bridge.begin_step(self._steps)

    @contextlib.contextmanager
    def inside_step(self) -> Iterator[None]:
        """Counts the cost of collectives inside to the step."""
        self._meter.inside = True
        try:
            yield
        finally:
            self._meter.inside = False

    @torch.inference_mode()
    def end_step(self) -> None:
        """Ends a step after whose last collective no tokens were shared, so that all ranks meet once more.

        A rank with a collective more or less would otherwise wait for the next step to be found.
        """
        self._bridge.broadcast(torch.full((1,), self._steps, dtype=torch.int32, device=self._device), src=0)

    @torch.inference_mode()
    def _follow(self, runner: Any, model: Any, phase: str) -> None:
        config = runner.vllm_config
        size = (config.model_config.get_hidden_size(),)
        dtype = config.model_config.dtype

        def logits(rows: int) -> None:
            model.compute_logits(torch.zeros((rows, *size), dtype=dtype, device=self._device))

        def forward(tokens: int) -> None:
            runner._dummy_run(tokens, skip_eplb=True, is_profile=True)

        with set_current_vllm_config(config):
            follow(
                lambda: self._bridge.listen(self._context.startup.left_s),
                model=model,
                forward=forward,
                logits=logits,
                phase=phase,
            )
