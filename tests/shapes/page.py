"""Writes docs/user/supported-models.md: published models, their plans, and our sizes beside vLLM's.

The second command exits 1 if the page is not current:

    python -m tests.shapes.page
    python -m tests.shapes.page --check
"""

import sys
from collections import Counter
from pathlib import Path
from typing import Any, Final

from heteroinfer_contract.model import AttentionKind, SchemeName
from heteroinfer_contract.model_profile import ModelProfile
from heteroinfer_operator.api import parse_spec
from heteroinfer_operator.commands.plan_text import ShownParts, describe_plan
from heteroinfer_operator.errors import PlanError
from heteroinfer_operator.nodes.cpu_features import AMX
from heteroinfer_operator.planning import GroupRequest, Inventory, Planned, make_plan
from heteroinfer_operator.planning.memory import Sizes
from heteroinfer_operator.planning.prediction import StepLoad, forecast
from heteroinfer_operator.vllm_support.architectures import BROKEN_PIPELINE
from tests.integration.served_models.cases import CASES, FEED_FORWARD, Case
from tests.shapes.comparison import compare, recorded, settings
from tests.shapes.corpus import SHAPES
from tests.shapes.profiles import recorded_profiles

PAGE: Final = Path(__file__).parents[2] / "docs" / "user" / "supported-models.md"
GROUPS: Final[dict[str, tuple[str, str, int, int]]] = {
    "A": ("24Gi", "64Gi", 16, 1),
    "B": ("80Gi", "512Gi", 64, 2),
}
"""Memory of one GPU, memory and CPUs of a CPU pod, number of CPU pods."""
AMX_NODES: Final = Inventory(cpu_features={"cpu": frozenset({AMX})})

_HEAD: Final = Path(__file__).parent / "page.md"
_LETTERS: Final = {
    AttentionKind.FULL: "full",
    AttentionKind.WINDOW: "window",
    AttentionKind.CHUNKED: "chunked",
    AttentionKind.LATENT: "latent",
    AttentionKind.SPARSE: "sparse",
    AttentionKind.LINEAR: "linear",
    AttentionKind.NONE: "none",
}


def ask(profile: ModelProfile, group: str, **fields: Any) -> Planned:
    """Returns the plan of a shape for a group. Raises PlanError."""
    device, memory, cpus, pods = GROUPS[group]
    roles = [
        {"name": "gpu", "device": "GPU", "deviceMemory": device},
        {
            "name": "cpu",
            "device": "CPU",
            "pods": pods,
            "resources": {"requests": {"cpu": str(cpus)}, "limits": {"memory": memory}},
        },
    ]
    fields["parallelism"] = {"mode": "Pipeline", **fields.get("parallelism", {})}
    spec = parse_spec({"model": {"uri": "pvc://models/m"}, "roles": roles, **fields})
    request = GroupRequest(spec=spec, profile=profile, served_name="m", model_path="/model")
    return make_plan(request, AMX_NODES)


def _plan_row(profile: ModelProfile) -> tuple[str, str, str]:
    """Returns the group, the step, and the devices that can run the model."""
    error = ""
    for group in GROUPS:
        try:
            planned = ask(profile, group)
        except PlanError as refused:
            if refused.reason == "UnsupportedModel":
                who = "one stage only" if profile.architecture in BROKEN_PIPELINE else "GPUs only"
                return "", "", f"{who}: {refused.message.splitlines()[0].split(': ', 1)[1]}"
            error = refused.message
            continue
        steps = [
            forecast(planned.plan, planned.sizes, planned.rates, StepLoad(requests=requests, context=1024))
            for requests in (1, 64)
        ]
        warnings = [note for note in planned.notes if "slower" in note]
        who = "GPU and CPU ranks" + (", GPU first" if profile.encoder else "")
        shown = ", ".join(f"{step.step_s * 1e3:.0f}" for step in steps) + " ms"
        return group, shown, who + (f"; {warnings[0]}" if warnings else "")
    return "", "", f"neither: {error}"


def _row(name: str, profile: ModelProfile) -> str:
    """Returns a model's row: layers, size, KV cache, difference from vLLM, and its smallest group."""
    answer = recorded("cpu")[name]
    kinds = Counter(_LETTERS[kind.attention] for kind in profile.layers)
    layers = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    if profile.experts:
        layers += f"; {profile.experts} experts"
    off = "vLLM refuses it on CPUs" if "refused" in answer else f"{compare(profile, answer).worst()[1]:.2%}"
    if "internvl" in str(answer.get("refused", "")):
        off = "needs the repository's own code"
    group, step, who = _plan_row(profile)
    weights = f"{(profile.total_bytes + profile.encoder_bytes) / 2**30:.1f} GiB"
    scheme = "" if profile.scheme.bits == 16 else f", {profile.scheme}"
    cells = (name, layers, weights + scheme, _kv(profile), off, group or "-", step or "-", who)
    return "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |"


def _kv(profile: ModelProfile) -> str:
    sizes = Sizes.for_settings(
        profile, settings(profile, min(8192, profile.max_position_embeddings)), 1, batches=2
    )
    size = sizes.kv.block_bytes(0, profile.num_layers) * sizes.kv.sequence_blocks
    return f"{size / 2**30:.2f} GiB"


