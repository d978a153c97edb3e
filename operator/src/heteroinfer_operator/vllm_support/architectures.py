"""Properties of vLLM's model classes that config.json does not contain. Pure; data.

`tests.shapes` compares the resulting sizes with vLLM's classes.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final


def _names(text: str) -> frozenset[str]:
    """Returns the set of the names in a text that separates them by white space."""
    return frozenset(text.split())


TABLES_ON_EVERY_STAGE: Final = _names(
    """
    BloomForCausalLM DbrxForCausalLM FalconForCausalLM GPT2LMHeadModel GPTJForCausalLM Gemma4ForCausalLM
    Gemma4ForConditionalGeneration Gemma4UnifiedForConditionalGeneration GptOssForCausalLM
    GraniteMoeForCausalLM GraniteMoeHybridForCausalLM GraniteMoeSharedForCausalLM HYV3ForCausalLM
    IQuestLoopCoderForCausalLM JambaForCausalLM K2HorizonForCausalLM Mamba2ForCausalLM MambaForCausalLM
    MiniCPMForCausalLM MixtralForCausalLM NemotronHForCausalLM OPTForCausalLM OlmoHybridForCausalLM
    OlmoeForCausalLM OrionForCausalLM PhiMoEForCausalLM Plamo3ForCausalLM Qwen2MoeForCausalLM
    Qwen3MoeForCausalLM Qwen3NextForCausalLM Rnj1ForCausalLM StablelmForCausalLM Zamba2ForCausalLM
    """
)
"""Classes that create embedding and head on every stage (vllm/model_executor/models@v0.32.0)."""
EXPERT_ACTIVATIONS: Final[Mapping[str, str]] = MappingProxyType(
    {
        name: activation
        for activation, names in {
            "gelu": "Moondream3ForCausalLM",
            "gelu_tanh": """
        Gemma4ForCausalLM Gemma4ForConditionalGeneration Gemma4UnifiedForConditionalGeneration
    """,
            "relu2_no_mul": """
        NemotronHForCausalLM NemotronHPuzzleForCausalLM NemotronH_Nano_Omni_Reasoning_V3 NemotronH_Nano_VL_V2
        NemotronH_Omni_Reasoning_V3 NemotronH_Super_Omni_Reasoning_V3
    """,
            "situ": "KimiK3ForConditionalGeneration",
            "swigluoai": "GptOssForCausalLM",
            "swigluoai_uninterleave": "MiniMaxM3SparseForCausalLM MiniMaxM3SparseForConditionalGeneration",
        }.items()
        for name in names.split()
    }
)
"""Architecture -> vLLM's name of its experts' activation function (vllm/.../fused_moe/activation.py
::MoEActivation@v0.32.0). Other architectures have `silu`. Activations that end in `_no_mul` have no gate."""
STEP_LIMITS: Final = frozenset({"Step3p5ForCausalLM", "Step3p7ForConditionalGeneration"})
"""Models whose experts limit their values after SiLU (vLLM's swiglustep; vllm/.../models/step3p5.py@v0.32.0).
"""
ZERO_EXPERTS: Final = frozenset({"LongcatFlashForCausalLM", "LongcatFlashNgramForCausalLM"})
"""Models whose router may choose experts that compute nothing. vLLM has this router for GPUs only
(vllm/.../fused_moe/router/zero_expert_router.py@v0.32.0)."""
IMAGES_ATTEND_BOTH_WAYS: Final = _names(
    """
    BagelForConditionalGeneration Gemma3ForConditionalGeneration Gemma4ForConditionalGeneration
    Gemma4UnifiedForConditionalGeneration HfMoondream Molmo2ForConditionalGeneration Moondream3ForCausalLM
    PaliGemmaForConditionalGeneration
    """
)
"""Models whose image tokens attend to each other in both directions, which CPU attention does not support
(vllm/transformers_utils/model_arch_config_convertor.py::is_mm_prefix_lm@v0.32.0). Only some sizes of Gemma-4
are such models."""
BROKEN_PIPELINE: Final = frozenset({"GraniteMoeHybridForCausalLM"})
"""Classes that claim SupportsPP, but fail to load if tensors belong to other stages, and call layers of those
stages (vllm/.../granitemoehybrid.py::GraniteMoeHybridModel.load_weights, .forward@v0.32.0; vLLM's issue
50961)."""
_TWO_SETS: Final = "its layers have two sets of experts"
_ALL_COLUMNS: Final = "its MLPs choose the active columns among all columns, but each rank has only a part"
NO_FEED_FORWARD: Final[Mapping[str, str]] = MappingProxyType(
    {
        "ApertusForCausalLM": "the activation of its MLPs (xIELU) has trained parameters, and feed-forward "
        "ranks support only activations without parameters",
        "DbrxForCausalLM": "vLLM uses a separate class for its experts instead of RoutedExperts",
        "Ernie4_5_VLMoeForConditionalGeneration": _TWO_SETS,
        "Gemma3nForCausalLM": _ALL_COLUMNS,
        "Gemma3nForConditionalGeneration": _ALL_COLUMNS,
        "HrmTextForCausalLM": "it has two stacks of layers, and each stack runs several times in a step",
        "Zamba2ForCausalLM": "several of its layers share an MLP",
    }
)
"""Architecture -> reason why feed-forward ranks cannot compute its layers
(vllm/model_executor/models@v0.32.0)."""
SILENT_LOSSES: Final[Mapping[str, str]] = MappingProxyType(
    {"LagunaForCausalLM": "vLLM silently drops the routers' bias (e_score_correction_bias) at load"}
)
"""Architecture -> reason why vLLM generates other tokens than the model should
(vllm/model_executor/models/laguna.py::LagunaForCausalLM.load_weights@v0.32.0)."""
OWN_CPU_BLOCKS: Final = frozenset({"DeepseekV4ForCausalLM"})
"""Models with fixed KV blocks of 256 tokens on CPUs, and with compressed keys that plans do not count yet
(vllm/platforms/cpu.py::check_and_update_config@v0.32.0)."""
