"""Interference by other writers: pods, status writes and events stay limited, and none occur at rest."""

import copy
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from heteroinfer_contract import names
from heteroinfer_operator.cluster import PodView
from tests.unit.reconcile.damage import (
    HIDING,
    Webhook,
    damages,
    with_damage,
    without_annotations,
)
from tests.unit.reconcile.world import OPTIONS, World, cpu_pair, waits

HOUR_S = 3600.0


def build_world(**changes: Any) -> World:
    """Returns a world in which other writers may do anything."""
    return World(spec=cpu_pair(**changes), calm=False, options=replace(OPTIONS, names_come_again=True))


def serving(**changes: Any) -> World:
    """Returns such a world in which all groups serve."""
    world = build_world(**changes)
    world.serve()
    return world


def start_anew(world: World) -> None:
    """Ends a rank of a serving group so that the next epoch's pods are created."""
    world.end_pod(world.workers()[0])
    world.live(1)
    world.reap()


@pytest.mark.parametrize("webhook", HIDING)
@pytest.mark.parametrize("replicas", [1, 8])
def test_pods_changed_by_a_webhook_are_retried_with_backoff(webhook: Webhook, replicas: int) -> None:
    """Earlier, the operator created 20 pods a second because it did not check the stored pods."""
    world = serving(replicas=replicas)
    world.pod_webhook = webhook
    for name in world.workers():
        world.end_pod(name)
    world.live(1)
    world.reap()
    before = len(world.created)
    world.live(60)
    assert len(world.created) - before <= 2 * 2 * replicas + 10
    assert world.condition("Progressing") == ("False", "ChangedByOthers")
    world.live(HOUR_S)
    first_hour = len(world.created)
    world.live(HOUR_S)
    assert len(world.created) - first_hour <= 13 * replicas, "each group tries one pod every five minutes"
    world.pod_webhook = dict
    world.live(600)
    world.all_ready()
    world.live(60)
    assert world.condition("Ready") == ("True", "Serving")


@pytest.mark.parametrize("pods", [1, 4])
def test_epochs_without_a_visible_pod_back_off(pods: int) -> None:
    role = {"device": "CPU", "resources": {"limits": {"cpu": "4", "memory": "8Gi"}}}
    world = build_world(
        roles=[{"name": "first", "pods": pods, **role}, {"name": "second", "pods": pods, **role}]
    )
    world.serve()
    world.pod_taker = True
    start_anew(world)
    before = len(world.created)
    world.live(60)
    assert len(world.created) - before <= 2 * 2 * pods + 10
    assert world.status["groups"][0]["failures"][-1]["reason"] == "PodsNeverSeen"
    assert "webhook" in world.message("Available") + world.message("Progressing")
    world.live(HOUR_S)
    first_hour = len(world.created)
    world.live(HOUR_S)
    assert len(world.created) - first_hour <= 13 * 2 * pods
    world.pod_taker = False
    world.live(600)
    world.all_ready()
    world.live(60)
    assert world.condition("Ready") == ("True", "Serving")


def test_a_large_group_that_keeps_failing_waits_and_the_condition_reports_the_cause() -> None:
    role = {"device": "CPU", "pods": 8, "resources": {"limits": {"cpu": "4", "memory": "8Gi"}}}
    world = build_world(roles=[{"name": "first", **role}], restart={"maxRestarts": 20})
    world.serve()
    held = False
    for _ in range(60):
        for name in world.workers():
            if not world.pods[name].ended:
                world.end_pod(name, message="no such device")
        world.live(1)
        world.reap()
        words = world.message("Progressing")
        held = held or world.condition("Progressing") == ("False", "TooManyNewPods")
        if held and "TooManyNewPods" in world.condition("Progressing"):
            assert "at most 26 pods a minute for this resource (2 x 8 wanted pods + 10)" in words
            assert "PodFailed: " in words
            assert "no such device" in words
    assert held
    assert "pods" in world.held_back
    for _ in range(3):
        world.live(60)
        world.all_ready()
    world.live(1)
    assert world.condition("Ready") == ("True", "Serving")


@pytest.mark.parametrize("calm", [60, 600])
def test_the_budget_never_delays_a_group_that_fails_occasionally(calm: int) -> None:
    world = World(spec=cpu_pair(replicas=3, restart={"maxRestarts": 20, "window": "1m"}))
    world.serve()
    for index in range(30):
        workers = [name for name in world.workers() if world.pods[name].ready]
        world.end_pod(workers[index % len(workers)])
        for _ in range(5):
            world.live(calm / 5)
            world.reap()
            world.all_ready()
    assert world.condition("Ready") == ("True", "Serving")


