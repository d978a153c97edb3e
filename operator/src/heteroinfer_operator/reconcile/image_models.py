"""Models in images: nodes for the pod that reads the model, and advice for pods whose mount fails. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from heteroinfer_operator.api import HeteroInferenceSpec
from heteroinfer_operator.cluster import PodView, Waiting
from heteroinfer_operator.manifests.model_pods import model_template
from heteroinfer_operator.nodes.demand import pod_demand
from heteroinfer_operator.nodes.image_volumes import FIX, mounts_images
from heteroinfer_operator.nodes.missing_capacity import name_nodes
from heteroinfer_operator.nodes.node_view import NodeView
from heteroinfer_operator.nodes.placement import Obstacle, find_lasting_obstacle
from heteroinfer_operator.nodes.role_demand import template_fields
from heteroinfer_operator.reconcile.startup import is_container_blocked

_PULL_REASONS: Final = frozenset({"ErrImagePull", "ImagePullBackOff", "CreateContainerConfigError"})
"""Reasons of the kubelet with another cause: a missing image, Secret or ConfigMap."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageNodes:
    """The nodes for the pod that reads a model from an image.

    Attributes:
        unable: names of nodes that suit the pod but cannot mount the image.
        able: names of the other nodes that suit the pod: first those that accept new pods, among them those
            with the most free memory.
        problem: why no node can mount the image, or "".
    """

    unable: tuple[str, ...] = ()
    able: tuple[str, ...] = ()
    problem: str = ""


def find_image_nodes(spec: HeteroInferenceSpec, nodes: Sequence[NodeView] | None) -> ImageNodes:
    """Finds the nodes that can mount a model's image, and the nodes that cannot.

    Finds no nodes for a model that is not in an image, and without the right to read nodes.
    """
    if nodes is None or not mounts_images(spec, None):
        return ImageNodes()
    # Only the fields of the template restrict the nodes, so labels and requests may be empty.
    demand = pod_demand("model", labels={}, spec=template_fields(model_template(spec)), requests={})
    demand_with_image = replace(demand, mounts_images=True)
    # The candidates suit the pod, apart from the image.
    candidates = [node for node in nodes if find_lasting_obstacle(demand, node) is None]
    unable_by_obstacle: dict[Obstacle, list[str]] = {}
    for node in candidates:
        if obstacle := find_lasting_obstacle(demand_with_image, node):
            unable_by_obstacle.setdefault(obstacle, []).append(node.name)
    unable = tuple(name for node_names in unable_by_obstacle.values() for name in node_names)
    if len(unable) < len(candidates):  # some nodes can mount the image
        excluded = frozenset(unable)
        able = [node for node in candidates if node.name not in excluded]
        able.sort(key=lambda node: (not node.schedulable, -_free_memory_bytes(node), node.name))
        return ImageNodes(unable=unable, able=tuple(node.name for node in able))
    if not unable:  # no node suits the pod at all, which is not a problem of the image
        return ImageNodes()
    described = ", ".join(
        f"{name_nodes(node_names)} {obstacle.describe(len(node_names))}"
        for obstacle, node_names in unable_by_obstacle.items()
    )
    return ImageNodes(
        unable=unable, problem=f"{spec.model.uri}: no node can mount this image: {described}. {FIX}"
    )


def _free_memory_bytes(node: NodeView) -> float:
    """Returns the allocatable memory of a node that no pod requests."""
    return node.allocatable.get("memory", 0.0) - node.requested.get("memory", 0.0)


def with_image_volume_advice(
    spec: HeteroInferenceSpec, pods: Sequence[PodView], nodes: Sequence[NodeView] | None
) -> tuple[PodView, ...]:
    """Adds cause and fix to the kubelet's messages about containers with image volumes."""
    if not any(mounts_images(spec, role.template) for role in spec.roles):
        return tuple(pods)
    problems = {node.name: node.no_image_volumes for node in nodes or ()}
    return tuple(_with_advice(pod, problems.get(pod.node)) for pod in pods)


def _with_advice(pod: PodView, node_problem: str | None) -> PodView:
    """Adds cause and fix to the kubelet's message about a pod whose container it cannot create.

    Args:
        node_problem: program of the pod's node that is too old for image volumes; "" without one, None if the
            node is unknown.
    """
    waiting = pod.waiting
    if waiting is None or not is_container_blocked(pod) or waiting.reason in _PULL_REASONS:
        return pod
    if node_problem:
        cause = f"node {pod.node} has {node_problem}"
    else:
        cause = "the pod mounts an image volume, which its node may not support"
    message = "; ".join(filter(None, (waiting.message, f"{cause}. {FIX}")))
    return replace(pod, waiting=Waiting(waiting.reason, message))
