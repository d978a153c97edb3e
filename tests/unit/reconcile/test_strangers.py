"""Pods that another user created with the names and the owner of the operator's pods."""

import copy
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from heteroinfer_contract import names
from heteroinfer_operator.api import MAX_EPOCH, parse_status
from tests.unit.reconcile.world import OPTIONS, World, cpu_pair

NOW = datetime(2026, 11, 26, tzinfo=UTC)

NAMES = (
    f"demo-0-{MAX_EPOCH}-0",
    f"demo-0-{MAX_EPOCH - 1}-1",
    "demo-0-9999999999999999-0",
    "demo-0-NEXT-0",
    "demo-0-NEXT-1",
    "demo-0-EPOCH-2",
    "demo-0-EPOCH-999",
    "demo-00-EPOCH-0",
    "demo-0-0EPOCH-1",
    "demo-0-EPOCH-00",
    "demo-0-0-0",
    "demo-63-1-0",
    "demo-64-1-0",
    "demo-99-5-0",
)
STATES: dict[str, dict[str, Any]] = {
    "waits": {"ready": False, "started": False, "phase": "Pending"},
    "is ready": {},
    "has ended": {"ready": False, "phase": "Failed"},
}


def make(world: World, name: str, state: str) -> None:
    """Creates a copy of a worker pod whose labels match its new name."""
    worker = world.pods[world.workers()[0]]
    _, group, epoch, index = name.split("-")
    labels = {
        **worker.labels,
        names.LABEL_GROUP: group,
        names.LABEL_EPOCH: epoch,
        names.LABEL_POD_INDEX: index,
    }
    world.pods[name] = replace(worker, name=name, uid=f"uid-{name}", labels=labels, **STATES[state])
    world.manifests[name] = world.manifests[worker.name]


@pytest.mark.parametrize("names_come_again", [True, False])
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("name", NAMES)
def test_a_foreign_pod_does_not_affect_a_serving_group(name: str, state: str, names_come_again: bool) -> None:
    world = World(spec=cpu_pair(), options=replace(OPTIONS, names_come_again=names_come_again))
    world.serve()
    ours, epoch = world.workers(), parse_status(world.status).groups[0].epoch
    make(world, name.replace("EPOCH", str(epoch)).replace("NEXT", str(epoch + 1)), state)
    for _ in range(5):
        world.settle()
        world.reap()
        world.advance_time(60)
    assert [pod for pod in world.workers() if pod in ours and not world.pods[pod].deleting] == ours
    assert world.condition("Available") == ("True", "Serving")
    group = parse_status(world.status).groups[0]
    assert (group.epoch, group.failures, group.restarts) == (epoch, (), 0)
    assert len(world.workers()) <= len(ours) + 1


@pytest.mark.parametrize("served", [True, False])
@pytest.mark.parametrize("names_come_again", [True, False])
def test_foreign_pods_with_all_names_of_a_higher_epoch_do_not_end_a_group(
    served: bool, names_come_again: bool
) -> None:
    """Earlier, the higher epoch took precedence, and the operator deleted the group's own pods."""
    world = World(spec=cpu_pair(), options=replace(OPTIONS, names_come_again=names_come_again))
    world.serve()
    if not served:
        world.end_pod(world.workers()[0])
        world.settle()
        world.reap()
        world.settle()
    ours, epoch = world.workers(), parse_status(world.status).groups[0].epoch
    world.version += 10
    for index in range(2):
        make(world, f"demo-0-{epoch + 3}-{index}", "is ready" if served else "waits")
    for _ in range(3):
        world.settle()
        world.reap()
    assert world.workers() == ours
    group = parse_status(world.status).groups[0]
    assert (group.epoch, len(group.failures)) == (epoch, 0 if served else 1)


@pytest.mark.parametrize("name", [f"demo-0-{MAX_EPOCH}-0", f"demo-0-{MAX_EPOCH - 1}-0"])
def test_a_foreign_pod_does_not_raise_the_epoch_to_its_maximum(name: str) -> None:
    world = World(spec=cpu_pair(), options=replace(OPTIONS, names_come_again=True))
    world.serve()
    make(world, name, "waits")
    world.end_pod(world.workers()[0])
    for _ in range(5):
        world.settle()
        world.reap()
        world.advance_time(60)
    group = parse_status(world.status).groups[0]
    assert group.epoch < MAX_EPOCH // 2
    assert [failure.reason for failure in group.failures] == ["PodFailed"]
    assert len(world.workers()) == 2


@pytest.mark.parametrize("names_come_again", [True, False])
def test_another_epoch_follows_the_largest_epoch(names_come_again: bool) -> None:
    """Even after the largest epoch, the next epoch has a valid and unused name."""
    world = World(spec=cpu_pair(), options=replace(OPTIONS, names_come_again=names_come_again))
    world.serve()
    (first, second) = world.workers()
    for index, old in enumerate((first, second)):
        make(world, f"demo-0-{MAX_EPOCH}-{index}", "is ready")
        del world.pods[old]
    world.status = {
        **world.status,
        "groups": [{**world.status["groups"][0], "epoch": MAX_EPOCH, "members": []}],
    }
    world.version += 1
    world.settle()
    assert world.condition("Available") == ("True", "Serving")
    world.end_pod(f"demo-0-{MAX_EPOCH}-0")
    for _ in range(3):
        world.settle()
        world.reap()
    group = parse_status(world.status).groups[0]
    assert 0 < group.epoch < MAX_EPOCH // 2
    assert [failure.reason for failure in group.failures] == ["PodFailed"]
    assert len(world.workers()) == 2
    assert not {first, second} & set(world.workers()) or not names_come_again


def test_the_first_epoch_grows_with_resource_version_and_time() -> None:
    options = replace(OPTIONS, names_come_again=True)
    exact = [7, 8461, 10**14 - 1, 10**14, 10**14 + 10**5, 1723847503428047, 1723847503428047007, 2**64]
    epochs = [options.first_epoch(str(version), NOW) for version in exact]
    assert epochs == sorted(set(epochs))
    assert max(epochs) < MAX_EPOCH // 2
    assert all(
        options.largest_epoch(str(version), NOW - timedelta(hours=23)) > epoch
        for version, epoch in zip(exact, epochs, strict=True)
    )
    assert options.first_epoch("no number", NOW) < options.first_epoch(
        "no number", NOW + timedelta(seconds=1)
    )
    assert options.first_epoch("7", datetime(1970, 1, 1, tzinfo=UTC)) == 7


def fail_and_start_again(world: World) -> None:
    """Ends an epoch, and lets the pods of the next epoch serve."""
    world.end_pod(world.workers()[1])
    for _ in range(4):
        world.settle()
        world.reap()
        world.advance_time(60)
    world.all_ready()
    world.settle()


def test_no_pod_name_is_reused_after_a_restore_of_etcd() -> None:
    """A restore resets status, version and pods; the epochs after the backup are forgotten."""
    world = World(spec=cpu_pair(), options=replace(OPTIONS, names_come_again=True))
    world.serve()
    backup = copy.deepcopy(world)
    for _ in range(3):
        fail_and_start_again(world)
    backup.now, backup.created = world.now + timedelta(seconds=10), list(world.created)
    fail_and_start_again(backup)
    assert backup.condition("Available") == ("True", "Serving")
    assert len(backup.created) > len(world.created)
    assert len(backup.created) == len(set(backup.created)), "a name was used twice"
