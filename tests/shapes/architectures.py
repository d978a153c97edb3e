"""Which classes of models vLLM serves, by its own registry, and which transformers has beside them.

    .venv-worker/bin/python -m tests.shapes.architectures          # writes the planner's table
    .venv-worker/bin/python -m tests.shapes.architectures --check  # exits 1 if it is not current

Imports vLLM and transformers inside functions only.
"""

import sys
from pathlib import Path
from typing import Any

from tests.shapes.defaults import literal

TABLE = Path(__file__).parents[2] / "operator/src/heteroinfer_operator/planning/listed_architectures.py"


def build_table() -> dict[str, Any]:
    """Returns the table: names of classes by what vLLM does with them, and what endings of others mean."""
    import transformers
    from transformers.models.auto import modeling_auto
    from vllm.config.model import iter_architecture_defaults
    from vllm.model_executor.models import registry
    from vllm.version import __version__ as vllm_version

    text = {*registry._TEXT_GENERATION_MODELS, *registry._MULTIMODAL_MODELS}
    by_transformers = set(registry._TRANSFORMERS_SUPPORTED_MODELS)
    others = set(registry._VLLM_MODELS) - text - by_transformers
    causal = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    images = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values()
    known = {name for each in (*causal, *images) for name in ([each] if isinstance(each, str) else each)}
    return {
        "source": f"vLLM {vllm_version.split('+')[0]} and transformers {transformers.__version__}",
        "generates": sorted(text),
        "by_transformers": sorted(by_transformers | known - text - others),
        "other_tasks": sorted(others),
        "endings": {ending: runner for ending, (runner, _) in iter_architecture_defaults()},
        "until": dict(sorted(registry._PREVIOUSLY_SUPPORTED_MODELS.items())),
    }


_MODULE = '''\
"""Which classes of models {source} list. Pure; data.

Written by `python -m tests.shapes.architectures`.
"""

from collections.abc import Mapping
from typing import Final

GENERATES: Final = frozenset(
    {{
{generates}
    }}
)
"""vLLM has them, and they generate text."""
BY_TRANSFORMERS: Final = frozenset(
    {{
{by_transformers}
    }}
)
"""vLLM runs transformers' own."""
OTHER_TASKS: Final = frozenset(
    {{
{other_tasks}
    }}
)
"""For embeddings or scores, or drafts of other models."""
ENDINGS: Final[Mapping[str, str]] = {{
{endings}
}}
"""What vLLM takes a class for by the end of its name, the first that fits."""
UNTIL: Final[Mapping[str, str]] = {{
{until}
}}
"""The last version of vLLM that served a class."""
'''


def render(table: dict[str, Any]) -> str:
    """Returns the table as its module has it: a line a name."""
    sets = {
        name: "\n".join(f"        {literal(each)}," for each in table[name])
        for name in ("generates", "by_transformers", "other_tasks")
    }
    maps = {
        name: "\n".join(f"    {literal(key)}: {literal(value)}," for key, value in table[name].items())
        for name in ("endings", "until")
    }
    return _MODULE.format(source=table["source"], **sets, **maps)


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
