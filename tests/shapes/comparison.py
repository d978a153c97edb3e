"""Compares our sizes of each shape with vLLM's own sizes, which `tests.shapes.oracle` recorded."""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from heteroinfer_contract.model_profile import ModelProfile
from heteroinfer_contract.plan import Device, EngineSettings
from heteroinfer_operator.api import parse_spec
from heteroinfer_operator.planning.engine_settings import choose_engine_settings
from heteroinfer_operator.planning.memory import Sizes
from tests.shapes.oracle import BATCHED_TOKENS, stage_layers

RECORDED = Path(__file__).parent / "recorded"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Our sizes and vLLM's of one shape in two stages.

    Attributes:
        ours: sizes by name.
        theirs: vLLM's sizes by the same names.
    """

    ours: dict[str, int]
    theirs: dict[str, int]

    def worst(self) -> tuple[str, float]:
        """Returns the name of the largest difference, and its share of vLLM's size."""
        off = {name: abs(self.ours[name] - theirs) / max(theirs, 1) for name, theirs in self.theirs.items()}
        name = max(off, key=lambda name: off[name])
        return name, off[name]


@cache
def recorded(device: str) -> dict[str, Any]:
    """Returns vLLM's recorded answers for a device type: `cpu` or `cuda`."""
    answers: dict[str, Any] = json.loads((RECORDED / f"{device}.json").read_text())
    return answers


def settings(profile: ModelProfile, length: int) -> EngineSettings:
    """Returns the engine settings of a group with CPU ranks, as the planner makes them."""
    spec = parse_spec(
        {
            "model": {"uri": "pvc://models/m"},
            "engine": {"maxModelLen": length},
            "roles": [{"name": "cpu", "device": "CPU", "pods": 2}],
        }
    )
    engine = choose_engine_settings(
        spec, profile, has_cpu=True, has_mixed_stage=False, tensor=1, served_name="m", model_path="/model"
    )
    assert engine.max_num_batched_tokens == BATCHED_TOKENS
    return engine


BATCHES = {"cpu": 2, "cuda": 3}
"""Concurrent batches of vLLM's two stages. On CUDA, vLLM schedules one batch ahead, but our pipelines do not
(vllm/config/vllm.py::max_concurrent_batches@v0.32.0)."""


def compare(profile: ModelProfile, answer: dict[str, Any], device: str = "cpu") -> Comparison:
    """Returns our sizes beside vLLM's recorded sizes on a device type."""
    first = stage_layers(profile.num_layers)[0]
    bounds = ((0, first), (first, profile.num_layers))
    ours: dict[str, int] = {}
    theirs: dict[str, int] = {}
    for length, pool in answer["pools"].items():
        sizes = Sizes.for_settings(profile, settings(profile, int(length)), 1, batches=BATCHES[device])
        for stage, (begin, end) in enumerate(bounds):
            name = f"KV bytes of {length} tokens in stage {stage}"
            ours[name] = sizes.kv.block_bytes(begin, end) * sizes.kv.sequence_blocks
            theirs[name] = pool["bytes"][stage] * pool["sequence"]
    sizes = Sizes.for_settings(
        profile, settings(profile, min(8192, profile.max_position_embeddings)), 1, batches=BATCHES[device]
    )
    for stage, (begin, end) in enumerate(bounds):
        name = f"weights of stage {stage}"
        tables = sizes.table_bytes(stage, 2, Device.GPU)
        ours[name] = sizes.layer_weight_bytes(begin, end) + tables
        theirs[name] = answer["weights"][stage] + answer["encoder"][stage]
    return Comparison(ours=ours, theirs=theirs)