def contradict(status: dict[str, Any]) -> dict[str, Any]:
    """Returns the status that an operator with other lists writes."""
    wanted = copy.deepcopy(status)
    for condition in wanted.get("conditions", ()):
        if condition["type"] == "Planned":
            condition.update(status="False", reason="ArgumentNotAllowed", message="not allowed")
    return wanted


def without_conditions(status: dict[str, Any]) -> dict[str, Any]:
    """Returns the status that an operator of another version writes."""
    return {key: value for key, value in status.items() if key != "conditions"}


def writes_in(world: World, seconds: float) -> int:
    """Counts the operator's status writes while another operator undoes each write."""
    before = world.version
    world.rival = contradict
    world.live(seconds)
    world.rival = dict
    return (world.version - before) // 2


@pytest.mark.parametrize("outage_s", [5, 15, 30, 120])
def test_failed_status_writes_do_not_count_as_another_writer(outage_s: float) -> None:
    """Earlier, each attempt counted as undone by another operator, and the status was 30 s late."""
    world = serving()
    for name in world.workers():
        world.pods[name] = replace(world.pods[name], ready=False)
    world.live(3)
    assert world.condition("Available")[0] == "False"
    world.refuses["HeteroInference/status", "demo"] = "down"
    world.all_ready()
    world.live(outage_s)
    world.refuses.clear()
    world.live(2)
    assert world.condition("Available") == ("True", "Serving")
    for _ in range(20):
        world.step(in_real_time=True)
        assert world.condition("Progressing") == ("False", "Settled")
        world.advance_time(0.1)


def test_two_operators_write_a_status_rarely_and_report_each_other() -> None:
    """Earlier, both wrote the status 44 times a second, and neither reported the other."""
    world = serving()
    world.status_managers = frozenset({names.MANAGER, "another"})
    world.status = contradict(world.status)
    world.version += 1
    assert 5 <= writes_in(world, 20) <= 40
    words = world.message("Progressing")
    assert "another operator (field manager another) writes the status of this resource." in words
    assert "Uninstall one of the two operators, or give each its own namespaces" in words
    assert world.condition("Progressing") == ("False", "StatusWrittenByOthers")
    assert writes_in(world, 600) <= 30, "an unchanged status waits"
    world.live(120)
    assert world.condition("Progressing") == ("False", "Settled")
    assert world.idle_actions() == []


def test_changes_are_written_within_two_seconds_despite_another_operator() -> None:
    world = serving()
    world.status = contradict(world.status)
    world.version += 1
    writes_in(world, 60)
    world.end_pod(world.workers()[0])
    writes_in(world, 2)
    assert world.condition("Available")[0] == "False"


def test_each_pod_with_a_missing_image_is_reported_once() -> None:
    """Earlier, the group's message alternated between pods, so each reconcile recorded an event."""
    world = build_world()
    world.settle()
    world.answer_inspection()
    world.settle()
    first, second = world.workers()
    world.pods[first] = replace(world.pods[first], unschedulable="0/3 nodes are available")
    world.pods[second] = replace(
        world.pods[second], node="node", waiting=waits("ImagePullBackOff: no such image"), phase="Pending"
    )
    for seconds in (1, 30, 400):
        world.settle()
        world.advance_time(seconds)
    for waiting in ("ContainerCreating", "ErrImagePull: no such image"):  # the kubelet retries
        world.pods[second] = replace(world.pods[second], waiting=waits(waiting))
        world.settle()
    assert world.events.count("PodWaits") == 1
    assert world.idle_actions() == []


