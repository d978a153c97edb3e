"""Models in images on nodes whose programs are too old for image volumes."""

import json
from dataclasses import replace
from typing import Any

import pytest

from heteroinfer_operator.kube.trim import node_view
from heteroinfer_operator.nodes.demand import MAX_AFFINITY_BYTES, REQUIRED
from heteroinfer_operator.nodes.image_volumes import describe_old_program
from heteroinfer_operator.nodes.node_platform import IMAGE_PLATFORM
from heteroinfer_operator.nodes.node_view import NodeView
from tests.unit.reconcile.world import World, cpu_pair, waits

TERM = {"matchExpressions": [{"key": "kubernetes.io/os", "operator": "In", "values": ["linux"]}]}
URI = f"oci://registry.test/llama@sha256:{'a' * 64}"
OLD, NEW = "containerd://1.7.20", "containerd://2.1.4"
PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"


@pytest.mark.parametrize(
    ("runtime", "kubelet", "described"),
    [
        (OLD, "v1.35.4", "containerd 1.7, which cannot mount image volumes (containerd 2.1 can)"),
        (NEW, "v1.35.4", ""),
        ("containerd://2.0.5-k3s1", "v1.35.4+k3s1", "containerd 2.0, which cannot mount image volumes"),
        ("cri-o://1.30.2", "v1.30.2", "cri-o 1.30, which cannot mount image volumes (cri-o 1.31 can)"),
        ("cri-o://1.35.0", "v1.35.0", ""),
        (NEW, "v1.30.9", "kubelet 1.30, which cannot mount image volumes (kubelet 1.35 can)"),
        (NEW, "v1.33.1", ""),
        ("docker://27.1", "v1.35.0", ""),
        ("", "", ""),
    ],
)
def test_programs_that_are_too_old_are_described(runtime: str, kubelet: str, described: str) -> None:
    found = describe_old_program(runtime, kubelet)
    assert found.startswith(described) if described else found == ""


def node(name: str, runtime: str) -> NodeView:
    stored = {
        "metadata": {"name": name, "labels": {**IMAGE_PLATFORM, "kubernetes.io/hostname": name}},
        "status": {
            "allocatable": {"cpu": "64", "memory": "512Gi", "pods": "100"},
            "conditions": [{"type": "Ready", "status": "True"}],
            "nodeInfo": {"containerRuntimeVersion": runtime, "kubeletVersion": "v1.35.4"},
        },
    }
    return node_view(stored)


def world_with(*nodes: NodeView | None, uri: str = URI) -> World:
    world = World(spec=cpu_pair(model={"uri": uri}), nodes=None if None in nodes else nodes)  # type: ignore[arg-type]
    world.settle()
    return world


def message(world: World, kind: str) -> str:
    return str(next(c for c in world.status["conditions"] if c["type"] == kind)["message"])


def excluded(world: World, name: str) -> list[str]:
    """The nodes that a pod must not use."""
    affinity = world.manifests[name]["spec"].get("affinity", {}).get("nodeAffinity", {})
    terms = affinity.get(REQUIRED, {}).get("nodeSelectorTerms", ())
    return [value for term in terms for each in term.get("matchFields", ()) for value in each["values"]]


def hint(world: World, name: str) -> str:
    affinity = world.manifests[name]["spec"].get("affinity", {}).get("nodeAffinity", {})
    terms = [term["preference"]["matchFields"][0]["values"] for term in affinity.get(PREFERRED, ())]
    return str(terms[0][0]) if terms else ""


def test_a_model_in_an_image_is_refused_if_no_node_can_mount_it() -> None:
    world = world_with(node("a", OLD), node("b", OLD))
    assert not world.pods
    assert world.condition("ModelReady") == ("False", "ImageVolumesNotSupported")
    assert message(world, "ModelReady").startswith(
        f"{URI}: no node can mount this image: nodes a, b have containerd 1.7, which cannot mount image "
        "volumes (containerd 2.1 can). Image volumes need a kubelet of Kubernetes 1.35"
    )
    assert world.look_again_s is not None
    world.nodes = (node("a", OLD), node("b", NEW))  # the node was upgraded
    world.settle()
    (inspect,) = world.pods
    assert excluded(world, inspect) == ["a"]


