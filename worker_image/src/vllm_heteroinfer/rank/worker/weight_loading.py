"""Progress of the load of a rank's weights. Imports vLLM."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from vllm.model_executor.model_loader import get_model_loader, register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from vllm_heteroinfer.rank.worker.rank_mode import ModelLoad

COUNTED: Final = "heteroinfer_counted"
"""Name of the counting loader in vLLM's registry."""


@contextmanager
def counting_progress(
    runner: Any, report: Callable[[int, int], None], load: ModelLoad | None = None
) -> Iterator[None]:
    """Reports the progress of a model runner's load inside this context.

    Tensors of other stages count as loaded, but are not read. Formats with their own loader (tensorizer,
    runai_streamer, sharded_state, ...) report no progress.

    Args:
        runner: vLLM's model runner. Its configuration names another loader during the context.
        report: called with the processed bytes and all bytes of the checkpoint.
        load: the mode's changes of the load.

    Source: vllm/model_executor/model_loader/default_loader.py::DefaultModelLoader@v0.32.0.
    """
    config = runner.load_config
    loader = type(get_model_loader(config))
    if not issubclass(loader, DefaultModelLoader):
        yield
        return
    register_model_loader(COUNTED)(_build_counting_loader(loader, config, report, load or ModelLoad()))
    # The GPU runner reads its own load_config, the CPU runner reads vllm_config.load_config.
    runner.load_config = runner.vllm_config.load_config = dataclasses.replace(config, load_format=COUNTED)
    try:
        yield
    finally:
        runner.load_config = runner.vllm_config.load_config = config


def _build_counting_loader(
    loader: type[DefaultModelLoader],
    config: Any,
    report: Callable[[int, int], None],
    load: ModelLoad,
) -> type[DefaultModelLoader]:
    """Returns a subclass of vLLM's loader that reports its progress and applies the mode's changes."""

    class CountingLoader(loader):  # its base is the loader that the user has chosen
        done_bytes = 0
        total_bytes = 0

        def __init__(self, load_config: Any) -> None:
            super().__init__(config)  # the user's configuration, which does not name COUNTED

        def _prepare_weights(self, *args: Any, **kwargs: Any) -> Any:
            """Adds the sizes of the files to the total."""
            prepared = super()._prepare_weights(*args, **kwargs)
            weight_files = prepared[1]
            self.total_bytes += sum(Path(file).stat().st_size for file in weight_files)
            return prepared

        def load_weights(self, model: Any, model_config: Any) -> None:
            """Lets the mode see the built model, then loads its weights."""
            load.model_built(model, self)
            super().load_weights(model, model_config)

        def get_all_weights(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
            """Yields the tensors of this rank, and reports the progress."""
            for name, tensor in super().get_all_weights(*args, **kwargs):
                if not load.leaves_out(name):
                    yield name, tensor
                self.done_bytes += tensor.nbytes
                report(min(self.done_bytes, self.total_bytes), self.total_bytes)

    return CountingLoader
