"""The model's class, looked at in the process that needs it. Imports vLLM inside functions only.

What vLLM wants to know of a model's class it finds out in a process of its own, which imports torch
and vLLM anew: 13 s of a CPU for each rank and the API server, wherever its cache folder is empty, as
in each new pod. That process is there lest the class touches CUDA; a CPU rank has none to touch.
Source: vllm/model_executor/models/registry.py::_LazyRegisteredModel.inspect_model_cls@v0.32.0.
"""

import json
from pathlib import Path


def register(model: str) -> None:
    """Registers the class of the model in this folder as itself, in place of by its name.

    Architectures that vLLM does not have are left to it: it says so in words.
    """
    from vllm import ModelRegistry

    for architecture in architectures(Path(model)):
        known = ModelRegistry.models.get(architecture)
        if known is not None:
            ModelRegistry.register_model(architecture, known.load_model_cls())


def architectures(model: Path) -> list[str]:
    """Returns what the model's config.json names; nothing where it cannot be read, which vLLM will say."""
    try:
        config = json.loads((model / "config.json").read_text())
    except (OSError, ValueError):
        return []
    names = config.get("architectures") if isinstance(config, dict) else None
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
