"""Experts by the kernels against exact ones, on every instruction set; vLLM's layers with them."""

import itertools
import math
import random
from typing import Any

import pytest

from tests.integration.kernels.instructions import SETS, of_this_cpu
from tests.integration.kernels.probe_answers import Asking, ask_forked

pytestmark = [pytest.mark.unhurried, pytest.mark.timeout(1200)]

PROBE = "tests.integration.kernels.experts_probe"
PROBE_SETS = SETS
LAYERS = "tests.integration.kernels.layers_probe"
PATHS = tuple(SETS)
WEIGHTS = ("bf16", "fp8")


def draw_cases(weights: str, path: str | None, count: int, seed: int) -> list[dict[str, Any]]:
    """Returns cases of all row counts, with sizes, routing, threads and settings drawn at random."""
    draw = random.Random(seed)
    cases = []
    for rows in itertools.islice(itertools.cycle([1, 1, 2, 3, 4, 7, 13, 16, 17, 33, 64, 65, 130]), count):
        experts = draw.choice((1, 2, 5, 8, 40))
        case = {
            "weights": weights,
            "path": path,
            "rows": rows,
            "hidden": draw.choice((32, 64, 96, 288)),
            "inner": draw.choice((32, 64, 160)),  # of FP8 with a rest beside a block of 128
            "experts": experts,
            "topk": draw.randint(1, min(experts, 6)),
            "lost": draw.random() < 0.3,
            "threads": draw.choice((1, 2, 3, 5)),
            "streams": draw.choice((-1, 1, 2, 4)),
            "prefetch": draw.choice((-1, 0, 1, 2, 5)),
            "stride": draw.choice((0, 0, 3)),
        }
        cases.append(case)
    return cases


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("weights", WEIGHTS)
def test_every_path_matches_the_reference(weights: str, path: str, on_path: Asking) -> None:
    cases = draw_cases(weights, path, 65, seed=PATHS.index(path))
    answer = on_path("products", cases=cases)
    wrong = [(error, case) for error, case in zip(answer["errors"], cases, strict=True) if not error <= 1.0]
    assert not wrong, wrong


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("weights", WEIGHTS)
def test_the_number_of_threads_changes_no_bit(weights: str, path: str, on_path: Asking) -> None:
    """Each block is computed by a single thread, so the order of its sums is always the same."""
    for seed, case in enumerate(draw_cases(weights, path, 6, seed=9)):
        cases = [{**case, "threads": threads, "seed": seed} for threads in (1, 2, 5)]
        assert len(set(on_path("bits", cases=cases)["digests"])) == 1, case


@pytest.mark.parametrize("weights", WEIGHTS)
def test_weights_are_in_memory_that_other_processes_can_map(weights: str, kernels: Asking) -> None:
    """The outputs are equal to the last bit.

    Another process can read the packed bytes. No mapping remains.
    """
    case = {
        "weights": weights,
        "rows": 5,
        "hidden": 288,
        "inner": 160,
        "experts": 40,
        "topk": 6,
        "threads": 2,
    }
    said = kernels("in_shared_memory", case=case)
    assert said["private"] == said["shared"]
    assert said["packed"] == said["seen by another"]
    assert (said["held"], said["aligned"]) == ([True, False], 0)
    assert (said["mapped"], said["mapped when dropped"]) == (1, 0)
    assert not said["held when dropped"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("rows", [1, 3, 20])
def test_every_fp8_number_is_decoded_exactly(rows: int, path: str, on_path: Asking) -> None:
    """Also denormals and NaN, both in registers and for AMX tiles."""
    answer = on_path("fp8_numbers", path=path, rows=rows)
    assert len(answer["numbers"]) == 256
    assert sum(math.isnan(number) for number in answer["numbers"]) == 2
    for got in answer["got"]:
        # A sum starts with +0, so that none is -0.
        assert list(map(repr, got)) == [repr(number + 0.0) for number in answer["numbers"]]


@pytest.mark.parametrize("path", PATHS)
def test_gates_far_from_zero_match_the_reference(path: str, on_path: Asking) -> None:
    answer = on_path("far_gates", path=path, gates=[-20.0, -86.0, -88.0, -200.0, -1e30, -3e38, 88.0, 1e38])
    assert answer["got"] == pytest.approx(answer["exact"], rel=2.0**-8, abs=1e-36)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("weights", WEIGHTS)
def test_a_row_of_nan_does_not_affect_other_rows(weights: str, path: str, on_path: Asking) -> None:
    case: dict[str, Any] = {
        "weights": weights,
        "path": path,
        "rows": 20,
        "hidden": 64,
        "inner": 32,
        "experts": 3,
        "topk": 2,
    }
    case["threads"] = 2
    assert on_path("not_numbers", case=case, row=7) == {"rows": [7], "same": True}


@pytest.mark.parametrize("weights", WEIGHTS)
def test_arguments_of_wrong_type_or_size_are_refused(weights: str, kernels: Asking) -> None:
    said = kernels("refused", weights=weights)
    of_scales = {"scales", "shape of scales", "dtype of scales"}
    assert set(said) == {"y", "x", "w13", "w2", "weights", "ids", "odd", "dtype"} | of_scales
    assert "torch.int64" in said["ids"]
    assert "n a multiple of 32" in said["odd"]


def test_layers_match_vllms_layers(usable: list[str]) -> None:
    """Our kernels compute bf16 and FP8 experts, and vLLM's code computes the others.

    All results are right.
    """
    answer = ask_forked(LAYERS, "experts", *usable)
    kept = {"float32": False, "gelu": False, "bias": False}
    assert answer["ours"] == {"bf16": True, "padded": True, **kept, "fp8": True}
    assert all(gap < 2.0**-6 for gap in answer["gaps"].values()), answer
    assert set(answer["stored"].values()) == {1.0}, "one copy, in the format of the checkpoint"
    assert answer["fp8"] == ["CPUExpertsFp8", *["torch.float8_e4m3fn"] * 2]
    paths = ", ".join(of_this_cpu() or SETS)
    assert answer["said"] == [
        f"CPU experts: HeteroInfer's {name} kernels ({paths})" for name in ("bf16", "FP8")
    ]
    assert "limited to 7.0" in answer["limited"]
    assert answer["reverted"]
