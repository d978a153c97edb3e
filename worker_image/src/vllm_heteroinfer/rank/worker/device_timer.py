"""How long a GPU takes for a step's forward pass, without making anybody wait for it."""

from collections.abc import Callable
from itertools import cycle
from typing import Any

import torch

_PAIRS = 8
"""More than steps can be under way at once: a pair of events is used again after so many steps."""


class DeviceTimer:
    """Times forward passes by CUDA events; put around the model runner's own call, on that instance.

    Source: vllm/v1/worker/gpu_model_runner.py::GPUModelRunner._model_forward@v0.32.0, made to be overridden.
    """

    def __init__(self, runner: Any, tell: Callable[[Callable[[], float]], None]) -> None:
        """Puts itself around `runner._model_forward`.

        Args:
            runner: of this rank.
            tell: gets, for each forward pass, a function that returns its seconds on the device.
                It waits for the forward pass, so it is called when the step is over anyway.
        """
        self._forward = runner._model_forward
        self._tell = tell
        self._events = cycle(
            [
                (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
                for _ in range(_PAIRS)
            ]
        )
        runner._model_forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the forward pass between two events."""
        start, end = next(self._events)
        start.record()
        output = self._forward(*args, **kwargs)
        end.record()

        def seconds() -> float:
            end.synchronize()
            return float(start.elapsed_time(end)) / 1e3

        self._tell(seconds)
        return output
