"""Upgrades from a version that chose other layers for feed-forward ranks."""

from collections.abc import Sequence
from typing import Any

import pytest

from heteroinfer_contract.plan import Plan
from heteroinfer_operator.planning import moved_layers
from tests.unit.reconcile.test_mode import fail, world
from tests.unit.reconcile.world import World


def last_layers(layers: Sequence[int], count: int) -> list[int]:
    """Returns the layers that versions until 0.2.0 chose."""
    return list(layers[len(layers) - count :])


def layers_of(found: World) -> Sequence[int]:
    """Returns the layers of the feed-forward rank in the plan of group 0."""
    plan_hash = found.status["groups"][0]["planHash"]
    ((_, stored),) = (item for item in found.objects.items() if item[0][1].endswith(f"-plan-{plan_hash}"))
    text: Any = stored["data"]["plan.json"]
    return Plan.from_json(text).ranks[-1].layers


def test_an_upgrade_keeps_pods_and_layers_until_the_next_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as earlier_version:
        earlier_version.setattr(moved_layers, "spread_evenly", last_layers)
        found = world()
    pods, group, layers = found.workers(), found.status["groups"][0], layers_of(found)
    assert list(layers) == list(range(layers[0], layers[-1] + 1))
    found.restart_operator()
    found.settle()
    found.advance_time(3600)
    found.settle()
    assert found.workers() == pods
    assert found.status["groups"][0]["planHash"] == group["planHash"]
    assert found.status["groups"][0]["epoch"] == group["epoch"]
    assert layers_of(found) == layers
    assert found.idle_actions() == []
    fail(found)  # new pods load their layers in any case
    assert len(layers_of(found)) == len(layers)
    assert layers_of(found) != layers
