"""Makes the model of a case; in the worker's Python.

    python -m tests.integration.served_models.tiny_models CASE DIR

Imports torch and transformers inside functions only.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Final

from heteroinfer_contract.model import SchemeName
from tests.integration.feed_forward.tiny_models import build
from tests.integration.served_models.cases import CASES, LAYERS, Case
from tests.integration.served_models.quantized import CONFIGS, quantize, widen

_FILE: Final = "model.safetensors"


def make(case: Case, directory: Path) -> None:
    """Writes a case's model with random weights into a folder."""
    import torch

    from tests.models import Recipe, _write_tokenizer

    model = build(case.architecture, {**case.settings, "num_hidden_layers": LAYERS})
    directory.mkdir(parents=True, exist_ok=True)
    model.to(getattr(torch, case.dtype)).save_pretrained(directory)
    _write_tokenizer(directory, Recipe())
    changes = dict(case.afterwards)
    if case.scheme is not SchemeName.NONE:
        _quantize(directory, case.scheme)
        changes["quantization_config"] = CONFIGS[case.scheme]
    config = directory / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **changes}, indent=1))


def _quantize(directory: Path, scheme: SchemeName) -> None:
    from safetensors.torch import load_file, save_file

    file = directory / _FILE
    tensors = {name: tensor.contiguous() for name, tensor in quantize(load_file(file), scheme).items()}
    save_file(tensors, file, metadata={"format": "pt"})


def make_widened(directory: Path, plain: Path) -> None:
    """Writes the model of a folder, in FP8, into another one with its weights in float32."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(directory, plain)
    save_file(widen(load_file(directory / _FILE)), plain / _FILE, metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    del config["quantization_config"]
    (plain / "config.json").write_text(json.dumps(config))


def main(argument: str) -> None:
    """Makes the case and folder of `argument`, in JSON, and a second folder for a `widened` case."""
    name, directory = json.loads(argument)
    make(CASES[name], Path(directory))
    if CASES[name].widened:
        make_widened(Path(directory), Path(f"{directory}-widened"))


if __name__ == "__main__":
    main(json.dumps(sys.argv[1:]))
