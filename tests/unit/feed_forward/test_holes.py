"""Which weights a checkpoint lacks."""

from vllm_heteroinfer.feed_forward.holes import ExpertNumbers


def test_experts_without_a_tensor_that_others_have_are_named() -> None:
    numbers = ExpertNumbers()
    for name in ("0.w1.weight", "0.w2.weight", "2.w1.weight", "2.w2.weight", "1.w2.weight", "3.w1.weight"):
        numbers.add(f"layers.4.mlp.experts.{name}")
    # Of one tensor for all, and scales of activations, of which not each expert needs one.
    numbers.add("layers.5.mlp.experts.down_proj")
    numbers.add("layers.4.mlp.experts.0.w1.input_scale")
    assert numbers.lacking({4: 3, 5: 3}) == ["layers.4.mlp.experts.1.w1.weight"]
    assert numbers.lacking({4: 4, 5: 4}) == [
        f"layers.4.mlp.experts.{name}.weight" for name in ("1.w1", "3.w2")
    ]
