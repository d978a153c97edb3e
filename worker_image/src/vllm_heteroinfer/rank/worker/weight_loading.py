"""How far the load of a rank's weights is. Imports vLLM."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from vllm.model_executor.model_loader import get_model_loader, register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

COUNTED: Final = "heteroinfer_counted"
"""Name under which vLLM knows the loader that counts."""


@contextmanager
def counted(
    runner: Any, report: Callable[[int, int], None], leaves_out: Callable[[str], bool] = lambda _: False
) -> Iterator[None]:
    """Has a model runner's load tell how far it is, while the context lasts.

    A stage passes by the tensors of other stages, and does not read them. Formats with a loader of
    their own (tensorizer, runai_streamer, sharded_state, ...) tell nothing on the way.

    Args:
        runner: vLLM's; its configuration names another loader meanwhile.
        report: called with the bytes of the checkpoint that are dealt with, and all of them.
        leaves_out: whether a tensor of the checkpoint, by its name, is not this rank's.

    Source: vllm/model_executor/model_loader/default_loader.py::DefaultModelLoader@v0.32.0.
    """
    config = runner.load_config
    loader = type(get_model_loader(config))
    if not issubclass(loader, DefaultModelLoader):
        yield
        return
    register_model_loader(COUNTED)(_counting(loader, config, report, leaves_out))
    # A GPU's runner reads its own, a CPU's that of the whole configuration.
    runner.load_config = runner.vllm_config.load_config = dataclasses.replace(config, load_format=COUNTED)
    try:
        yield
    finally:
        runner.load_config = runner.vllm_config.load_config = config


def _counting(
    loader: type[DefaultModelLoader],
    config: Any,
    report: Callable[[int, int], None],
    leaves_out: Callable[[str], bool],
) -> type[DefaultModelLoader]:
    class CountingLoader(loader):  # the user chooses its base
        done_bytes = 0
        total_bytes = 0

        def __init__(self, load_config: Any) -> None:
            super().__init__(config)

        def _prepare_weights(self, *args: Any, **kwargs: Any) -> Any:
            found = super()._prepare_weights(*args, **kwargs)
            self.total_bytes += sum(Path(file).stat().st_size for file in found[1])
            return found

        def get_all_weights(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
            for name, tensor in super().get_all_weights(*args, **kwargs):
                if not leaves_out(name):
                    yield name, tensor
                self.done_bytes += tensor.nbytes
                report(min(self.done_bytes, self.total_bytes), self.total_bytes)

    return CountingLoader
