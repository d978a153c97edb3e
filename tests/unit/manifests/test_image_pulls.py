"""Pull policy and pull secrets of an installation: all new pods get them, and no pod ends for them."""

from dataclasses import replace
from typing import Any

from heteroinfer_operator.manifests.image_pulls import ImagePulls
from tests.unit.reconcile.world import OPTIONS, World, cpu_pair

PULLS = ImagePulls(policy="Always", secrets=("given", "own"))


def pulling(pulls: ImagePulls) -> World:
    spec = cpu_pair()
    role = {**spec["roles"][0], "template": {"imagePullSecrets": [{"name": "given"}]}}
    world = World(spec={**spec, "roles": [role, *spec["roles"][1:]]})
    world.options = replace(OPTIONS, images=replace(OPTIONS.images, pulls=pulls))
    world.serve()
    return world


def specs_of(world: World) -> dict[str, dict[str, Any]]:
    return {name: item["spec"] for name, item in world.manifests.items() if item["kind"] == "Pod"}


def test_every_pod_has_the_pull_settings_of_the_installation() -> None:
    specs = specs_of(pulling(PULLS))
    assert len(specs) == 3, "two workers, and one that read the model"
    for name, spec in specs.items():
        assert [container["imagePullPolicy"] for container in spec["containers"]] == ["Always"], name
        given = [] if name == "tiny-0-1-1" else ["given"]
        assert {each["name"] for each in spec["imagePullSecrets"]} == {"given", "own", *given}, name


def test_without_settings_no_pull_policy_or_secret_is_added() -> None:
    for spec in specs_of(pulling(ImagePulls())).values():
        assert "imagePullPolicy" not in spec["containers"][0]
        assert {"name": "own"} not in spec.get("imagePullSecrets", [])


def test_other_pull_settings_change_no_existing_pod() -> None:
    world = pulling(ImagePulls())
    before = dict(world.pods)
    world.options = replace(OPTIONS, images=replace(OPTIONS.images, pulls=PULLS))
    for _ in range(3):
        world.advance_time(60)
        world.settle()
    assert world.pods == before
    assert world.condition("Ready") == ("True", "Serving")
