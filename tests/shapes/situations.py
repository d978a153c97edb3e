"""Writes docs/user/models-of-2026.md: the plan or the refusal of each model of 2026 in four situations.

The second command exits 1 if the page is not current:

    python -m tests.shapes.situations
    python -m tests.shapes.situations --check
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from heteroinfer_contract.model_profile import ModelProfile
from heteroinfer_operator.api import parse_spec
from heteroinfer_operator.errors import PlanError
from heteroinfer_operator.nodes.cpu_features import AMX, AVX512
from heteroinfer_operator.planning import GroupRequest, Inventory, Planned, make_plan
from heteroinfer_operator.planning.first_token import build_feed_forward_wait
from heteroinfer_operator.planning.prediction import StepLoad, forecast
from tests.shapes.page import write_or_check
from tests.shapes.profiles import recorded_profiles

PAGE: Final = Path(__file__).parents[2] / "docs" / "user" / "models-of-2026.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """A group and its nodes. `features` are the features of the nodes' CPUs."""

    title: str
    spec: dict[str, Any]
    features: frozenset[str]


def _feed_forward(device: str, host: str, ranks: dict[str, Any]) -> dict[str, Any]:
    resources = {"requests": {"cpu": "8"}, "limits": {"memory": host}}
    gpu = {"name": "gpu", "device": "GPU", "deviceMemory": device, "resources": resources}
    return {"parallelism": {"mode": "FeedForward"}, "roles": [{**gpu, "feedForward": ranks}]}


_CPUS: Final = {
    "name": "cpu",
    "device": "CPU",
    "pods": 2,
    "resources": {"requests": {"cpu": "64"}, "limits": {"memory": "512Gi"}},
}
_PIPELINE: Final = {"parallelism": {"mode": "Pipeline"}}
_AMX: Final = frozenset({AMX, AVX512})
SITUATIONS: Final = (
    Situation(
        title="feed-forward, 24 GiB and 256 GiB",
        spec=_feed_forward("24Gi", "32Gi", {"ranks": 1, "cpu": "56", "memory": "224Gi"}),
        features=_AMX,
    ),
    Situation(
        title="feed-forward, 80 GiB and 1 TiB",
        spec=_feed_forward("80Gi", "64Gi", {"ranks": 2, "cpu": "28", "memory": "480Gi"}),
        features=_AMX,
    ),
    Situation(
        title="pipeline",
        spec={"roles": [{"name": "gpu", "device": "GPU", "deviceMemory": "80Gi"}, _CPUS], **_PIPELINE},
        features=_AMX,
    ),
    Situation(
        title="CPUs with AVX-512, without AMX",
        spec={"roles": [_CPUS], **_PIPELINE},
        features=frozenset({AVX512}),
    ),
)
_HEAD: Final = Path(__file__).parent / "situations.md"


def ask(profile: ModelProfile, situation: Situation) -> Planned:
    """Returns the plan of a shape in a situation. Raises PlanError."""
    spec = parse_spec({"model": {"uri": "pvc://models/m"}, **situation.spec})
    request = GroupRequest(spec=spec, profile=profile, served_name="m", model_path="/model")
    features = {role.name: situation.features for role in spec.roles}
    return make_plan(request, Inventory(cpu_features=features))


def _answer(profile: ModelProfile, situation: Situation) -> tuple[str, list[str]]:
    """Returns the cell of the first table, and the lines of the section."""
    try:
        planned = ask(profile, situation)
    except PlanError as error:
        return "memory" if error.reason == "InsufficientMemory" else "no", error.message.splitlines()
    wait = build_feed_forward_wait(planned.plan, planned.sizes, planned.rates, planned.remote)
    step = forecast(planned.plan, planned.sizes, planned.rates, StepLoad(context=1024), wait)
    return f"{step.step_s * 1e3:.0f} ms", [_parts(planned)]


def _parts(planned: Planned) -> str:
    """Describes the parts of a plan's ranks."""
    parts = []
    for rank in planned.plan.ranks:
        own = f"{rank.weight_bytes / 2**30:.1f} GiB"
        if rank.feed_forward is None:
            count = rank.end_layer - rank.first_layer
            parts.append(f"{rank.device} rank with {_layers(count)} ({own})")
        else:
            kind = "experts" if planned.request.profile.experts else "MLPs"
            parts.append(f"feed-forward rank with {kind} of {_layers(len(rank.feed_forward.layers))} ({own})")
    return ", ".join(parts)


def _layers(count: int) -> str:
    return f"{count} layer{'' if count == 1 else 's'}"


def _section(name: str, profile: ModelProfile, answers: list[tuple[str, list[str]]]) -> str:
    """Returns a model's section. Situations with the same answer share one list."""
    scheme = "" if profile.scheme.bits == 16 else f", {profile.scheme}"
    experts = f", experts in {profile.expert_scheme}" if profile.expert_scheme else ""
    size = f"{(profile.total_bytes + profile.encoder_bytes) / 2**30:.0f} GiB"
    lines = [
        f"## {name}",
        "",
        f"{profile.architecture}, {profile.num_layers} layers, {size}{scheme}{experts}.",
    ]
    by_text: dict[tuple[str, ...], list[str]] = {}
    for situation, (_, text) in zip(SITUATIONS, answers, strict=True):
        by_text.setdefault(tuple(text), []).append(situation.title)
    for output, titles in by_text.items():
        lines += ["", f"**{', '.join(titles)}**", "", *(f"- {line}" for line in output)]
    return "\n".join(lines)


def build_page() -> str:
    """Returns the page."""
    rows = ["| model | weights | " + " | ".join(each.title for each in SITUATIONS) + " |", "|---" * 6 + "|"]
    sections = []
    for name, profile in recorded_profiles("profiles_2026.json").items():
        answers = [_answer(profile, situation) for situation in SITUATIONS]
        size = f"{(profile.total_bytes + profile.encoder_bytes) / 2**30:.0f} GiB"
        rows.append("| " + " | ".join([name, size, *(cell for cell, _ in answers)]) + " |")
        sections.append(_section(name, profile, answers))
    return _HEAD.read_text() + "\n".join(rows) + "\n\n" + "\n\n".join(sections) + "\n"


if __name__ == "__main__":
    sys.exit(write_or_check(PAGE, build_page()))
