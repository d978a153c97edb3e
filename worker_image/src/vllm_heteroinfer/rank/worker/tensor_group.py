"""The mode of ranks in a tensor-parallel group with CPU ranks.

The first rank of the group leads: it samples, and the CPU ranks follow its warm-up. Other GPU ranks run their
own warm-up, which equals the leader's. Imports vLLM; see `GroupWorkerMixin`.
"""

import contextlib
import logging
import os
from collections.abc import Iterator
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.parallel_state import get_pp_group

from heteroinfer_contract.plan import Device, eager_reason
from vllm_heteroinfer.distributed import communicators
from vllm_heteroinfer.distributed.bridge import Bridge
from vllm_heteroinfer.rank.context import RankContext
from vllm_heteroinfer.rank.worker.following import follow, leading
from vllm_heteroinfer.rank.worker.rank_mode import RankMode
from vllm_heteroinfer.rank.worker.sampling import share_samples

_logger = logging.getLogger(__name__)


class TensorGroup(RankMode):
    """This rank's tensor-parallel group, whose collectives go over the bridge."""

    def __init__(
        self, context: RankContext, device: torch.device, bridge: Bridge, *, stages: RankMode
    ) -> None:
        self._context, self._device, self._bridge, self._stages = context, device, bridge, stages
        self._steps = 0
        self._leads = context.rank.tensor_rank == 0
        self.follows = not self._leads and context.rank.device is Device.CPU

    @classmethod
    def connect(
        cls, context: RankContext, group: Any, device: torch.device, *, stages: RankMode, compiles: bool
    ) -> "TensorGroup":
        """Connects the bridge of the stage. Every rank of the group must call this once.

        Args:
            group: vLLM's GroupCoordinator of the tensor-parallel group, with a BridgeCommunicator.
            stages: mode that connects this stage with other stages.
            compiles: whether this rank compiles its forward pass.
        """
        bridge = Bridge(
            group=group.unique_name,
            ranks=group.ranks,
            rank=context.rank.rank,
            device=device,
            cpu_group=group.cpu_group,
            share_host=communicators.shares_host(
                context.plan, context.launch, context.rank.stage, os.environ
            ),
            timeout_s=context.startup.left_s,
            meter=context.metrics,
        )
        context.metrics.record_path("ranks", bridge.path)
        # torch.compile must not trace into the bridge. It does not trace into vLLM's custom op, which GPU
        # ranks use anyway.
        # Source: vllm/distributed/parallel_state.py::GroupCoordinator.all_reduce@v0.32.0.
        group.use_custom_op_call = group.use_custom_op_call or compiles
        # vLLM's custom op must not change its input.
        group.device_communicator.connect(bridge, in_place=not group.use_custom_op_call)
        reason = eager_reason(context.plan)
        if reason is not None and context.rank.device is Device.GPU:
            _logger.info("rank %d: %s", context.rank.rank, reason)
        return cls(context, device, bridge, stages=stages)

    def model_loaded(self, runner: Any) -> None:
        """On the last stage, makes this rank continue with the leader's tokens."""
        self._stages.model_loaded(runner)
        if get_pp_group().is_last_rank:
            share_samples(runner, self._bridge, leads=self._leads)

    @contextlib.contextmanager
    def warming_up(self, runner: Any, phase: str) -> Iterator[None]:
        """Makes the ranks of the group run the same passes in a phase of the warm-up.

        The leader announces each pass that it runs inside the context. A CPU rank follows: it runs all
        announced passes before the context begins. Another GPU rank runs its own warm-up inside the context,
        which has the same passes.
        """
        model = runner.get_model()
        if self._leads:
            with leading(self._bridge.announce, model, phase):
                yield
            return
        if self.follows:
            self._follow(runner, model, phase)
        yield

    def kv_cache_ready(self, runner: Any) -> None:
        """Makes every rank keep the requests of a batch in the leader's order.

        Some attention backends of GPUs put decodes before prefills; backends of CPUs accept any order. With
        different orders, ranks would sum up rows of different requests.
        Source: vllm/v1/worker/gpu_model_runner.py::GPUModelRunner._may_reorder_batch@v0.32.0.

        Raises:
            RuntimeError: this rank's attention needs another order.
        """
        context, own_order = self._context, runner.reorder_batch_threshold
        key = f"order/{context.rank.stage}"
        if self._leads:
            context.store.put(key, str(own_order))
            return
        leader_order = context.store.get(
            key, context.startup, awaited="reorder_batch_threshold of the stage's first rank"
        )
        if own_order is None and leader_order != "None":  # this backend accepts any order
            runner.reorder_batch_threshold = int(leader_order)
        elif str(own_order) != leader_order:
            raise RuntimeError(
                f"rank {context.rank.rank}: its attention backend must order a batch like the stage's first "
                f"rank (reorder_batch_threshold {leader_order}, got {own_order}). Choose one attention "
                "backend for all ranks (engine.args: --attention-backend)"
            )

    def ready(self) -> None:
        """Changes the time-out for a silent peer from start-up to a step's time-out."""
        self._bridge.set_timeout(self._context.step_timeout_s)

    def begin_step(self, rows: int, *, for_client: bool) -> None:
        """Begins a step with tokens. The ranks compare the step's number."""
        self._stages.begin_step(rows, for_client=for_client)
        self._steps += 1
        self._bridge.begin_step(self._steps)

    @torch.inference_mode()
    def end_step(self) -> None:
        """Checks once more, at the end of a step, that all ranks ran the same collectives.

        The check is one more broadcast. Without it, a rank that ran too many or too few collectives is
        detected only in the next step.
        """
        self._bridge.broadcast(torch.full((1,), self._steps, dtype=torch.int32, device=self._device), src=0)

    @contextlib.contextmanager
    def sampling(self, runner: Any, grammar_output: Any) -> Iterator[Any]:
        """Yields the grammar mask on the leader and None on other ranks, because only the leader samples.

        The broadcast of the tokens checks that the ranks ran the same collectives. Logits for prompt logprobs
        need collectives after this broadcast, so a step with such logits ends with one more check.
        """
        has_prompt_logprobs = bool(runner.num_prompt_logprobs)
        yield grammar_output if self._leads else None
        if has_prompt_logprobs:
            self.end_step()

    @torch.inference_mode()
    def _follow(self, runner: Any, model: Any, phase: str) -> None:
        """Runs the forward passes and computations of logits that the leader announces in a phase."""
        config = runner.vllm_config
        hidden_size, dtype = config.model_config.get_hidden_size(), config.model_config.dtype

        def logits(rows: int) -> None:
            """Computes logits of zeros, so that this rank takes part in the collectives inside."""
            model.compute_logits(torch.zeros((rows, hidden_size), dtype=dtype, device=self._device))

        def forward(tokens: int) -> None:
            """Runs a forward pass with dummy tokens."""
            runner._dummy_run(tokens, skip_eplb=True, is_profile=True)

        with set_current_vllm_config(config):
            follow(
                lambda: self._bridge.listen(self._context.startup.left_s),
                model=model,
                forward=forward,
                logits=logits,
                phase=phase,
            )
