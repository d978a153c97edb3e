"""CPU features of nodes, from labels and calibrations. Pure."""

from collections.abc import Mapping
from typing import Final

from heteroinfer_contract.calibration import Calibration
from heteroinfer_operator.nodes.node_view import NodeView

AMX: Final = "AMX"
"""CPU feature AMX: tiles and bf16. A CPU with AMX also has AVX-512."""
AVX512: Final = "AVX-512"
"""CPU feature AVX-512: its foundation (AVX512F)."""
CPUID_LABEL: Final = "feature.node.kubernetes.io/cpu-cpuid."
"""Prefix of the labels that node feature discovery sets for CPUID names."""
CPUID_OF: Final[Mapping[str, tuple[str, ...]]] = {AMX: ("AMXTILE", "AMXBF16"), AVX512: ("AVX512F",)}
"""CPUID names that a CPU needs for a feature, the most specific first."""


def measured_features(calibration: Calibration) -> frozenset[str]:
    """Returns the CPU features in a calibration."""
    found = {AMX} if calibration.has_amx else set()
    return frozenset(found | ({AVX512} if calibration.has_avx512 else set()))


def labelled_features(node: NodeView) -> frozenset[str] | None:
    """Returns the CPU features in a node's labels; None without labels of node feature discovery."""
    if not any(label.startswith(CPUID_LABEL) for label in node.labels):
        return None
    return frozenset(
        feature
        for feature, needed in CPUID_OF.items()
        if all(node.labels.get(f"{CPUID_LABEL}{name}") == "true" for name in needed)
    )
