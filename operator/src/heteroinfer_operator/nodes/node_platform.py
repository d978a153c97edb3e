"""Operating system and architecture of the nodes that can run the images. Pure."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from heteroinfer_operator.nodes.demand import (
    Manifest,
    is_empty_term,
    is_requirement_met,
    replace_node_terms,
    required_node_terms,
)

OS_LABEL: Final = "kubernetes.io/os"
"""Label of every node. The kubelet sets and maintains this label and ARCH_LABEL."""
ARCH_LABEL: Final = "kubernetes.io/arch"
IMAGE_PLATFORM: Final[Mapping[str, str]] = MappingProxyType({OS_LABEL: "linux", ARCH_LABEL: "amd64"})
"""Labels of nodes that can run this project's images."""
_LABEL_NOUNS: Final[Mapping[str, str]] = MappingProxyType({OS_LABEL: "system", ARCH_LABEL: "architecture"})


def select_platform(fields: Manifest) -> dict[str, Any]:
    """Returns the fields of a pod spec with the default platform in the node selector or node affinity.

    Users with images for another platform can select that platform: a default label is left out if the node
    selector has the label. A default label is also left out of each term of the required node affinity that
    selects the label by operator In. Another operator, such as NotIn, does not select a platform for which
    there are images.

    If no term selects the label, the default is in the node selector. If only some terms select the label,
    the default is in the other terms.
    """
    given = fields.get("nodeSelector") or {}
    terms = required_node_terms(fields.get("affinity") or {})
    defaults: dict[str, str] = {}
    defaults_in_terms: dict[str, str] = {}
    for label, value in IMAGE_PLATFORM.items():
        term_selects = [_selects_label(term, label) for term in terms if not is_empty_term(term)]
        if label not in given and not any(term_selects):
            defaults[label] = value
        elif label not in given and not all(term_selects):
            defaults_in_terms[label] = value
    selected = {**fields}
    if defaults or given:
        selected["nodeSelector"] = {**defaults, **given}
    if defaults_in_terms:
        new_terms = [_with_defaults(term, defaults_in_terms) for term in terms]
        selected["affinity"] = replace_node_terms(fields["affinity"], new_terms)
    return selected


def _selects_label(term: Manifest, label: str) -> bool:
    """Reports whether a term of a node affinity requires one of some values of a label."""
    expressions = term.get("matchExpressions") or ()
    return any(each["key"] == label and each["operator"] == "In" for each in expressions)


def _with_defaults(term: Manifest, labels: Mapping[str, str]) -> Manifest:
    """Returns a term of a node affinity with requirements for the labels that the term does not select."""
    if is_empty_term(term):
        return term
    added = [
        {"key": label, "operator": "In", "values": [value]}
        for label, value in labels.items()
        if not _selects_label(term, label)
    ]
    return {**term, "matchExpressions": [*(term.get("matchExpressions") or ()), *added]} if added else term


def accepts_platform(fields: Manifest, labels: Mapping[str, str]) -> bool:
    """Reports whether pods accept the platform of a node, whatever its other labels.

    A node without a label of its platform may have any platform.

    Args:
        fields: of the pods, as `select_platform` returns them.
    """
    known = {label: labels[label] for label in IMAGE_PLATFORM if label in labels}
    if describe_other_platform(fields.get("nodeSelector") or {}, known):
        return False
    terms = [
        [each for each in term.get("matchExpressions") or () if each["key"] in known]
        for term in required_node_terms(fields.get("affinity") or {})
        if not is_empty_term(term)
    ]
    return not terms or any(all(is_requirement_met(each, known) for each in term) for term in terms)


def describe_other_platform(selector: Mapping[str, Any], labels: Mapping[str, str]) -> str:
    """Describes how a node's platform differs from the platform that a selector requires, or ""."""
    for label, noun in _LABEL_NOUNS.items():
        node_value, required_value = labels.get(label), selector.get(label)
        if required_value is not None and node_value is not None and node_value != required_value:
            return f"of {noun} {node_value}, and the pod needs {required_value}"
    return ""
