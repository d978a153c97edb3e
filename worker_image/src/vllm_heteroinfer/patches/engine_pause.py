"""The patch `engine_pause`: the engine does not sleep between a step's answer and the next step.

With a queue of batches, the call that takes a batch's answer has nothing to schedule: what it
could schedule waits for that very answer. vLLM takes it for a step in which nothing happened,
and sleeps 1 ms to give background threads the interpreter; with one decode batch in flight that
is 1 ms of every token. Imports vLLM.
Source: vllm/v1/engine/core.py::EngineCoreProc._process_engine_step@v0.32.0, which has one caller,
a method of the same class, so that the class's attribute is the only binding.
"""

from collections.abc import Callable
from typing import Any

from vllm_heteroinfer.patches.registry import ENGINE_PAUSE
from vllm_heteroinfer.patches.replacing import replace


def install() -> None:
    """Has an engine that is made later count a step with answers as a step that executed; twice is a no-op.

    Raises:
        PatchError: this vLLM's function is missing, or another one.
    """
    replace(ENGINE_PAUSE, _build)


def _build(original: Callable[[Any], bool]) -> Callable[[Any], bool]:
    def process_engine_step(self: Any) -> bool:
        step = self.step_fn

        def step_that_counts_answers() -> tuple[Any, bool]:
            outputs, executed = step()
            return outputs, executed or bool(outputs)

        # On the instance, for this call: the engine reads it anew each time.
        self.step_fn = step_that_counts_answers
        try:
            return original(self)
        finally:
            self.step_fn = step

    return process_engine_step
