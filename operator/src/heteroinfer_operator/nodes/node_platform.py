"""Operating system and architecture: which nodes run the images. Pure."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from heteroinfer_operator.api import PodTemplate

OS_LABEL: Final = "kubernetes.io/os"
"""Of every node: its kubelet sets it, and that of the architecture, and keeps both right."""
ARCH_LABEL: Final = "kubernetes.io/arch"
IMAGE_PLATFORM: Final[Mapping[str, str]] = MappingProxyType({OS_LABEL: "linux", ARCH_LABEL: "amd64"})
"""Labels of the nodes that run the images of this project."""
_WORDS: Final[Mapping[str, str]] = MappingProxyType({OS_LABEL: "system", ARCH_LABEL: "architecture"})


def platform_selector(template: PodTemplate | None) -> dict[str, str]:
    """Returns the labels that nodes of a role's pods must have, less those that its user decides about.

    A user with images of another platform names it in the node selector, or in the required node affinity.
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
    """Returns in words in what a node's platform differs from a selector's, or ""."""
    for label, word in _WORDS.items():
        have, wanted = labels.get(label), selector.get(label)
        if wanted is not None and have is not None and have != wanted:
            return f"of {word} {have}, and the pod needs {wanted}"
    return ""
