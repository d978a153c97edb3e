"""What the mode of a group adds to the work of a rank's vLLM worker. Imports neither torch nor vLLM."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any


class RankMode:
    """The hooks of a mode, in the order of their calls; these do nothing, as for a stage of one device."""

    follows = False
    """Whether this rank warms up by what another rank announces."""

    def loading(self) -> AbstractContextManager[Callable[[str], bool]]:
        """Surrounds the load; yields whether a tensor of the checkpoint, by its name, is not this rank's."""
        return nullcontext(lambda _: False)

    def model_loaded(self, runner: Any) -> None:
        """Connects the loaded model with the ranks that it computes with."""

    def warming_up(self, runner: Any, phase: str) -> AbstractContextManager[None]:
        """Surrounds a phase of the warm-up; `phase` is its name in the log."""
        return nullcontext()

    def kv_cache_ready(self, runner: Any) -> None:
        """Prepares the runner for batches, once there is a KV cache."""

    def ready(self) -> None:
        """Ends the warm-up."""

    def begin_step(self, rows: int, *, counts: bool) -> None:
        """Begins a step with tokens; it does not count if it is the group's own first request."""

    def end_step(self) -> None:
        """Ends a step of this rank that shared no tokens."""

    def sampling(self, runner: Any, grammar_output: Any) -> AbstractContextManager[Any]:
        """Surrounds the sampling of the last stage; yields the mask for the samples that this rank takes."""
        return nullcontext(grammar_output)

    def check_steps(self) -> None:
        """Raises RuntimeError if the steps so far gave what must not be used."""
