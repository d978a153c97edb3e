"""A gang object carries the epoch's number: it is created once even if the API server answers slowly."""

from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

import pytest

from heteroinfer_operator.cluster import ApplyObject, CreateObject, Write
from heteroinfer_operator.nodes.node_assignment import Gang
from heteroinfer_operator.reconcile.refusals import NOT_ANSWERED, OBJECT_REFUSED, kind_and_name
from tests.unit.reconcile.world import OPTIONS, World, cpu_pair

KINDS = {
    Gang.VOLCANO: "PodGroup",
    Gang.COSCHEDULING: "PodGroup",
    Gang.NATIVE: "Workload",
    Gang.NATIVE_BETA: "PodGroup",
}
AGAIN = replace(OPTIONS, names_come_again=True)


@dataclass(slots=True, kw_only=True)
class SlowGang(World):
    """The API server answers a write of the gang object later than a reconcile waits."""

    slow: timedelta = timedelta(seconds=1)
    under_way: dict[tuple[str, str], tuple[datetime, dict[str, Any]]] = field(default_factory=dict)
    asked_for: set[str] = field(default_factory=set)

    def _why_refused(self, action: Write) -> tuple[str, str] | None:
        found = kind_and_name(action, "demo")
        (gang,) = self.gangs
        if found[0] != KINDS[gang] or found in self.objects:
            return World._why_refused(self, action)
        if isinstance(action, ApplyObject | CreateObject):
            self.asked_for.add(found[1])
            self.under_way.setdefault(found, (self.now + self.slow, dict(action.manifest)))
            return NOT_ANSWERED, "waiting for the answer"
        return World._why_refused(self, action)

    def answer(self) -> None:
        for key, (at, manifest) in list(self.under_way.items()):
            if at <= self.now:
                del self.under_way[key]
                self._store(manifest)
                self.refusals = tuple(each for each in self.refusals if each.kind != key[0])


@pytest.mark.parametrize("gang", KINDS)
@pytest.mark.parametrize("slow_s", [0.3, 1.0, 5.0])
def test_a_gang_object_with_a_late_answer_is_created_once(gang: Gang, slow_s: float) -> None:
    """Earlier, each late answer raised the number of the epoch: 60 PodGroups a minute, and no pod."""
    world = SlowGang(
        spec=cpu_pair(),
        gangs=frozenset({gang}),
        options=AGAIN,
        calm=False,
        slow=timedelta(seconds=slow_s),
    )
    world.settle()
    world.answer_inspection()
    for _ in range(200):
        world.step(in_real_time=True)
        world.advance_time(0.05 if world.writes else min(world.look_again_s or 0.2, 0.2))
        world.answer()
    assert len(world.workers()) == 2
    assert len(world.asked_for) == 1


@dataclass(slots=True, kw_only=True)
class Quota(World):
    """A quota with room for one PodGroup."""

    others: int = 1
    made: list[str] = field(default_factory=list)

    def _why_refused(self, action: Write) -> tuple[str, str] | None:
        found = kind_and_name(action, "demo")
        if isinstance(action, ApplyObject) and found[0] == "PodGroup":
            if found not in self.objects and self.others + sum(
                kind == "PodGroup" for kind, _ in self.objects
            ):
                return OBJECT_REFUSED, "exceeded quota: podgroups, used: 1, limited: 1"
            self.made.append(found[1])
        return World._why_refused(self, action)


def test_a_gang_object_that_a_quota_refused_first_is_created_once() -> None:
    world = Quota(spec=cpu_pair(), gangs=frozenset({Gang.VOLCANO}), options=AGAIN, calm=False)
    world.settle()
    world.answer_inspection()
    world.live(20)
    world.others = 0
    world.live(600)
    assert len(world.workers()) == 2
    assert len(set(world.made)) == 1
