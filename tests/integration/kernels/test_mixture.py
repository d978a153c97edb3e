"""Tests the patch `cpu_mixture`, and our kernels' choice of experts, in vLLM's own layers."""

import pytest

from tests.integration.kernels.probe_answers import ask_forked

pytestmark = [pytest.mark.unhurried, pytest.mark.timeout(1200)]

PROBE = "tests.integration.kernels.layers_probe"
ROUNDING = 2e-6
"""Largest error of a score in float32, whose exponential has an error of 2e-7."""


def test_a_mixture_in_one_call_is_bit_identical_to_separate_calls(usable: list[str]) -> None:
    answer = ask_forked(PROBE, "mixture", *usable)
    assert answer["applied"]
    assert answer["reverted"]
    assert len(answer["taken"]) == 34
    assert set(map(tuple, answer["taken"].values())) == {(4, True)}, answer["taken"]
    assert len(answer["left"]) == 8
    assert set(map(tuple, answer["left"].values())) == {(0, True)}, "vLLM's own code computes these kinds"
    assert answer["followed"] == [True] * 5, "the outputs use the replaced weights"


def test_one_call_chooses_the_same_experts_as_torch(usable: list[str]) -> None:
    answer = ask_forked(PROBE, "choice", *usable)
    assert len(answer["gaps"]) == 352
    assert all(gap < ROUNDING for gap in answer["gaps"].values()), answer["gaps"]
    assert not answer["others"]
    assert answer["finite"] == [True, False, True, False], "NaN stays in its row"
    assert answer["differ"]
    assert answer["ties"] == [0, 1, 2], "of equal scores, the first is chosen"
    assert answer["none"] == [[0.0, 0.0]] * 4 + [[1.0, 0.0]] * 4, "on GPUs too"
    assert len(answer["refused"]) == 16
    assert all(" (got " in text for text in answer["refused"]), answer["refused"]
