"""Prints the properties of vLLM's own model classes on this environment's platform, by architecture, as JSON.

    .venv-worker/bin/python -m tests.shapes.classes

The entry of each architecture that generates text has these fields:

- `pipeline`: whether vLLM can divide the model into stages
- `all_layers`: whether the model also calls layers of other stages
- `module`: the module of the class
- `states`: where those of vLLM's layers with states are that this module uses
- `error`: only if the class cannot be imported here

`both_ways` lists the types of models whose attention works in both directions.
"""

import ast
import importlib
import inspect
import json
import os
import re
import sys
from typing import Any

STATES = "vllm.model_executor.layers.mamba."
"""Modules of vLLM's layers with states."""
_ALL_LAYERS = re.compile(r" in (enumerate\()?self\.layers\)?:")
REMOTE_TYPES = ("bagel", "molmo2", "moondream3")
"""Model types that transformers itself does not know."""


def ask() -> dict[str, dict[str, Any]]:
    """Returns the properties of each class."""
    from vllm.model_executor.models import registry
    from vllm.model_executor.models.interfaces import supports_pp

    found: dict[str, dict[str, Any]] = {}
    for table in (registry._TEXT_GENERATION_MODELS, registry._MULTIMODAL_MODELS):
        for architecture, (module, name) in table.items():
            full = module if module.startswith("vllm.") else f"vllm.model_executor.models.{module}"
            try:
                model = getattr(importlib.import_module(full), name)
                home = importlib.import_module(model.__module__)
                found[architecture] = {
                    "pipeline": bool(supports_pp(model)),
                    "all_layers": _calls_all_layers(home),
                    "module": model.__module__,
                    "states": _states(home),
                    "text_by_config": _text_by_config(home),
                }
            except Exception as error:  # vLLM's message about a missing dependency, as data
                found[architecture] = {"error": f"{type(error).__name__}: {error}"[:300], "module": full}
    return found


def _calls_all_layers(module: Any) -> bool:
    """Returns whether a class that can leave layers to other stages also calls those layers."""
    for each in vars(module).values():
        if isinstance(each, type) and each.__module__ == module.__name__ and "forward" in vars(each):
            leaves_some = "make_layers(" in inspect.getsource(each)
            if leaves_some and _ALL_LAYERS.search(inspect.getsource(vars(each)["forward"])):
                return True
    return False


def _text_by_config(module: Any) -> bool:
    """Returns whether a module finds the class of its language model in that model's own config."""
    if ".architectures" in inspect.getsource(module):  # it writes the class into that config itself
        return False
    calls = [
        call
        for call in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "init_vllm_registered_model"
    ]
    given = [{word.arg: ast.unparse(word.value) for word in call.keywords} for call in calls]
    return any(
        "architectures" not in words and re.search(r"(text|llm|language)_config$", words.get("hf_config", ""))
        for words in given
    )


def _states(module: Any) -> list[str]:
    """Returns the modules of the layers with states that a model's module imports."""
    homes = {getattr(each, "__module__", None) for each in vars(module).values() if isinstance(each, type)}
    return sorted(
        home.removeprefix(STATES) for home in homes if isinstance(home, str) and home.startswith(STATES)
    )


def both_ways() -> list[str]:
    """Returns the model types whose image tokens attend to each other in both directions."""
    from types import SimpleNamespace

    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    from vllm.transformers_utils.model_arch_config_convertor import ModelArchConfigConvertorBase

    found = []
    for model_type in sorted({*CONFIG_MAPPING_NAMES, *REMOTE_TYPES}):
        config: Any = SimpleNamespace(model_type=model_type)
        if ModelArchConfigConvertorBase(config, config).is_mm_prefix_lm():
            found.append(model_type)
    return found


def main() -> int:
    """Prints the properties, and returns 0."""
    os.environ.setdefault("VLLM_PLUGINS", "")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    sys.stdout.write(json.dumps({"classes": ask(), "both_ways": both_ways()}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
