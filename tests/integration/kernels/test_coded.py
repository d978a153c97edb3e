"""Tests products with coded (quantized) weights on each instruction set, and vLLM's quantized layers."""

import itertools
import random
from typing import Any, Final

import pytest

from tests.integration.kernels.instructions import CODED_SETS, of_this_cpu
from tests.integration.kernels.probe_answers import Asking, asking

pytestmark = [pytest.mark.unhurried, pytest.mark.timeout(1200)]

PROBE = "tests.integration.kernels.coded_probe"
PROBE_SETS = CODED_SETS
LAYERS = "tests.integration.kernels.coded_layers_probe"
FORMATS = (
    *("bf16", "float16", "fp8 block", "fp8 channel", "int8 channel", "int8 128", "int4 32", "int4 64"),
    *("int4 128", "int4 channel", "int4 32 zeros", "int4 128 zeros", "mxfp4", "mxfp8", "nvfp4"),
)
ROWS = (1, 1, 2, 3, 4, 5, 7, 12, 13, 30, 64, 65, 300)


def draw_cases(name: str, path: str, count: int, seed: int) -> list[dict[str, Any]]:
    """Returns cases for all numbers of rows, with random sizes, elements, threads and settings."""
    draw = random.Random(f"{name} {path} {seed}")
    return [
        {
            "format": name,
            "path": path,
            "dtype": draw.choice(("bf16", "bf16", "float16", "float32")),
            "rows": rows,
            "columns": draw.choice((1, 31, 32, 33, 96, 256, 1000)),
            "inputs": draw.choice((2, 16, 32, 48, 128, 160, 1024, 2080)),
            "streams": draw.choice((-1, 1, 2, 4)),
            "prefetch": draw.choice((-1, 0, 1, 8)),
            "threads": draw.choice((1, 2, 3)),
            "stride": draw.choice((0, 3)),
            "bias": draw.random() < 0.3,
        }
        for rows in itertools.islice(itertools.cycle(ROWS), count)
    ]


@pytest.mark.parametrize("path", CODED_SETS)
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_matches_the_reference_on_every_path(name: str, path: str, on_path: Asking) -> None:
    cases = draw_cases(name, path, 26, seed=0)
    answer = on_path("products", cases=cases)
    wrong = [(error, case) for error, case in zip(answer["errors"], cases, strict=True) if not error <= 1.0]
    assert not wrong, wrong


@pytest.mark.parametrize("path", CODED_SETS)
@pytest.mark.parametrize("name", ["fp8 block", "int4 128 zeros", "nvfp4"])
def test_the_number_of_threads_changes_no_bit(name: str, path: str, on_path: Asking) -> None:
    """The division of a matrix depends only on its shape."""
    for seed, case in enumerate(draw_cases(name, path, 8, seed=1)):
        cases = [{**case, "threads": threads, "seed": seed} for threads in (1, 2, 5)]
        assert len(set(on_path("bits", cases=cases)["digests"])) == 1, case


@pytest.mark.parametrize("path", CODED_SETS)
def test_nan_and_infinity_spread_as_in_float64(path: str, on_path: Asking) -> None:
    """NaN and infinity reach the outputs that they reach in float64, and no other."""
    for rows in (1, 3, 20):
        output = on_path("not_numbers", path=path, rows=rows)
        assert {kind for kind, same in output.items() if not same} == set()
        assert len(output) >= 6


@pytest.fixture(scope="module")
def layers(usable: list[str]) -> Any:
    """Yields a function that asks about vLLM's layers."""
    with asking(LAYERS, *usable) as ask:
        yield ask


SIXTEEN_BITS: Final = (
    *("fp8 tensor", "fp8 tensor, static inputs", "fp8 tensor of modelopt", "fp8 block"),
    *("awq 32", "awq 64", "awq 128", "gptq 32", "gptq 128", "nvfp4 of modelopt"),
)
"""vLLM refuses activations in float32 for these formats."""


@pytest.mark.parametrize(
    "name",
    [
        *("fp8 tensor", "fp8 tensor, static inputs", "fp8 tensor, compressed", "fp8 tensor of modelopt"),
        *("fp8 channel", "fp8 block", "fp8 block, compressed"),
        *("int8 channel", "int8 tensor, static inputs", "int8 channel, inputs with zero points"),
        *("int8 weights alone", "int8 weights alone, zero points", "int4 channel", "int4 32", "int4 64"),
        *(
            "int4 128",
            "int4 32 zeros",
            "int4 128 zeros",
            "awq 32",
            "awq 64",
            "awq 128",
            "gptq 32",
            "gptq 128",
        ),
        *("mxfp4", "mxfp8", "nvfp4", "nvfp4 of modelopt"),
    ],
)
def test_quantized_layers_match_vllms_layers(name: str, layers: Asking) -> None:
    found = layers("gaps", format=name)
    limits = {"bf16": 2.0**-8, "float16": 2.0**-10, "float32": 2.0**-18}
    assert set(found) == set(limits) - ({"float32"} if name in SIXTEEN_BITS else set())
    for dtype, most in ((dtype, limits[dtype]) for dtype in found):
        assert found[dtype]["gap"] < most, (dtype, found)
        assert found[dtype]["bytes"] <= 1.05
        assert found[dtype]["kernel"].startswith("Coded")
    assert of_this_cpu() or found