_QUESTIONS: Final[tuple[tuple[str, str, str, dict[str, Any]], ...]] = (
    ("A 70B model in bf16 for one small GPU and one CPU pod", "Llama-3.1-70B-Instruct", "A", {}),
    ("DeepSeek-V3.2 with CPU ranks", "DeepSeek-V3.2", "B", {}),
    ("Gemma-3 with images", "gemma-3-27b-it", "B", {}),
    ("Quantization at load", "Llama-3.1-8B-Instruct", "A", {"engine": {"args": ["--quantization", "fp8"]}}),
    ("Latent attention in float16", "DeepSeek-V3", "B", {"engine": {"dtype": "float16"}}),
    (
        "Latents kept in FP8",
        "DeepSeek-V2-Lite-Chat",
        "A",
        {"engine": {"args": ["--kv-cache-dtype", "fp8"]}},
    ),
    ("Experts without a gate", "Nemotron-3-Nano-30B-A3B", "B", {}),
    ("More context than the model was made for", "phi-4", "B", {"engine": {"maxModelLen": 32768}}),
)


def _answers() -> str:
    parts = ["\n## Eight that do not fit or cannot run, by `heteroinfer plan`\n"]
    for title, name, group, fields in _QUESTIONS:
        try:
            ask(recorded_profiles()[name], group, **fields)
        except PlanError as error:
            output = "\n".join(f"error: {line}" for line in error.message.splitlines())
            parts.append(f"**{title}** ({name}, group {group}):\n```\n{output}\n```\n")
        else:
            raise AssertionError(f"{title}: got a plan, expected a refusal")
    return "\n".join(parts)


_FITS: Final[tuple[tuple[str, str, str, dict[str, Any]], ...]] = (
    ("A model that one GPU holds", "Llama-3.1-8B-Instruct", "A", {}),
    ("A dense model, two thirds of it on CPUs", "Qwen3-32B", "A", {}),
    ("70B in 4 bits: KV cache for one longest sequence", "Llama-3.3-70B-Instruct-AWQ", "A", {}),
    ("A model in NVFP4", "Llama-3.3-70B-Instruct-NVFP4", "A", {}),
    ("Experts in MXFP4 and windows", "gpt-oss-120b", "A", {}),
    ("Experts in bf16 on two CPU pods", "Qwen3-235B-A22B", "B", {"engine": {"maxModelLen": 32768}}),
    ("Latent attention, FP8 in blocks", "DeepSeek-V3", "B", {}),
    ("Latent attention, int4 in groups of 32", "Kimi-K2-Thinking", "B", {}),
    ("Experts in FP8 with sigmoid routing", "MiniMax-M2", "B", {}),
    ("Linear attention", "Qwen3-Next-80B-A3B-Instruct", "B", {}),
    ("States, attention and MLPs in layers of their own", "Nemotron-H-8B-Base-8K", "A", {}),
    (
        "Text alone of a model with images, of its whole length",
        "gemma-3-27b-it",
        "A",
        {"engine": {"args": ["--language-model-only"], "maxModelLen": 131072}},
    ),
    ("An encoder, on the GPU", "Mistral-Small-3.2-24B-Instruct", "A", {}),
)


def _accounts() -> str:
    parts = ["\n## Thirteen that fit, by `heteroinfer plan --explain --choices`\n"]
    for title, name, group, fields in _FITS:
        shown = ShownParts(explain=True, choices=True)
        output = describe_plan(ask(recorded_profiles()[name], group, **fields), "m", shown)
        parts.append(f"**{title}** ({name}, group {group}):\n```\n{output}```\n")
    return "\n".join(parts)


_SERVED: Final = """
## Served as tiny models

`make models` plans these models from their files for two CPU pods, on nodes like the machine that it runs on,
and compares their greedy tokens with those of stock vLLM in one process. `make test` also runs models with a
star. If the machine lacks a feature that it needs, its plan must be rejected with the words in the table.
Test runs: [testing.md](../contributor/testing.md#models-on-two-cpu-pods).

| model | attention | weights | dtype | two CPU pods |
|---|---|---|---|---|
"""


def _served_row(case: Case) -> str:
    attention = ", ".join(sorted(_LETTERS[kind] for kind in case.kinds))
    weights = "plain" if case.scheme is SchemeName.NONE else str(case.scheme)
    served = "stock vLLM's tokens"
    if case.refused:
        served = f"{served} with {case.needs}; refused elsewhere" if case.needs else "refused"
        served = f"{served}: …{case.refused}…"
    name = f"{case.name}{' *' if case.always else ''}"
    return f"| {name} | {attention} | {weights} | {case.dtype} | {served} |"


def build_page() -> str:
    """Returns the page."""
    rows = "\n".join(_row(shape.name, recorded_profiles()[shape.name]) for shape in SHAPES)
    served = "\n".join(map(_served_row, (case for case in CASES.values() if case not in FEED_FORWARD)))
    return f"{_HEAD.read_text()}{rows}\n{_SERVED}{served}\n{_answers()}{_accounts()}"


def write_or_check(page: Path, text: str) -> int:
    """Writes a generated page, or compares it with `--check`. Returns the exit code."""
    if "--check" in sys.argv:
        return int(page.read_text() != text)
    page.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(write_or_check(PAGE, build_page()))
