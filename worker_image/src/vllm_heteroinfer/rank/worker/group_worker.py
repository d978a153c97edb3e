"""What a rank's worker adds to vLLM's, on either device.

Mixed into vLLM's CPU or GPU worker; must not import either, since importing the CPU worker
in a GPU process replaces functions of torch (facts: Platform).
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from vllm.distributed.parallel_state import (
    get_pp_group,
    get_tp_group,
    get_world_group,
)
from vllm.v1.outputs import AsyncModelRunnerOutput

from heteroinfer_contract.group_report import RankPhase
from heteroinfer_contract.plan import Device, Mode
from vllm_heteroinfer.distributed import communicators
from vllm_heteroinfer.distributed.transport import HopSchema, PipelineTransport
from vllm_heteroinfer.group import kv_blocks
from vllm_heteroinfer.group.fingerprint import SAME_MODEL
from vllm_heteroinfer.group.steps import count_tokens, is_first_request
from vllm_heteroinfer.kernels.weight_bytes import weight_bytes
from vllm_heteroinfer.rank.context import RankContext
from vllm_heteroinfer.rank.worker import headroom, sampling, weight_loading

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

    from vllm_heteroinfer.feed_forward.asking_rank import Asking
    from vllm_heteroinfer.rank.worker.tensor_group import TensorGroup

_logger = logging.getLogger(__name__)


class TimedOutput(AsyncModelRunnerOutput):
    """A step's answer that is still on its way from the device; its step ends when it is there."""

    def __init__(
        self, output: AsyncModelRunnerOutput, check: Callable[[], None], done: Callable[[], None]
    ) -> None:
        self._output, self._check, self._done = output, check, done

    def get_output(self) -> Any:
        """Returns the answer, waiting for it; raises what the check of the step raises."""
        answer = self._output.get_output()
        self._check()
        self._done()
        return answer