class Storms(RuleBasedStateMachine):
    """Random damage by other writers; the world checks the limits of each action."""

    def __init__(self) -> None:
        super().__init__()
        self.world = build_world()
        self.forged = 0

    @initialize(replicas=st.integers(1, 3), serves=st.booleans())
    def begin(self, replicas: int, serves: bool) -> None:
        self.world = build_world(replicas=replicas)
        if serves:
            self.world.serve()

    @rule(seconds=st.sampled_from([1, 20, 300]))
    def time_goes_on(self, seconds: float) -> None:
        self.world.live(seconds)

    @rule()
    def the_model_is_read(self) -> None:
        self.world.answer_inspection()

    @rule()
    def pods_turn_ready(self) -> None:
        self.world.all_ready()

    @rule()
    def deleted_pods_go(self) -> None:
        self.world.reap()

    @precondition(lambda self: bool(self.world.workers()))
    @rule(data=st.data(), vanishes=st.booleans())
    def a_pod_ends(self, data: st.DataObject, vanishes: bool) -> None:
        name = data.draw(st.sampled_from(self.world.workers()))
        if vanishes:
            del self.world.pods[name]
        else:
            self.world.end_pod(name)

    @rule(webhook=st.sampled_from([*HIDING, without_annotations, dict]))
    def a_webhook_changes_pods(self, webhook: Webhook) -> None:
        self.world.pod_webhook = webhook

    @rule(takes=st.booleans())
    def a_controller_takes_labels_off_pods(self, takes: bool) -> None:
        self.world.pod_taker = takes

    @precondition(lambda self: bool(self.world.status))
    @rule(data=st.data())
    def the_status_is_damaged(self, data: st.DataObject) -> None:
        found = damages(self.world.status)
        path, value = found[data.draw(st.integers(0, len(found) - 1))]
        self.world.status = with_damage(self.world.status, path, value)
        self.world.version += 1

    @rule(
        name=st.sampled_from(
            ["demo-0-{}-0", "demo-0-{}-7", "demo-9-{}-0", "demo-x-{}", "demo-inspect-0123456789"]
        ),
        epoch=st.sampled_from([1, 2, 3, 10**15 - 1, 10**15]),
        ready=st.booleans(),
    )
    def somebody_forges_a_pod(self, name: str, epoch: int, ready: bool) -> None:
        self.forge_pod(name.format(epoch), ready=ready)

    def forge_pod(self, name: str, *, ready: bool = False) -> None:
        """Creates a pod with the resource's label and owner."""
        self.forged += 1
        if name in self.world.pods or name in self.world.strangers:
            return
        labels = {names.LABEL_RESOURCE: "demo", names.LABEL_COMPONENT: names.COMPONENT_WORKER}
        self.world.manifests[name] = {"metadata": {"labels": labels}}
        self.world.pods[name] = PodView(
            name=name,
            uid=f"forged-{self.forged}",
            labels=labels,
            created=self.world.now,
            ready=ready,
            started=ready,
            node="node" if ready else "",
        )

    @rule(
        name=st.sampled_from(["demo-plan-0123456789", "demo-revision-0123456789", "demo-plan-", "demo-x"]),
        text=st.sampled_from(["{}", "nonsense", '{"ranks": []}']),
    )
    def somebody_forges_a_config_map(self, name: str, text: str) -> None:
        key = next(iter(self.world.objects.get(("ConfigMap", name), {}).get("data", {"plan.json": ""})))
        metadata = {
            "name": name,
            "namespace": "default",
            "uid": "x",
            "labels": {names.LABEL_RESOURCE: "demo"},
        }
        self.world.objects["ConfigMap", name] = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": metadata,
            "data": {key: text, names.PLAN_KEY: text},
        }

    @rule(rival=st.sampled_from([contradict, without_conditions, dict]))
    def another_operator_writes_the_status(self, rival: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        self.world.rival = rival

    @precondition(lambda self: bool(self.world.workers()))
    @rule()
    def all_pods_end(self) -> None:
        for name in self.world.workers():
            if not self.world.pods[name].ended:
                self.world.end_pod(name)
        self.world.live(1)
        self.world.reap()

    @rule()
    def the_operator_starts_again(self) -> None:
        self.world.restart_operator()

    def teardown(self) -> None:
        """For an hour all counts stay within their limits, and at rest nothing is written."""
        for _ in range(6):
            self.world.live(600)
            self.world.reap()
        self.world.rival = dict
        self.world.live(600)
        self.world.reap()
        self.world.live(1)
        if self._a_back_off_ends():
            self.world.live(5)  # its epoch begins, so the world is not at rest yet
        assert self.world.idle_actions() == []

    def _a_back_off_ends(self) -> bool:
        """Checks whether a group's next epoch is due and has not begun."""
        times = [group.get("nextEpochTime") for group in self.world.status.get("groups", ())]
        return any(time and datetime.fromisoformat(time) <= self.world.now for time in times)


TestStorms = Storms.TestCase
TestStorms.settings = settings(max_examples=8, stateful_step_count=12, deadline=None)


def test_groups_that_create_their_pods_in_turn_stay_within_the_limit_together() -> None:
    """Earlier, each group stayed within the limit, but both together created 23 pods in a minute."""
    state = Storms()
    state.begin(replicas=3, serves=True)
    state.a_controller_takes_labels_off_pods(takes=True)
    state.all_pods_end()
    state.deleted_pods_go()
    state.teardown()
