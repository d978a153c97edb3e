"""What vLLM's own classes say of themselves, by architecture, as JSON: on the platform of this environment.

    .venv-worker/bin/python -m tests.shapes.classes

Each architecture that generates text has `pipeline`, whether vLLM can have it in stages, and `module`, where
its class is; one whose class cannot be imported here has `error`. `both_ways` are model types.
"""

import importlib
import json
import os
import sys
from typing import Any

REMOTE_TYPES = ("bagel", "molmo2", "moondream3")
"""That transformers itself does not know."""


def ask() -> dict[str, dict[str, Any]]:
    """Returns what each class says."""
    from vllm.model_executor.models import registry
    from vllm.model_executor.models.interfaces import supports_pp

    found: dict[str, dict[str, Any]] = {}
    for table in (registry._TEXT_GENERATION_MODELS, registry._MULTIMODAL_MODELS):
        for architecture, (module, name) in table.items():
            full = module if module.startswith("vllm.") else f"vllm.model_executor.models.{module}"
            try:
                model = getattr(importlib.import_module(full), name)
                found[architecture] = {"pipeline": bool(supports_pp(model)), "module": model.__module__}
            except Exception as error:  # vLLM's own word on what is not here, as data
                found[architecture] = {"error": f"{type(error).__name__}: {error}"[:300], "module": full}
    return found


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
    """Prints the answers; returns 0."""
    os.environ.setdefault("VLLM_PLUGINS", "")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    sys.stdout.write(json.dumps({"classes": ask(), "both_ways": both_ways()}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
