"""Operating system and architecture of the nodes that can run the images. Pure."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from heteroinfer_operator.api import PodTemplate

OS_LABEL: Final = "kubernetes.io/os"
"""Label of every node. The kubelet sets and maintains this label and ARCH_LABEL."""
ARCH_LABEL: Final = "kubernetes.io/arch"
IMAGE_PLATFORM: Final[Mapping[str, str]] = MappingProxyType({OS_LABEL: "linux", ARCH_LABEL: "amd64"})
"""Labels of nodes that can run this project's images."""
_LABEL_NOUNS: Final[Mapping[str, str]] = MappingProxyType({OS_LABEL: "system", ARCH_LABEL: "architecture"})


def platform_selector(template: PodTemplate | None) -> dict[str, str]:
    """Returns the platform labels that a role's nodes must have, except labels that the template selects.

    So users with images for another platform can select that platform in the node selector or in the required
    node affinity.
    """
    if template is None:
        return dict(IMAGE_PLATFORM)
    labels_in_template = set(template.node_selector or ())
    nodes = template.affinity.node_affinity if template.affinity else None
    required = nodes.required_during_scheduling_ignored_during_execution if nodes else None
    for term in required.node_selector_terms if required else ():
        labels_in_template |= {expression.key for expression in term.match_expressions or ()}
    return {label: value for label, value in IMAGE_PLATFORM.items() if label not in labels_in_template}


def describe_other_platform(selector: Mapping[str, Any], labels: Mapping[str, str]) -> str:
    """Describes how a node's platform differs from the platform that a selector requires, or ""."""
    for label, noun in _LABEL_NOUNS.items():
        node_value, required_value = labels.get(label), selector.get(label)
        if required_value is not None and node_value is not None and node_value != required_value:
            return f"of {noun} {node_value}, and the pod needs {required_value}"
    return ""
