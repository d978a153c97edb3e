"""Makes the model of a case in the worker's Python.

    python -m tests.integration.served_models.tiny_models CASE DIR

Imports torch and transformers inside functions only.
"""

import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from heteroinfer_contract.model import SchemeName
from tests.integration.feed_forward.tiny_models import build
from tests.integration.served_models.cases import CASES, LAYERS, Case
from tests.integration.served_models.quantized import CONFIGS, DRAWN, quantize

_FILE: Final = "model.safetensors"


def make(case: Case, directory: Path) -> None:
    """Writes a case's model with random weights into a folder."""
    import torch

    from tests.models import Recipe, _write_tokenizer

    model = build(case.architecture, {**case.settings, "num_hidden_layers": LAYERS}, case.spread)
    directory.mkdir(parents=True, exist_ok=True)
    model.to(getattr(torch, case.dtype)).save_pretrained(directory)
    _write_tokenizer(directory, Recipe())
    changes = dict(case.afterwards)
    if case.scheme is not SchemeName.NONE:
        widened = _quantize(directory, case)
        changes["quantization_config"] = DRAWN[case.drawn].config if case.drawn else CONFIGS[case.scheme]
        if case.widened:
            _write_widened(directory, Path(f"{directory}-widened"), widened)
    config = directory / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **changes}, indent=1))


def _quantize(directory: Path, case: Case) -> dict[str, Any]:
    """Quantizes a folder's weights, and returns their values in float32."""
    from safetensors.torch import load_file, save_file

    file = directory / _FILE
    drawn = DRAWN[case.drawn] if case.drawn else None
    quantized, meant = quantize(load_file(file), case.scheme, drawn)
    tensors = {name: tensor.contiguous() for name, tensor in quantized.items()}
    save_file(tensors, file, metadata={"format": "pt"})
    return meant


def _write_widened(directory: Path, plain: Path, tensors: Mapping[str, Any]) -> None:
    """Writes the model of a folder with weights in float32. Its config.json has no format yet."""
    from safetensors.torch import save_file

    shutil.copytree(directory, plain)
    file = plain / _FILE
    save_file({name: each.contiguous() for name, each in tensors.items()}, file, metadata={"format": "pt"})


def main(argument: str) -> None:
    """Makes the model of a case in a folder. A `widened` case also gets a second folder."""
    name, directory = json.loads(argument)
    make(CASES[name], Path(directory))


if __name__ == "__main__":
    main(json.dumps(sys.argv[1:]))
