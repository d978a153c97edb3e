"""Checks for experts on a GPU that need no GPU; tests/gpu has the others."""

from tests.integration.kernels.probe_answers import ask_forked


def test_choices_layouts_and_memory() -> None:
    answer = ask_forked("tests.integration.feed_forward.gpu_experts_probe")
    assert not any(answer["choices"].values()), answer["choices"]
    assert not any(answer["misplaced"].values()), answer["misplaced"]
    memory = answer["memory"]
    assert memory["values"] == [7, 8, 9]
    assert memory["gone"]
    assert "must be the weights of feed-forward rank 1" in memory["refused"]
