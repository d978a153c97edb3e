"""Tests that a rank reports the progress of its load, with vLLM's own loader and real files."""

from pathlib import Path

import pytest

from heteroinfer_contract import load_formats
from tests.integration.forked_script import run_script
from tests.integration.worker.groups import WORKER_PYTHON

pytestmark = [pytest.mark.unhurried, pytest.mark.timeout(1200)]

LOAD = """
import json, sys
from types import SimpleNamespace as Values
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader import get_model_loader
from vllm_heteroinfer.rank.worker.weight_loading import counting_progress
config, said, read = LoadConfig(load_format=sys.argv[2]), [], 0
runner = Values(load_config=config, vllm_config=Values(load_config=config))
with counting_progress(runner, lambda done, total: said.append((done, total))):
    loader = get_model_loader(runner.load_config)
    if hasattr(loader, "get_all_weights"):
        for _, tensor in loader.get_all_weights(Values(model=sys.argv[1], revision=None), Values()):
            read += tensor.nbytes
print(json.dumps({"said": said, "read": read, "restored": runner.load_config is config,
    "seen": loader.load_config is config, "loader": type(loader).__mro__[1].__name__}))
"""


READERS = """
import json, sys
from types import SimpleNamespace as Values
from vllm.config.load import LoadConfig
from vllm.model_executor import model_loader
from heteroinfer_contract.load_formats import GPU_FORMATS
loaders = {name: loader.__name__ for name, loader in model_loader._LOAD_FORMAT_TO_MODEL_LOADER.items()}
refused = []
for name in GPU_FORMATS:
    loader = model_loader.get_model_loader(LoadConfig(load_format=name))
    try:
        list(loader.get_all_weights(Values(model=sys.argv[1], revision=None), Values()))
    except Exception:
        refused.append(name)
print(json.dumps({"loaders": loaders, "refused": refused}))
"""


def load(model: Path, load_format: str) -> dict[str, object]:
    found: dict[str, object] = run_script(WORKER_PYTHON, LOAD, str(model), load_format).answer()
    return found


def test_the_bytes_of_each_tensor_are_counted_up_to_the_size_of_the_files(model: Path) -> None:
    found = load(model, "auto")
    files_bytes = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    said = found["said"]
    assert isinstance(said, list)
    done = [step[0] for step in said]
    assert len(done) > 20
    assert done == sorted(done)
    assert {step[1] for step in said} == {files_bytes}
    assert done[-1] == found["read"]
    assert isinstance(found["read"], int)
    assert 0.95 * files_bytes < found["read"] <= files_bytes
    assert (found["restored"], found["seen"], found["loader"]) == (True, True, "DefaultModelLoader")


def test_the_dummy_format_keeps_its_own_loader(model: Path) -> None:
    found = load(model, "dummy")
    assert (found["said"], found["restored"], found["seen"]) == ([], True, True)


def test_feed_forward_ranks_take_every_format_of_the_loader_of_checkpoints(model: Path) -> None:
    said = run_script(WORKER_PYTHON, READERS, str(model)).answer()
    read = {name for name, loader in said["loaders"].items() if loader == "DefaultModelLoader"}
    assert read | {"dummy"} == set(load_formats.FEED_FORWARD)
    assert said["loaders"]["dummy"] == "DummyModelLoader"
    assert said["refused"] == list(load_formats.GPU_FORMATS), "vLLM reads them on CPUs now"
