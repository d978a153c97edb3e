"""Extensions of vLLM's worker for a rank, on both devices.

A mixin for vLLM's CPU or GPU worker. It must not import either worker: importing the CPU worker in a GPU
process replaces functions of torch.
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
from vllm_heteroinfer.rank.worker.prompt_logprobs import compute_prompt_logprobs_in_parts
from vllm_heteroinfer.rank.worker.rank_mode import RankMode

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

_logger = logging.getLogger(__name__)


class TimedOutput(AsyncModelRunnerOutput):
    """A step's answer that is still being copied from the device. The step ends when the answer arrives.

    Args:
        check: raises an error if the step's results must not be used.
        done: records the end of the step.
    """

    def __init__(
        self, output: AsyncModelRunnerOutput, check: Callable[[], None], done: Callable[[], None]
    ) -> None:
        self._output, self._check, self._done = output, check, done

    def get_output(self) -> Any:
        """Waits for the answer and returns it; raises the error of the step's check."""
        answer = self._output.get_output()
        self._check()
        self._done()
        return answer


class GroupWorkerMixin:
    """Phases, hops and metrics around vLLM's worker. Must precede that worker in the bases."""

    context: RankContext
    mode: RankMode
    device: Any
    model_runner: Any
    vllm_config: Any
    _loaded_bytes = 0
    _headroom: headroom.KvHeadroom
    _step_tokens: tuple[int, int] | None = None
    _serves_client = True

    def attach(self, context: RankContext) -> None:
        """Sets the worker's context. Called once, before `init_device`."""
        self.context = context

    def init_device(self) -> None:
        """Joins the process groups, builds this rank's mode, and makes prompt logprobs take less memory."""
        super().init_device()  # type: ignore[misc]
        communicators.forget_shared_memory(get_tp_group(), get_world_group())  # all ranks have mapped it
        self.mode = modes.connect(self.context, self.device, self.vllm_config)
        compute_prompt_logprobs_in_parts(self.model_runner, self.vllm_config.scheduler_config.max_num_seqs)

    def load_model(self, **kwargs: Any) -> None:
        """Loads this stage's weights, then connects the model with other ranks."""
        context = self.context
        context.reporter.set_phase(RankPhase.LOADING, 0, context.rank.weight_bytes)
        with (
            self.mode.loading() as load,
            weight_loading.counting_progress(self.model_runner, self._report_load, load),
        ):
            super().load_model(**kwargs)  # type: ignore[misc]
        self._loaded_bytes = weight_bytes(self.model_runner.get_model())
        context.metrics.weight_bytes.set(self._loaded_bytes)
        context.reporter.set_phase(RankPhase.LOADING, self._loaded_bytes, self._loaded_bytes)
        self.mode.model_loaded(self.model_runner)

    def _report_load(self, done_bytes: int, total_bytes: int) -> None:
        """Reports the load's progress.

        The given bytes are those of the whole checkpoint. If the plan contains the size of this rank's part,
        the same fraction of that size is reported.
        """
        planned_bytes = self.context.rank.weight_bytes
        if planned_bytes:
            done_bytes, total_bytes = planned_bytes * done_bytes // total_bytes, planned_bytes
        self.context.reporter.set_phase(RankPhase.LOADING, done_bytes, total_bytes)

    def get_supported_kv_cache_layouts(self) -> list[str]:
        """Returns the only KV cache layout that CPU attention supports.

        GPU ranks return it too, because the lists of all ranks must be equal.
        Source: vllm/v1/attention/backends/utils.py::resolve_kv_cache_layout@v0.32.0.
        """
        return ["LBHNC"]

    def determine_available_memory(self) -> int:
        """Runs the largest batch. Returns the bytes of this rank's KV cache.

        The bytes are as planned, or fewer if the batch leaves less memory.

        Raises:
            MemoryError: the largest batch leaves no memory for a KV cache.
        """
        self.context.reporter.set_phase(RankPhase.WARMING_UP, self._loaded_bytes, self._loaded_bytes)
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
        """Resets the memory peak of this process."""
        raise NotImplementedError

    def run_profile(self) -> int:
        """Runs the largest batch like vLLM's worker. Returns the KV cache's planned size in bytes."""
        return int(super().determine_available_memory())  # type: ignore[misc]

    def measure_headroom(self) -> headroom.KvHeadroom:
        """Measures the memory that this rank has for its KV cache, independent of the plan."""
        raise NotImplementedError

    def kv_headroom_bytes(self) -> int:
        """Returns the measured headroom in bytes. The executor calls this method on each rank."""
        return self._headroom.size_bytes

    def warm_up(self) -> None:
        """Runs passes that vLLM's worker of this device skips before the first step."""

    def report_transports(self) -> None:
        """Reports the transports that are known only after the warm-up."""

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Allocates the KV cache, and reports its size and this rank's headroom.

        All ranks get the same number of blocks from the executor: the planned number, or fewer if they do not
        fit into the headroom of some rank.
        """
        super().initialize_from_config(kv_cache_config)  # type: ignore[misc]
        self.mode.kv_cache_ready(self.model_runner)
        blocks = kv_cache_config.num_blocks
        size = kv_blocks.size_bytes(kv_cache_config)
        self.context.metrics.kv_blocks.set(blocks)
        self.context.metrics.kv_cache_bytes.set(size)
        headroom_bytes = self._headroom.size_bytes
        self.context.reporter.set_kv_cache(
            blocks=blocks,
            headroom_blocks=kv_blocks.headroom_blocks(
                blocks=blocks, size_bytes=size, headroom_bytes=headroom_bytes
            ),
            headroom_bytes=headroom_bytes,
        )

    def compile_or_warm_up_model(self) -> Any:
        """Compiles and warms up, and reports this rank as ready."""
        with self.mode.warming_up(self.model_runner, "warm-up"):
            times = super().compile_or_warm_up_model()  # type: ignore[misc]
        self.mode.ready()
        self.report_transports()
        self.context.metrics.report_locked_memory()
        self.context.reporter.set_phase(RankPhase.READY, self._loaded_bytes, self._loaded_bytes)
        return times

    def execute_model(self, scheduler_output: "SchedulerOutput") -> Any:
        """Runs a step's forward pass. On the last stage, `sample_tokens` ends the step.

        A call without tokens does not count as a step. It only names requests to forget or blocks to clear.
        """
        rows = scheduler_output.total_num_scheduled_tokens
        if not rows:
            return super().execute_model(scheduler_output)  # type: ignore[misc]
        is_last_call = not get_pp_group().is_last_rank  # `sample_tokens` follows only on the last stage
        self._serves_client = not is_first_request(scheduler_output)  # the group's own first request
        with self._timed_call():
            self.mode.begin_step(rows, for_client=self._serves_client)
            output = super().execute_model(scheduler_output)  # type: ignore[misc]
            if is_last_call:
                self.mode.end_step()
        self._step_tokens = count_tokens(scheduler_output)
        if is_last_call or output is not None:  # otherwise vLLM calls `sample_tokens` next
            self._finish_step()
        return output

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Samples on the last stage, which ends the step. Other stages do nothing.

        With asynchronous scheduling, the step ends later, when its answer has been copied from the device.
        """
        if self._step_tokens is None:  # no step is open: another stage, or a step that has already ended
            return super().sample_tokens(grammar_output)  # type: ignore[misc]
        with self._timed_call(), self._hide_discarded_generators(self.model_runner):
            with self.mode.sampling(self.model_runner, grammar_output) as mask:
                output = super().sample_tokens(mask)  # type: ignore[misc]
            if isinstance(output, AsyncModelRunnerOutput):
                output = TimedOutput(
                    output, self.mode.check_steps, self.context.metrics.continue_into_next_step()
                )
            else:
                self.mode.check_steps()
        self._finish_step()
        return output

    @contextmanager
    def _timed_call(self) -> Iterator[None]:
        """Times a call of the current step, and counts the time of its collectives as a wait for peers."""
        metrics = self.context.metrics
        metrics.begin_call()
        communicators.take_wait_s()  # collectives before this call do not count
        yield
        metrics.add_wait(communicators.take_wait_s())
        metrics.end_call()

    def _hide_discarded_generators(self, runner: Any) -> AbstractContextManager[None]:
        """Returns a context in which vLLM draws nothing for seeded requests whose sample it discards.

        vLLM cannot undo a draw of a CPU generator. Does nothing on GPUs.
        """
        if self.context.rank.device is Device.GPU:
            return nullcontext()
        return sampling.without_discarded_seeds(runner.input_batch, runner.discard_request_mask.np)

    def _finish_step(self) -> None:
        """Records the metrics of the current step, after its last call."""
        assert self._step_tokens is not None
        prefill, decode = self._step_tokens
        self._step_tokens = None
        self.context.metrics.finish_step(
            prefill_tokens=prefill, decode_tokens=decode, for_client=self._serves_client
        )
