"""Which classes of models are planned."""

import pytest

from heteroinfer_operator.errors import PlanError
from heteroinfer_operator.vllm_support.served_architectures import check_architecture
from tests.shapes.profiles import recorded_profiles
from tests.unit.planning.planned_models import gpu, plan, profile, spec


@pytest.mark.parametrize(
    ("architecture", "said"),
    [
        ("", "config.json must have the field 'architectures'"),
        ("Qwen3ForSequenceClassification", "embeddings or scores"),
        ("EagleLlamaForCausalLM", "the draft of another model"),
        (
            "MiniMaxM1ForCausalLM",
            r"vLLM no longer serves MiniMaxM1ForCausalLM \(the last version with this class was 0.23.0\)",
        ),
    ],
)
def test_a_class_that_vllm_does_not_serve_is_refused_on_any_device(architecture: str, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        plan(spec(gpu()), profile(architecture=architecture))


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Olmo2ForCausalLM", "BambaForCausalLM"])
def test_classes_of_vllm_and_of_transformers_are_planned(architecture: str) -> None:
    assert check_architecture(profile(architecture=architecture)) == ()


def test_plans_an_unknown_class_with_a_note() -> None:
    (note,) = check_architecture(profile(architecture="OursForCausalLM"))
    assert "neither vLLM nor transformers has the class OursForCausalLM" in note


def test_every_published_shape_is_known() -> None:
    assert [name for name, each in recorded_profiles().items() if check_architecture(each)] == []
