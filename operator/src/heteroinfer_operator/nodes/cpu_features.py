"""What the CPUs of nodes can compute, as labels and calibrations say. Pure."""

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
"""Feature of a CPU: tiles and bf16; such a CPU has AVX512 too."""
AVX512: Final = "AVX-512"
"""Feature of a CPU: its foundation (AVX512F)."""
CPUID_LABEL: Final = "feature.node.kubernetes.io/cpu-cpuid."
"""Of nodes, by node feature discovery, before a feature's name."""
CPUID_OF: Final[Mapping[str, tuple[str, ...]]] = {AMX: ("AMXTILE", "AMXBF16"), AVX512: ("AVX512F",)}
"""Names of what makes a feature, the one first that tells most."""


def roles_without_amx(
    spec: HeteroInferenceSpec, nodes: Sequence[NodeView], calibrations: Calibrations
) -> frozenset[str]:
    """Returns the roles whose pods can be on no node with AMX, as far as labels or calibrations say.

    All nodes count where a role's pods may be, not those alone that were found for them: the scheduler
    decides. So do those that are cordoned or not Ready: a plan outlasts that.
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
    """Returns the CPU features that a calibration found."""
    found = {AMX} if calibration.has_amx else set()
    return frozenset(found | ({AVX512} if calibration.has_avx512 else set()))


def labelled_features(node: NodeView) -> frozenset[str] | None:
    """Returns the CPU features in a node's labels by node-feature-discovery, or None without such labels."""
    if not any(label.startswith(CPUID_LABEL) for label in node.labels):
        return None
    return frozenset(
        feature
        for feature, needed in CPUID_OF.items()
        if all(node.labels.get(f"{CPUID_LABEL}{name}") == "true" for name in needed)
    )