def test_the_model_pod_waits_for_a_node_that_can_mount_the_image() -> None:
    """A node that is cordoned or NotReady may come back, so it counts as a node for the pod."""
    cordoned = replace(node("b", NEW), schedulable=False, problem="cordoned")
    world = world_with(node("a", OLD), cordoned, node("c", OLD))
    (inspect,) = world.pods
    assert excluded(world, inspect) == ["a", "c"]


def test_thousands_of_old_nodes_do_not_make_a_pod_that_the_api_server_refuses() -> None:
    old = [node(f"old-{number:04}.{'x' * 40}", OLD) for number in range(5000)]
    new = [
        replace(node(f"new-{number:04}", NEW), requested={"memory": float(number)}) for number in range(2000)
    ]
    full = replace(node("new-full", NEW), requested={"memory": 512.0 * 2**30})
    template = {"affinity": {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": [TERM, TERM]}}}}
    role = {**cpu_pair()["roles"][0], "template": template}
    world = World(spec=cpu_pair(model={"uri": URI}, roles=[role]), nodes=(*old, full, *new))
    world.settle()
    (inspect,) = world.pods
    affinity = world.manifests[inspect]["spec"]["affinity"]
    assert len(json.dumps(affinity)) < 1.1 * MAX_AFFINITY_BYTES
    terms = affinity["nodeAffinity"][REQUIRED]["nodeSelectorTerms"]
    assert all(term["matchExpressions"] == TERM["matchExpressions"] for term in terms)
    assert {field["operator"] for term in terms for field in term["matchFields"]} == {"In"}
    named = excluded(world, inspect)
    assert len(named) > 300
    assert sorted(set(named)) == [each.name for each in new[: len(set(named))]], "the emptiest nodes first"


def test_worker_pods_use_nodes_that_can_mount_the_image() -> None:
    world = world_with(node("a", OLD), node("b", NEW))
    world.answer_inspection()
    world.settle()
    assert {hint(world, name) for name in world.workers()} == {"b"}
    blocked = world_with(node("a", OLD), replace(node("b", NEW), requested={"cpu": 64.0}))
    blocked.answer_inspection()
    blocked.settle()
    assert not blocked.workers()
    assert "node a has containerd 1.7, which cannot mount image volumes" in message(
        blocked, "CapacityAvailable"
    )


def test_other_models_ignore_the_runtimes_of_nodes() -> None:
    world = world_with(node("a", OLD), uri="file:///models/tiny")
    (inspect,) = world.pods
    assert excluded(world, inspect) == []


@pytest.mark.parametrize(
    ("nodes", "advice"),
    [
        ((node("a", NEW),), "the pod mounts an image volume, which its node may not support"),
        ((None,), "the pod mounts an image volume, which its node may not support"),
        ((node("b", NEW), node("a", OLD)), "node a has containerd 1.7, which cannot mount image volumes"),
    ],
    ids=["a node that should do", "unknown nodes", "an old node"],
)
def test_the_kubelets_error_comes_with_advice(nodes: tuple[Any, ...], advice: str) -> None:
    error = 'CreateContainerError: failed to mkdir "": mkdir : no such file or directory'
    world = world_with(*nodes)
    (inspect,) = world.pods
    world.pods[inspect] = replace(world.pods[inspect], node="a", waiting=waits(error))
    world.settle()
    assert world.condition("ModelReady") == ("False", "CreateContainerError")
    assert "failed to mkdir" in message(world, "ModelReady")
    assert advice in message(world, "ModelReady")
    assert "hf:// or pvc:// in model.uri" in message(world, "ModelReady")
    world.pods[inspect] = replace(world.pods[inspect], waiting=None)
    world.answer_inspection()
    world.settle()
    worker = world.workers()[0]
    world.pods[worker] = replace(world.pods[worker], node="a", waiting=waits(error))
    world.settle()
    assert advice in message(world, "Ready") + message(world, "Progressing")


def test_an_image_that_cannot_be_pulled_gets_no_advice_about_mounts() -> None:
    world = world_with(node("a", NEW))
    (inspect,) = world.pods
    world.pods[inspect] = replace(
        world.pods[inspect], node="a", waiting=waits("ImagePullBackOff: no such image")
    )
    world.settle()
    assert "image volume" not in message(world, "ModelReady")
