"""Operating system and architecture of the nodes that can run the images. Pure."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from heteroinfer_operator.api import PodTemplate

OS_LABEL: Final = "kubernetes.io/os"
"""Label of every node. The kubelet sets and maintains it and ARCH_LABEL."""
ARCH_LABEL: Final = "kubernetes.io/arch"
IMAGE_PLATFORM: Final[Mapping[str, str]] = MappingProxyType({OS_LABEL: "linux", ARCH_LABEL: "amd64"})
"""Labels of nodes that can run this project's images."""
_WORDS: Final[Mapping[str, str]] = MappingProxyType({OS_LABEL: "system", ARCH_LABEL: "architecture"})


def platform_selector(template: PodTemplate | None) -> dict[str, str]:
    """Returns the platform labels that a role's nodes must have, except labels that the template sets.

    A user with images for another platform names it in the node selector or the required node affinity.
    """
    if template is None:
        return dict(IMAGE_PLATFORM)
    decided = set(template.node_selector or ())
    nodes = template.affinity.node_affinity if template.affinity else None
    required = nodes.required_during_scheduling_ignored_during_execution if nodes else None
    for term in required.node_selector_terms if required else ():
        decided |= {asked.key for asked in term.match_expressions or ()}
    return {label: value for label, value in IMAGE_PLATFORM.items() if label not in decided}


def other_platform(selector: Mapping[str, Any], labels: Mapping[str, str]) -> str:
    """Describes how a node's platform differs from a selector's; "" if it does not."""
    for label, word in _WORDS.items():
        have, wanted = labels.get(label), selector.get(label)
        if wanted is not None and have is not None and have != wanted:
            return f"of {word} {have}, and the pod needs {wanted}"
    return ""
