"""Tests the parts of experts on a GPU that need no GPU. tests/gpu has the other tests."""

from tests.integration.kernels.probe_answers import ask_forked


def test_gpu_experts_choose_like_cpus_and_map_the_offered_memory() -> None:
    answer = ask_forked("tests.integration.feed_forward.gpu_experts_probe")
    assert not any(answer["choices"].values()), answer["choices"]
    assert not any(answer["misplaced"].values()), answer["misplaced"]
    memory = answer["memory"]
    assert memory["values"] == [7, 8, 9]
    assert memory["gone"]
    assert "not the weights of feed-forward rank 1" in memory["refused"]
    offers = answer["offers"]
    assert offers["plain"] == offers["scaled"] == ""
    assert "feed-forward rank 1, layer 3, w13: an expert must have 4096 numbers of float32" in offers["type"]
    assert "block scales of an expert must be (2, 1) (got (1, 1))" in offers["scales"]
    assert "weights must end within" in offers["end"]
    assert "must have an offset and a shape" in offers["no offset"]
    assert all(answer["compiled"].values())
    fallback = answer["fallback"]
    assert fallback["uses ranks only"]
    assert fallback["reported"] == [0]
    assert "CPU ranks compute all experts, also of long batches" in fallback["log"]
    assert "feed-forward rank 1: " in fallback["log"]
    for found in answer["layers"].values():
        assert found["layers"] == [0, 1, 2]
        assert found["kinds"] == [True, True, False]
        assert found["expert_bytes"] == 3 * 64 * 64 * 2
    columns, experts = answer["layers"]["columns"], answer["layers"]["experts"]
    assert columns["spans"] == [[0, 6]]
    assert columns["loads"] == [[0, 2, 2], [2, 2, 2], [4, 1, 2]]
    assert columns["offsets"] == [0, 16384, 16384, 24576, 24576, 40960, 40960, 49152]
    assert experts["spans"] == [[0, 3], [3, 6]]
    assert experts["loads"] == [[0, 2, 1], [2, 1, 1], [3, 2, 1]]
