"""Limits the decode batches in the pipeline, by default to one. Does not limit prefill chunks.

vLLM keeps as many batches in flight as there are stages, and does not merge requests that arrive at different
times, so a stage reads its weights once for each batch. A CPU stage spends most of its time reading weights
and is faster with all requests in one batch. Imports vLLM.
"""

import os
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler

from heteroinfer_contract.plan import Plan
from vllm_heteroinfer.group.engine_calls import count_tokens


class PipelineScheduler(Scheduler):
    """vLLM's scheduler, with at most `plan.engine.batches_in_flight` decode batches in flight.

    While that number of batches is in flight, requests that could decode wait. They then form one batch.
    Prefill is scheduled as in vLLM.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limit = Plan.from_env(os.environ).engine.batches_in_flight
        self._decodes_in_flight: set[int] = set()

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Schedules the next batch, without decoding requests while the limit is reached.

        `next_decode_eligible_step` is vLLM's field to delay a request by some steps. Without asynchronous
        scheduling, vLLM itself does not set the field.
        Source: vllm/v1/core/sched/scheduler.py::Scheduler.schedule@v0.32.0.
        """
        if len(self._decodes_in_flight) >= self._limit:
            for request in self.running:
                if request.num_output_tokens > 0:
                    # schedule() first increments current_step, and skips requests while it is below the
                    # eligible step. So this value skips the request in this call only.
                    request.next_decode_eligible_step = self.current_step + 2
        output = super().schedule(throttle_prefills)
        _, decode_tokens = count_tokens(output)
        if decode_tokens:
            self._decodes_in_flight.add(id(output))
        return output

    def update_from_output(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        """Removes a finished batch from the batches in flight, then calls vLLM's method."""
        self._decodes_in_flight.discard(id(scheduler_output))
        return super().update_from_output(scheduler_output, *args, **kwargs)
