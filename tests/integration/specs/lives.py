"""Runs the operator's decisions for one resource without a cluster, from its spec to serving groups."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from heteroinfer_contract import names
from heteroinfer_contract.model_fetch import HUB_SCHEME, FetchedModel
from heteroinfer_operator.api import parse_resource
from heteroinfer_operator.cluster import Refusal, ResourceKey, ResourceObservation
from heteroinfer_operator.errors import SpecError
from heteroinfer_operator.nodes.node_platform import IMAGE_PLATFORM
from heteroinfer_operator.nodes.node_view import NodeView
from heteroinfer_operator.reconcile import Allowed
from heteroinfer_operator.reconcile.refusals import OBJECT_REFUSED
from tests.unit.reconcile.world import OPTIONS, PROFILE, World

NAMESPACE = "default"
_NODES = 64


class Crash(Exception):  # noqa: N818 - the finding of a test, with what led to it
    """The operator's own code failed on a resource that it had accepted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """The outcome of one resource.

    Attributes:
        body: the resource.
        refused: reason for which the spec classes refuse it, or "".
        unplanned: reason for which there is no plan, or "".
        objects: all objects that the operator would create, without the pods of some groups.
        world: the final state of the played cluster.
    """

    body: Mapping[str, Any]
    refused: str = ""
    unplanned: str = ""
    objects: tuple[Mapping[str, Any], ...] = ()
    world: "_NamedWorld | None" = None

    def tells(self, refusal: str) -> bool:
        """Returns whether the status quotes a refusal of the API server."""
        assert self.world is not None
        self.world.refused = refusal
        self.world.settle()
        progressing = next(c for c in self.world.status["conditions"] if c["type"] == "Progressing")
        return progressing["status"] == "False" and progressing["message"] == refusal[:4096]


@dataclass(slots=True, kw_only=True)
class _NamedWorld(World):
    name: str
    refused: str = ""

    def observe(self) -> ResourceObservation:
        observation = World.observe(self)
        key = ResourceKey(namespace=NAMESPACE, name=self.name)
        resource = replace(observation.resource, key=key)
        refusals = (
            (Refusal(kind="Pod", name="", reason=OBJECT_REFUSED, message=self.refused, retry_at=self.now),)
            if self.refused
            else ()
        )
        return replace(observation, resource=resource, refusals=refusals)


def live(body: dict[str, Any]) -> Life:
    """Runs a resource on a played cluster that can hold it and has its model. Returns the outcome.

    Raises:
        Crash: an unexpected error, or decisions that never settle.
    """
    try:
        parse_resource(body)
    except SpecError as error:
        return Life(body=body, refused=error.message)
    try:
        return _live(body)
    except Exception as error:
        raise Crash(f"{type(error).__name__}: {error}") from error


def _live(body: dict[str, Any]) -> Life:
    """Settles a resource until its groups serve, and returns the outcome.

    Only the objects of the first and the last group are kept.
    """
    # The API server changes numbers and texts in this way when it stores them.
    spec = json.loads(json.dumps(body["spec"]))
    world = _NamedWorld(
        spec=spec,
        name=body["metadata"]["name"],
        finalizers=(names.FINALIZER,),
        nodes=_nodes(spec),
        # Accepts all keys and words, because everything that the schema accepts must become objects.
        options=replace(OPTIONS, allowed=Allowed(arguments=None, annotations=None)),
    )
    world.settle()
    world.answer_inspection(model_answer(spec))
    world.settle()
    world.all_ready()
    world.settle()
    refusals = [
        condition["message"]
        for condition in world.status["conditions"]
        if condition["status"] != "True" and condition["type"] in {"Planned", "ModelReady"}
    ]
    workers = world.workers()
    wanted = spec.get("replicas", 1) > 0 and not spec.get("suspend", False)
    if wanted and not workers and not any(refusals):
        raise AssertionError(f"neither pods nor a condition with a reason: {world.status['conditions']}")
    few = {"0", str(max(spec.get("replicas", 1) - 1, 0))}
    return Life(
        body=body,
        unplanned="" if workers or not wanted else "; ".join(filter(None, refusals)),
        objects=tuple(
            manifest
            for manifest in [*world.manifests.values(), *map(_written, world.objects.values())]
            if manifest["metadata"]["labels"].get(names.LABEL_GROUP, "0") in few
        ),
        world=world,
    )


def _written(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Returns an object of the world without the fields that a server adds."""
    metadata = {key: value for key, value in stored["metadata"].items() if key != "uid"}
    return {**stored, "metadata": metadata}


def model_answer(spec: Mapping[str, Any]) -> str:
    """Returns the message of the inspect pod: a model with as many layers as the roles have."""
    asked = sum(sum(role.get("layers", ())) for role in spec["roles"]) or 48
    layers = min(asked, 200)  # a kubelet keeps 4,096 bytes of a termination message
    profile = replace(
        PROFILE, num_layers=layers, layer_bytes=(3_000_000,) * layers, max_position_embeddings=10**7
    )
    if not spec["model"]["uri"].startswith(HUB_SCHEME):
        return profile.to_json()
    return FetchedModel(commit="0" * 40, size_bytes=profile.total_bytes, profile=profile).to_json()


def _nodes(spec: Mapping[str, Any]) -> tuple[NodeView, ...]:
    """Returns nodes that can hold everything, except container resources that no node has."""
    gpus = {role.get("deviceResourceName", "nvidia.com/gpu"): 16.0 for role in spec["roles"]}
    allocatable = {"cpu": 512.0, "memory": 16.0 * 2**40, "pods": 250.0, **gpus}
    return tuple(
        NodeView(name=f"node-{i}", allocatable=allocatable, labels=dict(IMAGE_PLATFORM))
        for i in range(_NODES)
    )
