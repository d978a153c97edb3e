"""Which classes of models vLLM serves, by its own registry, and which transformers has beside them.

    .venv-worker/bin/python -m tests.shapes.architectures          # writes the planner's table
    .venv-worker/bin/python -m tests.shapes.architectures --check  # exits 1 if it is not current

Imports vLLM and transformers inside functions only.
"""

import json
import sys
from pathlib import Path
from typing import Any

TABLE = Path(__file__).parents[2] / "operator/src/heteroinfer_operator/planning/served_architectures.json"


def build_table() -> dict[str, Any]:
    """Returns the table: names of classes by what vLLM does with them, and what endings of others mean."""
    import transformers
    import vllm.version
    from transformers.models.auto import modeling_auto
    from vllm.config.model import iter_architecture_defaults
    from vllm.model_executor.models import registry

    text = {*registry._TEXT_GENERATION_MODELS, *registry._MULTIMODAL_MODELS}
    by_transformers = set(registry._TRANSFORMERS_SUPPORTED_MODELS)
    others = set(registry._VLLM_MODELS) - text - by_transformers
    causal = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    images = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values()
    known = {name for each in (*causal, *images) for name in ([each] if isinstance(each, str) else each)}
    return {
        "source": f"vllm {vllm.version.__version__.split('+')[0]} and transformers "
        f"{transformers.__version__}, by tests/shapes/architectures.py",
        "generates": sorted(text),
        "by_transformers": sorted(by_transformers | known - text - others),
        "other_tasks": sorted(others),
        "endings": {ending: runner for ending, (runner, _) in iter_architecture_defaults()},
        "until": dict(sorted(registry._PREVIOUSLY_SUPPORTED_MODELS.items())),
    }


def render(table: dict[str, Any]) -> str:
    """Returns the table as its file has it: a line a name."""
    return json.dumps(table, indent=1) + "\n"


def main() -> int:
    """Writes or checks the table; returns the exit code."""
    text = render(build_table())
    if "--check" not in sys.argv:
        TABLE.write_text(text)
        return 0
    if TABLE.read_text() == text:
        return 0
    sys.stderr.write(f"{TABLE}: not what vLLM says; run python -m tests.shapes.architectures\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
