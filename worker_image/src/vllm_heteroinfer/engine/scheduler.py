"""What is in the pipeline at once: one decode batch by default, prefill chunks beside it.

vLLM keeps as many batches in flight as there are stages, and requests that arrive apart
stay apart: weights are then read once for each half. A stage bound by reading weights
(a CPU's) is faster with everything in one batch. Imports vLLM.
"""

import os
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler

from heteroinfer_contract.plan import Plan
from vllm_heteroinfer.group.engine_calls import count_tokens


class PipelineScheduler(Scheduler):
    """vLLM's scheduler, with at most `plan.engine.batches_in_flight` decode batches in flight.

    A request that could decode waits while that many batches are under way; prefill
    is scheduled as ever. Requests that became ready meanwhile then go as one batch.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limit = Plan.from_env(os.environ).engine.batches_in_flight
        self._decodes_in_flight: set[int] = set()

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Returns the next batch; decoding requests are left out while the limit is reached.

        `next_decode_eligible_step` is vLLM's own way to hold a request back for some steps;
        without asynchronous scheduling nothing else sets it.
        Source: vllm/v1/core/sched/scheduler.py::Scheduler.schedule@v0.32.0.
        """
        if len(self._decodes_in_flight) >= self._limit:
            for request in self.running:
                if request.num_output_tokens > 0:
                    # schedule() counts itself first, and skips while current < eligible.
                    request.next_decode_eligible_step = self.current_step + 2
        output = super().schedule(throttle_prefills)
        if count_tokens(output)[1]:
            self._decodes_in_flight.add(id(output))
        return output

    def update_from_output(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        """Takes a finished batch out of the pipeline, and does what vLLM does."""
        self._decodes_in_flight.discard(id(scheduler_output))
        return super().update_from_output(scheduler_output, *args, **kwargs)