class GroupWorkerMixin:
    """Phases, hops and metrics around vLLM's worker; comes before it in the bases."""

    context: RankContext
    _loaded_bytes = 0
    _transport: PipelineTransport | None = None
    tensor_group: "TensorGroup | None" = None
    _asking: "Asking | None" = None

    def attach(self, context: RankContext) -> None:
        """Gives the worker its context; called once, before `init_device`."""
        self.context = context

    def init_device(self) -> None:
        """Joins the process groups."""
        super().init_device()  # type: ignore[misc]
        communicators.forget_shared_memory(get_tp_group(), get_world_group())
        if self.context.plan.mode is Mode.TENSOR:
            from vllm_heteroinfer.rank.worker.tensor_group import TensorGroup

            self.tensor_group = TensorGroup.of(
                self.context,
                get_tp_group(),
                self.device,  # type: ignore[attr-defined]
                self.vllm_config,  # type: ignore[attr-defined]
            )

    def load_model(self, **kwargs: Any) -> None:
        """Loads this stage's weights, then agrees with its neighbours on what a hop carries."""
        context = self.context
        context.reporter.phase(RankPhase.LOADING, 0, context.rank.weight_bytes)
        if context.plan.mode is Mode.FEED_FORWARD:
            from vllm_heteroinfer.feed_forward.asking_rank import Asking

            self._asking = Asking(context)
        runner = self.model_runner  # type: ignore[attr-defined]
        config = self.vllm_config  # type: ignore[attr-defined]
        with nullcontext() if self._asking is None else self._asking.loading(config) as elsewhere:
            leaves_out = (lambda _: False) if elsewhere is None else elsewhere.has
            with weight_loading.counted(runner, self._report_load, leaves_out):
                super().load_model(**kwargs)  # type: ignore[misc]
        model = self.model_runner.get_model()  # type: ignore[attr-defined]
        self._loaded_bytes = weight_bytes(model)
        context.metrics.weight_bytes.set(self._loaded_bytes)
        if self._asking is not None:
            self._asking.start(model, config, self.device)  # type: ignore[attr-defined]
        context.reporter.phase(RankPhase.LOADING, self._loaded_bytes, self._loaded_bytes)
        if get_pp_group().world_size > 1:
            self._build_transport(model)
        if self.tensor_group is not None and get_pp_group().is_last_rank:
            self.tensor_group.share_samples(self.model_runner)  # type: ignore[attr-defined]

    def _report_load(self, done_bytes: int, total_bytes: int) -> None:
        """Tells how far the load is, in bytes of the rank's own share where the plan says how many."""
        own = self.context.rank.weight_bytes
        if own:
            done_bytes, total_bytes = own * done_bytes // total_bytes, own
        self.context.reporter.phase(RankPhase.LOADING, done_bytes, total_bytes)

    def get_supported_kv_cache_layouts(self) -> list[str]:
        """Returns the one layout that CPU attention reads; the lists of all ranks must be equal.

        Source: vllm/v1/attention/backends/utils.py::resolve_kv_cache_layout@v0.32.0.
        """
        return ["LBHNC"]

    def determine_available_memory(self) -> int:
        """Returns the size of this rank's KV cache: as planned, or the headroom after the largest batch.

        Raises:
            MemoryError: there is no headroom at all.
        """
        self.context.reporter.phase(RankPhase.WARMING_UP, self._loaded_bytes, self._loaded_bytes)
        self.begin_profile()
        with self._warming_up("memory profile"):
            self.warm_up()
            planned = self.run_profile()
        self._headroom = self.measure_headroom()
        granted, warning = headroom.grant(self.context.rank, planned, self._headroom)
        if warning:
            _logger.warning("%s", warning)
        return granted

    _headroom: headroom.KvHeadroom

    def begin_profile(self) -> None:
        """Forgets the most memory that this process has taken so far."""
        raise NotImplementedError

    def run_profile(self) -> int:
        """Runs the largest batch as vLLM's worker does; returns the KV cache's planned size, in bytes."""
        return int(super().determine_available_memory())  # type: ignore[misc]

    def measure_headroom(self) -> headroom.KvHeadroom:
        """Returns what this rank could give to its KV cache, whatever is planned."""
        raise NotImplementedError

    def kv_headroom_bytes(self) -> int:
        """Returns what was measured, in bytes; the executor asks each rank."""
        return self._headroom.size_bytes

    def _warming_up(self, phase: str) -> AbstractContextManager[None]:
        if self.tensor_group is None:
            return nullcontext()
        return self.tensor_group.warming_up(self.model_runner, phase)  # type: ignore[attr-defined]

    def warm_up(self) -> None:
        """Runs what this device's worker does not run by itself before the first step."""

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Allocates the KV cache: as many blocks as the rank with the least headroom has."""
        super().initialize_from_config(kv_cache_config)  # type: ignore[misc]
        if self.tensor_group is not None:
            self.tensor_group.agree_on_order(self.model_runner)  # type: ignore[attr-defined]
        blocks = kv_cache_config.num_blocks
        size = kv_blocks.size_bytes(kv_cache_config)
        self.context.metrics.kv_blocks.set(blocks)
        self.context.metrics.kv_cache_bytes.set(size)
        headroom_bytes = self._headroom.size_bytes
        self.context.reporter.kv_cache(
            blocks=blocks,
            headroom_blocks=kv_blocks.headroom_blocks(
                blocks=blocks, size_bytes=size, headroom_bytes=headroom_bytes
            ),
            headroom_bytes=headroom_bytes,
        )

    def compile_or_warm_up_model(self) -> Any:
        """Compiles and warms up; after it this rank is ready."""
        with self._warming_up("warm-up"):
            times = super().compile_or_warm_up_model()  # type: ignore[misc]
        if self.tensor_group is not None:
            self.tensor_group.ready()
        self.context.reporter.phase(RankPhase.READY, self._loaded_bytes, self._loaded_bytes)
        return times

    def execute_model(self, scheduler_output: "SchedulerOutput") -> Any:
        """Runs a step's forward pass; the last stage's step ends with `sample_tokens`."""
        rows = scheduler_output.total_num_scheduled_tokens
        if not rows:
            return super().execute_model(scheduler_output)  # type: ignore[misc]
        if self._transport is not None:
            self._transport.expect(rows)
        ends_here = not get_pp_group().is_last_rank
        self._counts_step = not is_first_request(scheduler_output)
        with self._call_of_step():
            if self.tensor_group is not None:
                self.tensor_group.begin_step()
            if self._asking is not None and self._counts_step:
                self._asking.begin_step()
            output = super().execute_model(scheduler_output)  # type: ignore[misc]
            if self.tensor_group is not None and ends_here:
                self.tensor_group.end_step()
        self._step_tokens = count_tokens(scheduler_output)
        if ends_here or output is not None:
            self._finish_step()
        return output

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Samples on the last stage; elsewhere there is nothing to do."""
        if self._step_tokens is None:
            return super().sample_tokens(grammar_output)  # type: ignore[misc]
        runner = self.model_runner  # type: ignore[attr-defined]
        group = self.tensor_group
        if group is not None and not group.leads:
            grammar_output = None  # a mask for samples that are not taken
        # Their logits are computed after the samples have been shared.
        meets_again = group is not None and bool(runner.num_prompt_logprobs)
        with self._call_of_step(), self._seeds(runner):
            output = super().sample_tokens(grammar_output)  # type: ignore[misc]
            if group is not None and meets_again:
                group.end_step()
            if isinstance(output, AsyncModelRunnerOutput):
                output = TimedOutput(output, self._check_steps, self.context.metrics.runs_ahead())
            else:
                self._check_steps()
        self._finish_step()
        return output

    def _check_steps(self) -> None:
        if self._asking is not None:
            self._asking.check_steps()

    @contextmanager
    def _call_of_step(self) -> Iterator[None]:
        metrics = self.context.metrics
        metrics.enter()
        communicators.take_wait_s()
        with nullcontext() if self.tensor_group is None else self.tensor_group.inside_step():
            yield
        metrics.waited(communicators.take_wait_s())
        metrics.leave()

    def _seeds(self, runner: Any) -> AbstractContextManager[None]:
        if self.context.rank.device is Device.GPU:
            return nullcontext()
        return sampling.without_discarded_seeds(runner.input_batch, runner.discard_request_mask.np)

    _step_tokens: tuple[int, int] | None = None
    _counts_step = True

    def _finish_step(self) -> None:
        assert self._step_tokens is not None
        prefill, decode = self._step_tokens
        self._step_tokens = None
        self.context.metrics.finish_step(
            prefill_tokens=prefill, decode_tokens=decode, counts=self._counts_step
        )

    def _build_transport(self, model: Any) -> None:
        context, group = self.context, get_pp_group()
        runner = self.model_runner  # type: ignore[attr-defined]
        dtype = self.model_config.dtype  # type: ignore[attr-defined]
        device = self.device  # type: ignore[attr-defined]
        empty = model.make_empty_intermediate_tensors(batch_size=1, dtype=dtype, device=device)
        schema = HopSchema.of(empty.tensors)
        self._agree_on(schema)
        self._transport = PipelineTransport(
            group=group,
            schema=schema,
            max_rows=runner.max_num_tokens,
            device=device,
            timeout_s=context.step_timeout_s,
            meter=context.metrics,
            on_error=context.fail,
        )
        self._transport.attach()
        context.metrics.travels("stages", "gloo")

    def _agree_on(self, schema: HopSchema) -> None:
        """Compares the schema with the stage before; raises RuntimeError if they differ."""
        context, group = self.context, get_pp_group()
        ours = schema.to_json()
        context.store.put(f"hop/{context.rank.rank}", ours)
        if group.is_first_rank:
            return
        peer = group.prev_rank
        theirs = context.store.get(
            f"hop/{peer}", context.startup, what=f"hop schema of rank {peer}", rank=peer
        )
        if theirs != ours:
            raise RuntimeError(
                f"rank {context.rank.rank} expects hidden states {ours}, but rank {peer} sends {theirs}; "
                f"{SAME_MODEL}"
            )
