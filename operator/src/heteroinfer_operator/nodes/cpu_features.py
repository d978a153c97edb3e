"""CPU features of nodes, from labels and calibrations. Pure."""

from collections.abc import Iterable, Mapping
from typing import Final

from heteroinfer_contract.calibration import Calibration
from heteroinfer_operator.nodes.node_view import NodeView

AMX: Final = "AMX"
"""CPU feature AMX: tiles and bf16. A CPU with AMX also has AVX-512."""
AVX512: Final = "AVX-512"
"""CPU feature AVX-512: its foundation (AVX512F)."""
AVX512_BF16: Final = "AVX-512 BF16"
"""CPU feature AVX-512 with products in bf16 (AVX512_BF16) and permutations of bytes (AVX512VBMI)."""
AVX2: Final = "AVX2"
"""Instructions that every CPU with ranks has."""
CPUID_LABEL: Final = "feature.node.kubernetes.io/cpu-cpuid."
"""Prefix of the labels that node feature discovery sets for CPUID names."""
CPUID_OF: Final[Mapping[str, tuple[str, ...]]] = {
    AMX: ("AMXTILE", "AMXBF16"),
    AVX512_BF16: ("AVX512BF16", "AVX512VBMI"),
    AVX512: ("AVX512F",),
}
"""CPUID names that a CPU must have for a feature, the feature with the fastest kernels first."""


def best_instructions(features: Iterable[str] | None) -> str:
    """Returns the fastest instructions of HeteroInfer's kernels on CPUs with these features.

    Args:
        features: None if they are unknown. Then the result is AVX512_BF16.
    """
    if features is None:
        return AVX512_BF16
    return next((feature for feature in CPUID_OF if feature in features), AVX2)


def measured_features(calibration: Calibration) -> frozenset[str]:
    """Returns the CPU features in a calibration."""
    features: set[str] = set()
    if calibration.has_amx:
        features.add(AMX)
    if "avx512_bf16" in calibration.hardware.instruction_sets:
        features.add(AVX512_BF16)
    if calibration.has_avx512:
        features.add(AVX512)
    return frozenset(features)


def labelled_features(node: NodeView) -> frozenset[str] | None:
    """Returns the CPU features in a node's labels; None if node feature discovery has set no labels."""
    if not any(label.startswith(CPUID_LABEL) for label in node.labels):
        return None
    return frozenset(
        feature
        for feature, needed in CPUID_OF.items()
        if all(node.labels.get(f"{CPUID_LABEL}{name}") == "true" for name in needed)
    )
