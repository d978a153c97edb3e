"""Which classes of models vLLM serves, by its own registry, and which transformers has beside them.

    .venv-worker/bin/python -m tests.shapes.architectures          # writes the planner's table
    .venv-worker/bin/python -m tests.shapes.architectures --check  # exits 1 if it is not current

Imports vLLM and transformers inside functions only.
"""

import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

TABLE = Path(__file__).parents[2] / "operator/src/heteroinfer_operator/vllm_support/listed_architectures.py"


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

from typing import Final

from heteroinfer_contract.word_table import word_pairs, word_set

GENERATES: Final = word_set(
    """
{generates}
    """
)
"""vLLM has them, and they generate text."""
BY_TRANSFORMERS: Final = word_set(
    """
{by_transformers}
    """
)
"""vLLM runs transformers' own."""
OTHER_TASKS: Final = word_set(
    """
{other_tasks}
    """
)
"""For embeddings or scores, or drafts of other models."""
ENDINGS: Final = word_pairs(
    """
{endings}
    """
)
"""What vLLM takes a class for by the end of its name, the first that fits."""
UNTIL: Final = word_pairs(
    """
{until}
    """
)
"""The last version of vLLM that served a class."""
'''


def render(table: dict[str, Any]) -> str:
    """Returns the table as its module has it: names as wrapped words."""
    sets = {name: wrapped(table[name]) for name in ("generates", "by_transformers", "other_tasks")}
    maps = {
        name: wrapped(f"{key}\0{value}" for key, value in table[name].items()).replace("\0", " ")
        for name in ("endings", "until")
    }
    return _MODULE.format(source=table["source"], **sets, **maps)


def wrapped(words: Iterable[str]) -> str:
    """Returns words as lines of a table, which a name is not broken by."""
    return textwrap.fill(
        " ".join(words),
        width=110,
        initial_indent=" " * 4,
        subsequent_indent=" " * 4,
        break_long_words=False,
        break_on_hyphens=False,
    )


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
