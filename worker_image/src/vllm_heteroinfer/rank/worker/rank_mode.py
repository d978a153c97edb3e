"""Base class of the modes, which extend a rank's vLLM worker. Imports neither torch nor vLLM."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any


class ModelLoad:
    """Changes of a mode to the load of the model. This class makes no changes."""

    def model_built(self, model: Any, loader: Any) -> None:
        """Runs between the build of the model and the load of its weights by vLLM's DefaultModelLoader."""

    def leaves_out(self, tensor: str) -> bool:
        """Returns whether this rank leaves out a tensor of the checkpoint."""
        return False


class RankMode:
    """The hooks of a mode, in the order of their calls. This class, for a single device, does nothing."""

    follows = False
    """Whether this rank follows the warm-up of another rank."""

    def loading(self) -> AbstractContextManager[ModelLoad]:
        """Surrounds the load."""
        return nullcontext(ModelLoad())

    def model_loaded(self, runner: Any) -> None:
        """Connects the loaded model with other ranks."""

    def warming_up(self, runner: Any, phase: str) -> AbstractContextManager[None]:
        """Surrounds a phase of the warm-up; `phase` is its name in the log."""
        return nullcontext()

    def kv_cache_ready(self, runner: Any) -> None:
        """Prepares the runner for batches, after the KV cache is allocated."""

    def ready(self) -> None:
        """Ends the warm-up."""

    def begin_step(self, rows: int, *, for_client: bool) -> None:
        """Begins a step with tokens.

        Args:
            for_client: whether the step serves a client. False for the group's own first request.
        """

    def end_step(self) -> None:
        """Ends a step of a stage that does not sample."""

    def sampling(self, runner: Any, grammar_output: Any) -> AbstractContextManager[Any]:
        """Surrounds the sampling of the last stage. Yields the grammar mask that this rank must apply."""
        return nullcontext(grammar_output)

    def check_steps(self) -> None:
        """Raises RuntimeError if results of the steps so far must not be used."""
