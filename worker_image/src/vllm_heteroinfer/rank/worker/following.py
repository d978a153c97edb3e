"""Warms up a tensor-parallel group with CPU ranks. The first rank leads, and the CPU ranks follow.

A GPU's warm-up runs forward passes that depend on its kernels, caches and settings, so followers cannot
predict them. The leader announces each pass just before it runs, and each follower runs the same pass, so
that the collectives inside match. After warm-up the scheduler determines the steps, and this module is
inactive.
Imports neither torch nor vLLM.
"""

import contextlib
import functools
import logging
import struct
from collections.abc import Callable, Iterator
from enum import IntEnum, unique
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_logger = logging.getLogger(__name__)


@unique
class Event(IntEnum):
    """Kind of a leader's announcement."""

    FORWARD = 1
    """One forward pass; the value is its tokens."""
    LOGITS = 2
    """One computation of logits; the value is its rows."""
    END = 3
    """The phase is over; the value is the number of announcements before it."""


class FollowError(RuntimeError):
    """A follower did not run the announced pass. The message contains the passes that it ran."""


_MESSAGE = struct.Struct("<ii")
"""An event and its value."""


@contextlib.contextmanager
def leading(announce: Callable[[bytes], None], model: "torch.nn.Module", phase: str) -> Iterator[None]:
    """Announces each forward pass and each computation of logits in this context, and the context's end.

    Source: vllm/v1/worker/gpu_model_runner.py::GPUModelRunner._dummy_run@v0.32.0 calls `model(...)`
    and `_dummy_sampler_run` calls `model.compute_logits(...)`.

    Args:
        announce: sends a message to every follower, in order with the group's collectives.
        model: the model itself, not a wrapper. Inside the context, its `forward` and `compute_logits`
            announce each call.
    """
    count = 0

    def send(event: Event, value: int) -> None:
        """Announces an event, and counts the announcement."""
        nonlocal count
        count += 1
        announce(_MESSAGE.pack(event, value))

    compute_logits: Callable[..., Any] | None = getattr(model, "compute_logits", None)

    def announce_and_compute_logits(hidden_states: "torch.Tensor", *args: Any, **kwargs: Any) -> Any:
        """Announces a computation of logits, then runs it."""
        assert compute_logits is not None
        send(Event.LOGITS, hidden_states.shape[0])
        return compute_logits(hidden_states, *args, **kwargs)

    if compute_logits is not None:
        model.compute_logits = announce_and_compute_logits
    try:
        with _reporting_passes(model, lambda tokens: send(Event.FORWARD, tokens)):
            yield
    finally:
        if compute_logits is not None:
            del model.compute_logits  # the method of the model's class is used again
    # After an error there is no announcement, because the error ends the group.
    announce(_MESSAGE.pack(Event.END, count))
    _logger.info("%s: announced %d forward passes and logits computations to the CPU ranks", phase, count)


def follow(
    listen: Callable[[], bytes],
    *,
    model: "torch.nn.Module",
    forward: Callable[[int], Any],
    logits: Callable[[int], Any],
    phase: str,
) -> None:
    """Runs the passes that the leader announces, until the leader ends the phase.

    Args:
        listen: returns the next announcement; raises if none arrives in time.
        model: this rank's model. During the call, its `forward` reports each pass.

    Raises:
        FollowError: this rank ran other passes than the announced one, or announcements were lost.
    """
    run_tokens: list[int] = []  # tokens of each pass since the last announcement
    count = 0
    with _reporting_passes(model, run_tokens.append):
        while True:
            kind, value = _MESSAGE.unpack(listen())
            event = Event(kind)
            if event is Event.END:
                break
            count += 1
            run_tokens.clear()
            expected: list[int] = []  # a computation of logits runs no forward pass
            if event is Event.FORWARD:
                expected = [value]
                forward(value)
            else:
                logits(value)
            if run_tokens != expected:
                raise FollowError(
                    f"{phase}: the model must run passes of {expected} tokens, as the stage's first rank "
                    f"announced (ran {run_tokens}). This is a defect of HeteroInfer. Report it, name the "
                    "model, and use spec.parallelism.mode: Pipeline"
                )
    if count != value:  # the value of END
        raise FollowError(
            f"{phase}: this rank must run all {value} passes that the stage's first rank announced (ran "
            f"{count}). This is a defect of HeteroInfer. Report it, name the model, and use "
            "spec.parallelism.mode: Pipeline"
        )
    _logger.info(
        "%s: ran the %d forward passes and logits computations that the stage's first rank announced",
        phase,
        count,
    )


@contextlib.contextmanager
def _reporting_passes(model: "torch.nn.Module", report: Callable[[int], None]) -> Iterator[None]:
    """Reports the number of tokens of each forward pass just before the pass.

    Wraps `forward` instead of using a hook of torch: vLLM's decorated models, such as models of the
    Transformers backend, bypass hooks (vllm/compilation/decorators.py::_support_torch_compile@v0.32.0).
    """
    forward: Callable[..., Any] = model.forward

    @functools.wraps(forward)
    def report_and_run(*args: Any, **kwargs: Any) -> Any:
        """Reports a forward pass, then runs it."""
        report(num_tokens(args, kwargs))
        return forward(*args, **kwargs)

    model.forward = report_and_run
    try:
        yield
    finally:
        del model.forward  # the method of the model's class is used again


def num_tokens(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Returns the number of tokens in a call of a vLLM model: its positions are [tokens] or [3, tokens]."""
    positions = kwargs["positions"] if "positions" in kwargs else args[1]
    return int(positions.shape[-1])
