"""CPU features of nodes, from labels and calibrations. Pure."""

from collections.abc import Mapping, Sequence
from typing import Final

from heteroinfer_contract.calibration import Calibration
from heteroinfer_contract.plan import Device
from heteroinfer_operator.api import HeteroInferenceSpec
from heteroinfer_operator.nodes.calibrations import Calibrations
from heteroinfer_operator.nodes.node_view import NodeView
from heteroinfer_operator.nodes.placement import lasting_obstacle
from heteroinfer_operator.nodes.role_demand import role_demand

AMX: Final = "AMX"
"""CPU feature AMX: tiles and bf16. A CPU with AMX also has AVX-512."""
AVX512: Final = "AVX-512"
"""CPU feature AVX-512: its foundation (AVX512F)."""
CPUID_LABEL: Final = "feature.node.kubernetes.io/cpu-cpuid."
"""Prefix of the labels that node feature discovery sets for CPUID names."""
CPUID_OF: Final[Mapping[str, tuple[str, ...]]] = {AMX: ("AMXTILE", "AMXBF16"), AVX512: ("AVX512F",)}
"""CPUID names that a CPU needs for a feature, the most specific first."""


def roles_without_amx(
    spec: HeteroInferenceSpec, nodes: Sequence[NodeView], calibrations: Calibrations
) -> frozenset[str]:
    """Returns the roles whose pods cannot run on any node with AMX, by labels or calibrations.

    All nodes count that the role's pods may use, not only the planned nodes, because the scheduler decides.
    Nodes that are cordoned or not Ready count too, because a plan lasts longer than that.
    """
    machine = calibrations.this_machine
    if machine is not None:
        return frozenset() if machine.has_amx else frozenset(role.name for role in spec.roles)
    others = [node for node in nodes if not _lacks_amx(node, calibrations)]
    found = set()
    for role in spec.roles:
        demand = role_demand(spec, role, Device.CPU)
        nowhere_else = all(lasting_obstacle(demand, node) for node in others)
        if nowhere_else and any(not lasting_obstacle(demand, node) for node in nodes):
            found.add(role.name)
    return frozenset(found)


def _lacks_amx(node: NodeView, calibrations: Calibrations) -> bool:
    features = labelled_features(node)
    if features is not None:
        return AMX not in features
    measured = calibrations.of_nodes([node.labels])
    return bool(measured) and not any(each.has_amx for each in measured)


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
