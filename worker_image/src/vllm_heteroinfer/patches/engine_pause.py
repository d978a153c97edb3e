"""The patch `engine_pause`: the engine does not sleep between a step's answer and the next step.

With a queue of batches, the call that receives a batch's answer schedules nothing, because the next batch
depends on the answer. vLLM treats such a call as an idle step and sleeps 1 ms, so that background threads can
run. If only one decode batch is in flight, each token takes 1 ms longer. Imports vLLM.
Source: vllm/v1/engine/core.py::EngineCoreProc._process_engine_step@v0.32.0. Its only caller is a method of
the same class, so the class's attribute is the only binding.
"""

from collections.abc import Callable
from typing import Any

from vllm_heteroinfer.patches.registry import ENGINE_PAUSE
from vllm_heteroinfer.patches.replacing import replace


def install() -> None:
    """Makes engines count a step with answers as an executed step. A second call does nothing.

    Raises:
        PatchError: vLLM's function is missing or differs from the verified version.
    """
    replace(ENGINE_PAUSE, _with_counted_answers)


def _with_counted_answers(original: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Returns a replacement that counts a step as executed if it has answers."""

    def process_engine_step(self: Any) -> bool:
        """Runs vLLM's step, with a step function that counts a step with answers as executed."""
        step = self.step_fn

        def step_that_counts_answers() -> tuple[Any, bool]:
            """Returns vLLM's outputs, and whether the step ran a batch or has answers."""
            outputs, executed = step()
            return outputs, executed or bool(outputs)

        # vLLM's function reads `step_fn` from this engine in each call, so it can be replaced for one call.
        self.step_fn = step_that_counts_answers
        try:
            return original(self)
        finally:
            self.step_fn = step

    return process_engine_step
