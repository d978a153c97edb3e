"""What a rank's worker adds to vLLM's, on either device.

Mixed into vLLM's CPU or GPU worker; must not import either, since importing the CPU worker
in a GPU process replaces functions of torch (facts: Platform).
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from vllm.distributed.parallel_state import get_pp_group, get_tp_group, get_world_group
from vllm.v1.outputs import AsyncModelRunnerOutput

from heteroinfer_contract.group_report import RankPhase
from heteroinfer_contract.plan import Device
from vllm_heteroinfer.distributed import communicators
from vllm_heteroinfer.group import kv_blocks
from vllm_heteroinfer.group.engine_calls import count_tokens, is_first_request
from vllm_heteroinfer.kernels.weight_bytes import weight_bytes
from vllm_heteroinfer.rank.context import RankContext
from vllm_heteroinfer.rank.worker import headroom, modes, sampling, weight_loading
from vllm_heteroinfer.rank.worker.prompt_logprobs import PromptLogprobsInParts
from vllm_heteroinfer.rank.worker.rank_mode import RankMode

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

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
    mode: RankMode
    device: Any
    model_runner: Any
    vllm_config: Any
    _loaded_bytes = 0
    _headroom: headroom.KvHeadroom
    _step_tokens: tuple[int, int] | None = None
    _counts_step = True

    def attach(self, context: RankContext) -> None:
        """Gives the worker its context; called once, before `init_device`."""
        self.context = context

    def init_device(self) -> None:
        """Joins the process groups."""
        super().init_device()  # type: ignore[misc]
        communicators.forget_shared_memory(get_tp_group(), get_world_group())
        self.mode = modes.connect(self.context, self.device, self.vllm_config)
        PromptLogprobsInParts(self.model_runner, self.vllm_config.scheduler_config.max_num_seqs)

    def load_model(self, **kwargs: Any) -> None:
        """Loads this stage's weights, then connects the model with other ranks."""
        context = self.context
        context.reporter.phase(RankPhase.LOADING, 0, context.rank.weight_bytes)
        with (
            self.mode.loading() as leaves_out,
            weight_loading.counted(self.model_runner, self._report_load, leaves_out),
        ):
            super().load_model(**kwargs)  # type: ignore[misc]
        self._loaded_bytes = weight_bytes(self.model_runner.get_model())
        context.metrics.weight_bytes.set(self._loaded_bytes)
        context.reporter.phase(RankPhase.LOADING, self._loaded_bytes, self._loaded_bytes)
        self.mode.model_loaded(self.model_runner)

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
        with self.mode.warming_up(self.model_runner, "memory profile"):
            self.warm_up()
            planned = self.run_profile()
        self._headroom = self.measure_headroom()
        granted, warning = headroom.grant(self.context.rank, planned, self._headroom)
        if warning:
            _logger.warning("%s", warning)
        return granted

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

    def warm_up(self) -> None:
        """Runs what this device's worker does not run by itself before the first step."""

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Allocates the KV cache: as many blocks as the rank with the least headroom has."""
        super().initialize_from_config(kv_cache_config)  # type: ignore[misc]
        self.mode.kv_cache_ready(self.model_runner)
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
        with self.mode.warming_up(self.model_runner, "warm-up"):
            times = super().compile_or_warm_up_model()  # type: ignore[misc]
        self.mode.ready()
        self.context.reporter.phase(RankPhase.READY, self._loaded_bytes, self._loaded_bytes)
        return times

    def execute_model(self, scheduler_output: "SchedulerOutput") -> Any:
        """Runs a step's forward pass; the last stage's step ends with `sample_tokens`."""
        rows = scheduler_output.total_num_scheduled_tokens
        if not rows:
            return super().execute_model(scheduler_output)  # type: ignore[misc]
        ends_here = not get_pp_group().is_last_rank
        self._counts_step = not is_first_request(scheduler_output)
        with self._call_of_step():
            self.mode.begin_step(rows, counts=self._counts_step)
            output = super().execute_model(scheduler_output)  # type: ignore[misc]
            if ends_here:
                self.mode.end_step()
        self._step_tokens = count_tokens(scheduler_output)
        if ends_here or output is not None:
            self._finish_step()
        return output

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Samples on the last stage; elsewhere there is nothing to do."""
        if self._step_tokens is None:
            return super().sample_tokens(grammar_output)  # type: ignore[misc]
        with self._call_of_step(), self._seeds(self.model_runner):
            with self.mode.sampling(self.model_runner, grammar_output) as mask:
                output = super().sample_tokens(mask)  # type: ignore[misc]
            if isinstance(output, AsyncModelRunnerOutput):
                output = TimedOutput(output, self.mode.check_steps, self.context.metrics.runs_ahead())
            else:
                self.mode.check_steps()
        self._finish_step()
        return output

    @contextmanager
    def _call_of_step(self) -> Iterator[None]:
        metrics = self.context.metrics
        metrics.enter()
        communicators.take_wait_s()
        yield
        metrics.waited(communicators.take_wait_s())
        metrics.leave()

    def _seeds(self, runner: Any) -> AbstractContextManager[None]:
        if self.context.rank.device is Device.GPU:
            return nullcontext()
        return sampling.without_discarded_seeds(runner.input_batch, runner.discard_request_mask.np)

    def _finish_step(self) -> None:
        assert self._step_tokens is not None
        prefill, decode = self._step_tokens
        self._step_tokens = None
        self.context.metrics.finish_step(
            prefill_tokens=prefill, decode_tokens=decode, counts=self._counts_step
        )
