"""The patch `engine_pause`: the engine does not sleep between a step's answer and the next step.

With a queue of batches, the call that takes a batch's answer has nothing to schedule: what it
could schedule waits for that very answer. vLLM takes it for a step in which nothing happened,
and sleeps 1 ms to give background threads the interpreter; with one decode batch in flight that
is 1 ms of every token. Imports vLLM.
Source: vllm/v1/engine/core.py::EngineCoreProc._process_engine_step@v0.32.0, which has one caller,
a method of the same class, so that the class's attribute is the only binding.
"""

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

from vllm_heteroinfer.patches.registry import ENGINE_PAUSE, build_refusal

_ORIGINAL = "heteroinfer_original"


def apply() -> None:
    """Has an engine that is made later count a step with answers as a step that executed; twice is a no-op.

    Raises:
        PatchError: this vLLM's function is missing, or another one.
    """
    owner, name = _target()
    original: Any = getattr(owner, name, None)
    if hasattr(original, _ORIGINAL):
        return
    check(original)
    setattr(owner, name, _wrap(original))


def revert() -> None:
    """Puts vLLM's own function back; a no-op where the patch is not applied."""
    owner, name = _target()
    original = getattr(getattr(owner, name), _ORIGINAL, None)
    if original is not None:
        setattr(owner, name, original)


def check(target: Any) -> None:
    """Raises PatchError unless `target` is the function that the patch was written for."""
    if not callable(target):
        raise build_refusal(ENGINE_PAUSE, "nothing" if target is None else repr(target), _version())
    found = tuple(inspect.signature(target).parameters)
    if found != ENGINE_PAUSE.parameters:
        raise build_refusal(ENGINE_PAUSE, f"parameters ({', '.join(found)})", _version())


def _target() -> tuple[Any, str]:
    module, path = ENGINE_PAUSE.target.split(":")
    owner, name = path.split(".")
    return getattr(importlib.import_module(module), owner), name


def _wrap(original: Callable[[Any], bool]) -> Callable[[Any], bool]:
    @functools.wraps(original)
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

    setattr(process_engine_step, _ORIGINAL, original)
    return process_engine_step


def _version() -> str:
    import vllm

    return str(vllm.__version__)
