"""What vLLM's model classes do that no config.json says. Pure; data.

`tests.shapes` compares what follows from it with vLLM's own classes.
"""

from typing import Final

TABLES_ON_EVERY_STAGE: Final = frozenset(
    {
        "BloomForCausalLM",
        "DbrxForCausalLM",
        "FalconForCausalLM",
        "GPT2LMHeadModel",
        "GPTJForCausalLM",
        "GptOssForCausalLM",
        "GraniteMoeForCausalLM",
        "GraniteMoeHybridForCausalLM",
        "GraniteMoeSharedForCausalLM",
        "HYV3ForCausalLM",
        "IQuestLoopCoderForCausalLM",
        "JambaForCausalLM",
        "K2HorizonForCausalLM",
        "Mamba2ForCausalLM",
        "MambaForCausalLM",
        "MiniCPMForCausalLM",
        "MixtralForCausalLM",
        "NemotronHForCausalLM",
        "OPTForCausalLM",
        "OlmoHybridForCausalLM",
        "OlmoeForCausalLM",
        "OrionForCausalLM",
        "PhiMoEForCausalLM",
        "Plamo3ForCausalLM",
        "Qwen2MoeForCausalLM",
        "Qwen3MoeForCausalLM",
        "Qwen3NextForCausalLM",
        "Rnj1ForCausalLM",
        "StablelmForCausalLM",
        "Zamba2ForCausalLM",
    }
)
"""Whose classes make embedding and head without asking for the stage (vllm/model_executor/models@v0.32.0)."""
UNGATED_EXPERTS: Final = frozenset({"NemotronHForCausalLM"})
"""Whose experts have one matrix before the activation, which vLLM's CPU kernels do not take
(vllm/.../fused_moe/experts/cpu_moe.py::_supports_no_act_and_mul@v0.32.0)."""
IMAGES_ATTEND_BOTH_WAYS: Final = frozenset({"Gemma3ForConditionalGeneration"})
"""Whose image tokens attend to each other in both directions, which CPU attention does not do."""
