"""Messages are not memory: with numbers in place of all messages, the decisions stay the same."""

import copy
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from heteroinfer_operator.api import HeteroInferenceStatus
from heteroinfer_operator.cluster import Action, CreateObject, DeleteObject, PatchStatus, RecordEvent
from heteroinfer_operator.nodes.node_platform import IMAGE_PLATFORM
from heteroinfer_operator.nodes.node_view import NodeView
from tests.unit.reconcile.world import World, cpu_pair, waits

_WORDS = ("message", "notes")
"""Fields of the status with text for users."""
NODE = NodeView(
    name="node", allocatable={"cpu": 64, "memory": 512 * 2**30, "pods": 100}, labels=IMAGE_PLATFORM
)
SMALL = replace(NODE, allocatable={"cpu": 5, "memory": 16 * 2**30, "pods": 100})


class Numbers:
    """Gives each message a number; numbers stay unchanged."""

    def __init__(self) -> None:
        self._known: dict[str, str] = {}

    def _of(self, message: str) -> str:
        return (
            message
            if message.isdigit() or not message
            else self._known.setdefault(message, str(len(self._known)))
        )

    def replace(self, value: Any) -> Any:
        """Replaces messages in JSON values by numbers."""
        if isinstance(value, list):
            return [self.replace(item) for item in value]
        if not isinstance(value, Mapping):
            return value
        return {
            key: self._of(item) if key in _WORDS and isinstance(item, str) else self.replace(item)
            for key, item in value.items()
        }


@contextmanager
def numbered() -> Iterator[None]:
    """Makes the operator write and compare statuses with numbers in place of messages."""
    dump, numbers = HeteroInferenceStatus.dump, Numbers()

    def dump_numbered(self: HeteroInferenceStatus) -> dict[str, Any]:
        found: dict[str, Any] = numbers.replace(dump(self))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HeteroInferenceStatus, "dump", dump_numbered)
        yield


def without_words(value: Any) -> Any:
    """Removes messages from JSON values."""
    if isinstance(value, list):
        return [without_words(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    return {key: without_words(item) for key, item in value.items() if key not in _WORDS}


def signature(action: Action) -> object:
    """Returns the effect of an action, without its texts."""
    match action:
        case PatchStatus(status=status):
            return "status", without_words(status)
        case RecordEvent(reason=reason, warning=warning):
            return "event", reason, warning
        case CreateObject(manifest=manifest):
            return "create", manifest["kind"], manifest["metadata"]["name"]
        case DeleteObject(kind=kind, name=name):
            return "delete", kind, name
        case _:
            return type(action).__name__


def _pod(world: World, chance: random.Random) -> str | None:
    return chance.choice(world.workers()) if world.workers() else None


def _on_pod(change: Callable[[World, str], None]) -> Callable[[World, random.Random], None]:
    def move(world: World, chance: random.Random) -> None:
        if (name := _pod(world, chance)) is not None:
            change(world, name)

    return move


def _set(**fields: Any) -> Callable[[World, random.Random], None]:
    return _on_pod(lambda world, name: world.pods.__setitem__(name, replace(world.pods[name], **fields)))


def _toggle(kind: str, name: str, words: str) -> Callable[[World, random.Random], None]:
    def move(world: World, _: random.Random) -> None:
        if world.refuses.pop((kind, name), None) is None:
            world.refuses[kind, name] = words

    return move


MOVES: tuple[Callable[[World, random.Random], None], ...] = (
    lambda world, _: world.all_ready(),
    lambda world, _: world.all_ready(),
    lambda world, _: world.reap(),
    lambda world, _: world.reap(),
    lambda world, chance: world.advance_time(chance.choice([1, 30, 400, 4000])),
    _on_pod(lambda world, name: world.end_pod(name)),
    _on_pod(lambda world, name: world.delete_pod(name)),
    _on_pod(lambda world, name: world.relabel(name, leader="no")),
    _on_pod(lambda world, name: world.relabel(name, group="7")),
    _set(unschedulable="0/3 nodes are available", node=""),
    _set(node="node", waiting=waits("ErrImagePull: no such tag"), ready=False, started=False),
    _set(node="node", waiting=waits("CreateContainerConfigError: no Secret"), ready=False, started=False),
    _set(phase="Failed", reason="OutOfcpu", ready=False, started=False),
    _set(ready=False),
    _toggle("Service", "demo", "Service demo exists and is not ours"),
    _toggle("Pod", "*-1", "exceeded quota: gpus"),
    _toggle("HeteroInference/status", "demo", "a webhook says no"),
    lambda world, chance: world.change_spec(engine={"maxModelLen": chance.choice([256, 512])}),
    lambda world, chance: world.change_spec(replicas=chance.choice([0, 1, 2])),
    lambda world, chance: world.change_spec(suspend=chance.choice([True, False, False])),
    lambda world, chance: world.change_spec(
        model={"uri": chance.choice(["hf://org/model", "file:///models/tiny", "file:///models/tiny"])}
    ),
    lambda world, chance: setattr(world, "nodes", chance.choice([(NODE,), (NODE,), (SMALL,), ()])),
    lambda world, chance: setattr(world, "silences", chance.choice([{}, {}, {0: 3.0}])),
    lambda world, _: setattr(world, "version", world.version + 1),
)


def walk(seed: int) -> list[object]:
    """Returns the operator's actions in a random life of a resource."""
    chance, done, last = random.Random(seed), list[object](), object()
    world = World(spec=cpu_pair(), calm=False)
    world.settle()
    world.answer_inspection()
    for _ in range(60):
        chance.choice(MOVES)(world, chance)
        for _ in range(3):
            for action in world.step().actions:
                found = signature(copy.deepcopy(action))
                if not isinstance(action, PatchStatus):
                    done.append(found)
                elif found != last:  # a new message alone is not a decision
                    done.append(found)
                    last = found
    return done


@pytest.mark.parametrize("seed", range(20))
def test_decisions_do_not_depend_on_stored_messages(seed: int) -> None:
    plain = walk(seed)
    with numbered():
        with_numbers = walk(seed)
    assert with_numbers == plain


@pytest.mark.parametrize(("kept", "notes"), [("without notes", "of 0.1.0"), ("lost", "")])
def test_notes_are_read_from_planned_only_for_an_older_versions_status(kept: str, notes: str) -> None:
    """Earlier, a status without the plan got any message of Planned as the plan's notes."""
    world = World(spec=cpu_pair())
    world.serve()
    (plan,) = world.status["plans"]
    old = {key: value for key, value in plan.items() if key != "notes"}
    world.status["plans"] = [] if kept == "lost" else [old]
    world.status["conditions"] = [
        {**each, "message": "of 0.1.0"} if each["type"] == "Planned" else each
        for each in world.status["conditions"]
    ]
    world.settle()
    assert world.status["plans"][0].get("notes", "") == notes
    assert world.message("Planned") == notes
