"""Tests experts with coded (quantized) weights against float64 on each instruction set."""

import random
from typing import Any

import pytest

from tests.integration.kernels.instructions import CODED_SETS
from tests.integration.kernels.probe_answers import Asking
from tests.integration.kernels.test_coded import FORMATS

pytestmark = [pytest.mark.unhurried, pytest.mark.timeout(1200)]

PROBE = "tests.integration.kernels.coded_experts_probe"
PROBE_SETS = CODED_SETS
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "gpt-oss", "limited", "limited after", "relu2")


def draw_cases(name: str, path: str) -> list[dict[str, Any]]:
    """Returns cases with each activation, and random sizes, routing and settings."""
    draw = random.Random(f"{name} {path}")
    cases = []
    for activation in ACTIVATIONS:
        experts = draw.choice((1, 2, 5, 8))
        case = {
            "format": name,
            "path": path,
            "dtype": draw.choice(("bf16", "bf16", "float16", "float32")),
            "activation": activation,
            "rows": draw.choice((1, 2, 7, 33, 150)),
            "hidden": draw.choice((32, 96, 288)),
            "inner": draw.choice((32, 64, 160)),
            "experts": experts,
            "topk": draw.randint(1, min(experts, 3)),
            "threads": draw.choice((1, 2, 3)),
            "streams": draw.choice((-1, 1, 2)),
            "bias": draw.random() < 0.5,
        }
        cases.append(case)
    return cases


@pytest.mark.parametrize("path", CODED_SETS)
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_and_activation_matches_the_reference(name: str, path: str, on_path: Asking) -> None:
    cases = draw_cases(name, path)
    answer = on_path("products", cases=cases)
    wrong = [(error, case) for error, case in zip(answer["errors"], cases, strict=True) if not error <= 1.0]
    assert not wrong, wrong
