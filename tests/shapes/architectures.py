"""Writes the table of the model classes that vLLM serves, from the registries of vLLM and transformers.

The first command writes the planner's table; the second one exits 1 if the table is not current:

    .venv-worker/bin/python -m tests.shapes.architectures
    .venv-worker/bin/python -m tests.shapes.architectures --check

Imports vLLM and transformers inside functions only.
"""

import os
import sys
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tests.shapes.classes import ask

STUB = ".vl_stub"
"""Module of a class that only raises an error on CPUs."""
AROUND = {"BailingMoeV3VLForConditionalGeneration"}
"""Classes that wrap `GPU_STATES` models, and whose own modules have no layers."""
TABLE = Path(__file__).parents[2] / "operator/src/heteroinfer_operator/vllm_support/listed_architectures.py"


def build_table() -> dict[str, Any]:
    """Builds the table: class names by what vLLM does with them, and the meaning of other names' suffixes."""
    import transformers
    from transformers.models.auto import modeling_auto
    from vllm.config.model import iter_architecture_defaults
    from vllm.model_executor.models import registry
    from vllm.transformers_utils.config import _CONFIG_REGISTRY
    from vllm.version import __version__ as vllm_version

    text: set[str] = {*registry._TEXT_GENERATION_MODELS, *registry._MULTIMODAL_MODELS}
    by_transformers = set(registry._TRANSFORMERS_SUPPORTED_MODELS)
    others = set(registry._VLLM_MODELS) - text - by_transformers
    causal = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    images = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values()
    known = {name for each in (*causal, *images) for name in ([each] if isinstance(each, str) else each)}
    causal_types = {
        **modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        **{key: named[0] for key in _CONFIG_REGISTRY if (named := _named(_CONFIG_REGISTRY[key]))},
    }
    return {
        "source": f"vLLM {vllm_version.split('+')[0]} and transformers {transformers.__version__}",
        "generates": sorted(text),
        "by_transformers": sorted(by_transformers | known - text - others),
        "other_tasks": sorted(others),
        "endings": {ending: runner for ending, (runner, _) in iter_architecture_defaults()},
        "until": dict(sorted(registry._PREVIOUSLY_SUPPORTED_MODELS.items())),
        "causal_types": {
            key: name for key, name in sorted(causal_types.items()) if name in text | by_transformers
        },
        **sort_classes(ask()),
    }


def _named(config_class: Any) -> Any:
    """Returns the architectures that a config class has by default, or None."""
    named = getattr(config_class, "architectures", None)
    return named if isinstance(named, list) else None


def sort_classes(classes: Mapping[str, Mapping[str, Any]]) -> dict[str, list[str]]:
    """Sorts the names of classes by the features that they lack.

    Args:
        classes: properties of the classes (`tests.shapes.classes`), in an environment without a GPU.
    """

    def having(*modules: str) -> set[str]:
        return {
            name for name, answer in classes.items() if not set(modules).isdisjoint(answer.get("states", ()))
        }

    stubs = {name for name, answer in classes.items() if answer["module"].endswith(STUB)}
    # A class that cannot be imported counts as a class for GPUs, if vLLM has it in modules by platform.
    of_gpus = stubs | {
        name
        for name, answer in classes.items()
        if ".nvidia." in answer["module"]
        or ("error" in answer and answer["module"].startswith("vllm.models."))
    }
    of_gpu_states = having(
        "mamba_mixer", "gdn.olmo_gdn_linear_attn", "linear.bailing_linear_attn", "abstract"
    )
    found = {
        "no_pipeline": {name for name, answer in classes.items() if answer.get("pipeline") is False} - stubs,
        "gpu_classes": of_gpus,
        "gpu_states": of_gpu_states | AROUND,
        "text_by_config": {name for name, answer in classes.items() if answer.get("text_by_config")},
        "gated_delta_nets": having("gdn.qwen_gdn_linear_attn") - of_gpus,
    }
    return {name: sorted(names) for name, names in found.items()}


_MODULE = '''\
"""Classes of models in {source}, by what vLLM does with them. Pure; data.

Written by `python -m tests.shapes.architectures`.
"""

from typing import Final

from heteroinfer_contract.word_table import word_pairs, word_set

GENERATES: Final = word_set(
    """
{generates}
    """
)
"""Classes in vLLM that generate text."""
BY_TRANSFORMERS: Final = word_set(
    """
{by_transformers}
    """
)
"""Classes that vLLM lacks but transformers has; vLLM runs the class of transformers."""
OTHER_TASKS: Final = word_set(
    """
{other_tasks}
    """
)
"""Classes in vLLM that give embeddings or scores, or draft tokens for another model."""
ENDINGS: Final = word_pairs(
    """
{endings}
    """
)
"""End of a class name -> task that vLLM assumes for the class; the first end that fits decides."""
UNTIL: Final = word_pairs(
    """
{until}
    """
)
"""Class that vLLM no longer serves -> the last version of vLLM that served it."""
CAUSAL_TYPES: Final = word_pairs(
    """
{causal_types}
    """
)
"""Type of a language model -> class that vLLM uses if the config names no class
(vllm/config/vllm.py::VllmConfig.with_hf_config@v0.32.0)."""
TEXT_BY_CONFIG: Final = word_set(
    """
{text_by_config}
    """
)
"""Classes for which the config of their language model decides the class of that model."""
NO_PIPELINE: Final = word_set(
    """
{no_pipeline}
    """
)
"""Classes without SupportsPP: with several stages, vLLM refuses their config
(vllm/config/model.py::ModelConfig.verify_with_parallel_config@v0.32.0)."""
GPU_CLASSES: Final = word_set(
    """
{gpu_classes}
    """
)
"""Classes that vLLM has only for GPUs of NVIDIA and AMD. On other devices, the class is missing or raises an
error (vllm/models@v0.32.0)."""
GPU_STATES: Final = word_set(
    """
{gpu_states}
    """
)
"""Classes whose layers with states have kernels for GPUs only: the scan of Mamba 1, which vLLM's libraries
for CPUs lack (vllm/.../mamba/mamba_mixer.py::selective_scan_fn@v0.32.0), or kernels in Triton."""
GATED_DELTA_NETS: Final = word_set(
    """
{gated_delta_nets}
    """
)
"""Classes whose linear attention is vLLM's QwenGatedDeltaNetAttention."""
'''


def render(table: dict[str, Any]) -> str:
    """Renders the table as its module has it: names as wrapped words."""
    sets = {name: wrapped(found) for name, found in table.items() if isinstance(found, list)}
    maps = {
        name: wrapped(f"{key}\0{value}" for key, value in found.items()).replace("\0", " ")
        for name, found in table.items()
        if isinstance(found, dict)
    }
    return _MODULE.format(source=table["source"], **sets, **maps)


def wrapped(words: Iterable[str]) -> str:
    """Returns words as lines of a table, without splitting a name."""
    return textwrap.fill(
        " ".join(words),
        width=110,
        initial_indent=" " * 4,
        subsequent_indent=" " * 4,
        break_long_words=False,
        break_on_hyphens=False,
    )


def main() -> int:
    """Writes or checks the table, and returns the exit code."""
    os.environ.setdefault("VLLM_PLUGINS", "")  # without our own platform
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
