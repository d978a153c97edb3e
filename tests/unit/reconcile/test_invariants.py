"""With events in any order: one epoch at a time, a true status, and convergence."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from heteroinfer_contract import names
from heteroinfer_contract.group_report import GroupReport, RankPhase, RankStatus
from heteroinfer_operator.api import parse_status
from heteroinfer_operator.cluster import (
    ApplyObject,
    CreateObject,
    Decision,
    Manifest,
    PatchStatus,
    PodView,
    RecordEvent,
)
from heteroinfer_operator.manifests.worker_pods import WorkerImages
from heteroinfer_operator.nodes.node_assignment import Gang
from heteroinfer_operator.reconcile import reconcile
from heteroinfer_operator.reconcile.refusals import REASONS_OF_CHILDREN
from tests.unit.reconcile.damage import HIDING, Webhook, without_annotations
from tests.unit.reconcile.world import OPTIONS, Objects, World, cpu_pair, waits

FINALIZER = "example.test/hold"
OF_CLIENTS = {names.LABEL_RESOURCE, names.LABEL_COMPONENT, names.LABEL_LEADER}
"""Labels by which the Service of clients selects leaders."""
OF_GROUPS = {names.LABEL_RESOURCE, names.LABEL_COMPONENT, names.LABEL_GROUP}


def decide(world: World, status: Manifest | None = None) -> Decision:
    """Returns the decision of a reconcile now, with another stored status if given."""
    seen = world.observe()
    if status is not None:
        seen = replace(seen, resource=replace(seen.resource, status=status))
    return reconcile(seen, world.now, world.options)


def written(decision: Decision) -> list[Manifest]:
    """Returns the statuses that a decision writes."""
    return [action.status for action in decision.actions if isinstance(action, PatchStatus)]


def reported(decision: Decision) -> set[str]:
    """Returns the reasons of a decision's events."""
    return {action.reason for action in decision.actions if isinstance(action, RecordEvent)}


def makes_pods(decision: Decision) -> bool:
    """Checks whether a decision creates pods: without them, its status does not match the world."""
    made = [action.manifest for action in decision.actions if isinstance(action, CreateObject)]
    return any(manifest["kind"] == "Pod" for manifest in made)


def with_another_rule(manifest: Manifest) -> dict[str, Any]:
    """Adds a rule to a stored policy, as a webhook would."""
    if manifest["kind"] != "NetworkPolicy":
        return dict(manifest)
    spec = manifest["spec"]
    return {**manifest, "spec": {**spec, "ingress": [*spec["ingress"], {"from": [{"podSelector": {}}]}]}}


def change_policies(objects: Objects) -> None:
    for key, stored in objects.items():
        # Only once: otherwise the policy would grow until the rule is removed.
        if key[0] == "NetworkPolicy" and len(stored["spec"]["ingress"]) < 3:
            objects[key] = with_another_rule(stored)


def delete_policies(objects: Objects) -> None:
    for key in [key for key in objects if key[0] == "NetworkPolicy"]:
        del objects[key]


def lead_clients_elsewhere(objects: Objects) -> None:
    if (stored := objects.get(("Service", "demo"))) is not None:
        objects["Service", "demo"] = {**stored, "spec": {**stored["spec"], "selector": {"app": "x"}}}


def leave_all_alone(objects: Objects) -> None:
    """Changes nothing."""


class GroupLife(RuleBasedStateMachine):
    """Random failures, deletions, time and changes of the spec against the real decisions."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(
            spec=cpu_pair(restart={"maxRestarts": 3}),
            options=replace(OPTIONS, names_come_again=True),
            gangs=frozenset({Gang.VOLCANO}),
            calm=False,
        )
        self.ran: dict[str, set[str]] = {}
        self.rejected: set[str] = set()

    @rule()
    def reconcile(self) -> None:
        """A reconcile writes the status that the next reconcile would write, unless it creates pods."""
        world, reached = self.world, self.clients_reach_leaders
        decision = decide(world)
        self.status_comes_first(decision)
        stored = written(decision)
        if stored and not makes_pods(decision):
            again = decide(world, stored[0])
            assert not written(again) or "EpochStarted" in reported(again)
            if (again_stored := written(again)) and not makes_pods(again):
                assert not written(decide(world, again_stored[0]))
        world.step()
        if stored and not self.refuses_status:
            assert parse_status(world.status).observed_generation == world.generation
            self.conditions_are_true(reached)
            self.what_holds_pods_is_said()

    @property
    def refuses_status(self) -> bool:
        """Whether the last status write was refused, so that the operator retries it later."""
        return any(refusal.kind.endswith("/status") for refusal in self.world.refusals)

    @staticmethod
    def status_comes_first(decision: Decision) -> None:
        """The status is written before creates, and deletes precede creates."""
        order = [_ORDER[type(action)] for action in decision.actions if type(action) in _ORDER]
        made = order.index(2) if 2 in order else len(order)
        assert 0 not in order[made:]

    @property
    def clients_reach_leaders(self) -> bool:
        """Checks that the clients' Service selects leaders, or that its refusal is reported."""
        service = self.world.objects.get(("Service", "demo"))
        if service is not None and "app" not in service["spec"]["selector"]:
            return True
        said = parse_status(self.world.status)
        available = said.condition("Available")
        was_said = available is not None and available.reason in REASONS_OF_CHILDREN and said.endpoint is None
        refused = any((each.kind, each.name) == ("Service", "demo") for each in self.world.refusals)
        return not refused and not was_said

    def conditions_are_true(self, reached: bool) -> None:
        """Available and Ready match the pods, even if the spec or a child is invalid."""
        world = self.world
        groups = parse_status(world.status).groups
        serving = {
            group.index
            for group in groups
            if (pods := self.pods_of(group.index)) and all(pod.ready and not pod.ended for pod in pods)
            if len(pods) == len(group.members) == 2
            if not any(pod.name.endswith("-0") and self.lost_labels(pod) & OF_CLIENTS for pod in pods)
        }
        wanted = world.condition("Available")[1] not in {"Suspended", "ScaledToZero"}
        available = bool(serving) and wanted and reached
        assert (world.condition("Available")[0] == "True") == available, world.status
        if world.condition("Ready")[0] == "True" and wanted:
            assert reached
            assert world.condition("Stalled")[0] == "False"
            assert len(serving) == len(groups)
            served_by = [pod for group in groups for pod in self.pods_of(group.index)]
            assert not any(self.lost_labels(pod) & (OF_CLIENTS | OF_GROUPS) for pod in served_by)

    def lost_labels(self, pod: PodView) -> set[str]:
        """Returns the labels of a pod that differ from those at its creation."""
        made = self.world.manifests[pod.name]["metadata"]["labels"]
        return {key for key in made.keys() | pod.labels.keys() if made.get(key) != pod.labels.get(key)}

    def what_holds_pods_is_said(self) -> None:
        """A condition names each pod that is blocked after its grace period, and the finalizer."""
        world = self.world
        held = [
            name
            for name, pod in world.pods.items()
            if name in world.workers() and pod.finalizers and pod.gone_by and pod.gone_by <= world.now
        ]
        words = " ".join(each.get("message", "") for each in world.status["conditions"])
        assert not held or any(name in words and FINALIZER in words for name in held), (held, words)

    def pods_of(self, index: int) -> list[PodView]:
        world = self.world
        return [pod for name, pod in world.pods.items() if name.startswith(f"demo-{index}-")]

    @rule()
    def inspection_ends(self) -> None:
        self.world.answer_inspection()

    @rule()
    def pods_turn_ready(self) -> None:
        self.world.all_ready()

    @rule()
    def pods_start(self) -> None:
        self.world.all_started()

    @rule(phase=st.sampled_from(list(RankPhase)), loaded=st.integers(0, 2**30), epoch=st.integers(1, 3))
    def a_leader_speaks(self, phase: RankPhase, loaded: int, epoch: int) -> None:
        """A leader reports phases, bytes and step times of its ranks, also for another epoch."""
        ranks = tuple(
            RankStatus(
                rank=rank, pod=rank, phase=phase, loaded_bytes=loaded, total_bytes=2**30, steps=9,
                step_s=loaded / 2**31, compute_s=loaded / 2**32,
            )
            for rank in (0, 1)
        )  # fmt: skip
        self.world.reports[0] = GroupReport(
            group_uid="u", epoch=epoch, plan_hash="h", ready=False, message="waiting", ranks=ranks
        )

    @rule(silent=st.booleans())
    def the_node_goes_silent_or_speaks(self, silent: bool) -> None:
        assert self.world.nodes is not None
        since = self.world.now if silent else None
        self.world.nodes = tuple(replace(node, unreachable_since=since) for node in self.world.nodes)

    @precondition(lambda self: bool(self.world.workers()))
    @rule(data=st.data(), waiting=st.sampled_from(["", "ContainerCreating", "ErrImagePull: no such"]))
    def a_pod_waits(self, data: st.DataObject, waiting: str) -> None:
        name = data.draw(st.sampled_from(self.world.workers()))
        self.world.pods[name] = replace(self.world.pods[name], node="node", waiting=waits(waiting))

    @precondition(lambda self: bool(self.world.workers()))
    @rule(data=st.data())
    def a_pod_is_rejected(self, data: st.DataObject) -> None:
        self.reject(data.draw(st.sampled_from(self.world.workers())))

    def reject(self, name: str) -> None:
        pod = self.world.pods[name]
        if not pod.started:
            self.rejected.add(pod.uid)
            self.world.pods[name] = replace(pod, phase="Failed", reason="OutOfcpu")

    @rule()
    def deleted_pods_go(self) -> None:
        self.world.reap()

    @rule(seconds=st.sampled_from([1, 30, 400, 4000]))
    def time_goes_on(self, seconds: float) -> None:
        self.world.advance_time(seconds)

    @precondition(lambda self: bool(self.world.workers()))
    @rule(data=st.data())
    def a_pod_ends(self, data: st.DataObject) -> None:
        self.world.end_pod(data.draw(st.sampled_from(self.world.workers())))

    @precondition(lambda self: bool(self.world.workers()))
    @rule(data=st.data())
    def a_pod_is_deleted(self, data: st.DataObject) -> None:
        self.world.delete_pod(data.draw(st.sampled_from(self.world.workers())))

    @precondition(lambda self: bool(self.world.workers()))
    @rule(data=st.data())
    def a_pod_vanishes(self, data: st.DataObject) -> None:
        del self.world.pods[data.draw(st.sampled_from(self.world.workers()))]

    @rule(
        change=st.sampled_from(
            [{"replicas": 0}, {"replicas": 1}, {"replicas": 3}, {"suspend": True}, {"suspend": False}]
            + [{"engine": {"maxModelLen": n}} for n in (256, 512)]
            + [{"engine": {"port": 8123}}, {"startup": {"timeout": "20m"}}]
            + [{"model": {"uri": uri}} for uri in ("hf://org/model", "file:///models/tiny")]
            + [{"parallelism": {"mode": "Pipeline", "tensor": tensor}} for tensor in (1, 3)]
        )
    )
    def the_user_changes_the_spec(self, change: dict[str, object]) -> None:
        self.world.change_spec(**change)

    @rule(
        what=st.sampled_from(
            [
                ("Service", "demo"),
                ("Service", "demo-1-ranks"),
                ("NetworkPolicy", "demo-0-ranks"),
                ("PodGroup", "demo-0-*"),
                ("HeteroInference/status", "demo"),
                ("HeteroInference", "demo"),
            ]
        ),
        refused=st.booleans(),
    )
    def something_is_refused_or_not_any_more(self, what: tuple[str, str], refused: bool) -> None:
        self.world.refuses.pop(what, None)
        if refused:
            self.world.refuses[what] = f"{what[0]} {what[1]} is not allowed"

    @rule(name=st.sampled_from(["demo", "demo-0-ranks"]), held=st.booleans())
    def a_name_is_held_or_not_any_more(self, name: str, held: bool) -> None:
        """An object in deletion holds a name, or no longer does."""
        self.world.holds.pop(("Service", name), None)
        if held and ("Service", name) not in self.world.objects:
            self.world.holds["Service", name] = f"Service {name} is being deleted"

    @rule(changed=st.booleans())
    def a_webhook_changes_policies_or_not_any_more(self, changed: bool) -> None:
        self.world.webhook = with_another_rule if changed else dict

    @rule(webhook=st.sampled_from([*HIDING, without_annotations, dict]))
    def a_webhook_changes_pods_or_not_any_more(self, webhook: Webhook) -> None:
        self.world.pod_webhook = webhook

    @rule(takes=st.booleans())
    def a_controller_takes_labels_off_pods_or_not_any_more(self, takes: bool) -> None:
        self.world.pod_taker = takes

    @rule()
    def an_hour_goes_by(self) -> None:
        """An hour passes; the world checks the limits of each action."""
        self.world.live(3600)

    @rule(
        meddler=st.sampled_from([change_policies, delete_policies, lead_clients_elsewhere, leave_all_alone])
    )
    def a_controller_undoes_what_is_written_or_not_any_more(self, meddler: Callable[[Objects], None]) -> None:
        self.world.meddler = meddler

    @rule(silent=st.booleans())
    def no_dry_run_is_answered_or_all_are(self, silent: bool) -> None:
        self.world.silent = silent

    @rule()
    def the_operator_starts_again(self) -> None:
        self.world.restart_operator()

    @rule(version=st.integers(1, 3))
    def the_operator_is_upgraded(self, version: int) -> None:
        """Changes the operator's worker images, or changes them back."""
        images = WorkerImages(cpu=f"worker-cpu:{version}", gpu=f"worker:{version}")
        self.world.options = replace(self.world.options, images=images)
        self.world.restart_operator()

    @rule(refused=st.booleans())
    def pods_are_refused_or_not_any_more(self, refused: bool) -> None:
        self.world.refuses_pods = "exceeded quota" if refused else ""

    @precondition(lambda self: bool(self.world.objects))
    @rule(data=st.data(), how=st.sampled_from(["gone", "labels", "data"]))
    def a_child_is_damaged(self, data: st.DataObject, how: str) -> None:
        key = data.draw(st.sampled_from(sorted(self.world.objects)))
        stored = self.world.objects[key]
        if how == "gone":
            del self.world.objects[key]
        elif how == "labels":
            metadata = {**stored["metadata"], "labels": {}}
            self.world.objects[key] = {**stored, "metadata": metadata}
        elif "data" in stored:
            self.world.objects[key] = {**stored, "data": dict.fromkeys(stored["data"], '{"new": 1')}

    @precondition(lambda self: bool(self.world.pods))
    @rule(data=st.data())
    def labels_of_a_pod_are_damaged(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.world.pods)))
        labels = {key: "?" if key == names.LABEL_GROUP else "" for key in self.world.pods[name].labels}
        self.world.pods[name] = replace(self.world.pods[name], labels=labels)

    @precondition(lambda self: bool(self.world.pods))
    @rule(
        data=st.data(),
        label=st.sampled_from(["resource", "component", "group", "leader"]),
        value=st.sampled_from([None, "true", "7", "inspect", "fetch", "worker"]),
    )
    def a_label_of_a_pod_is_damaged(self, data: st.DataObject, label: str, value: str | None) -> None:
        self.world.relabel(data.draw(st.sampled_from(sorted(self.world.pods))), **{label: value})

    @rule()
    def labels_are_put_back(self) -> None:
        self.world.put_labels_back()

    @rule(held=st.booleans())
    def somebody_holds_pods_or_lets_them_go(self, held: bool) -> None:
        finalizers = (FINALIZER,) if held else ()
        self.world.pods = {
            name: replace(pod, finalizers=finalizers if name in self.world.workers() else ())
            for name, pod in self.world.pods.items()
        }

    @rule(lost=st.sampled_from([{}, {"groups": 7}, {"groups": [{"phase": "New"}], "conditions": [3]}]))
    def the_status_is_lost(self, lost: dict[str, Any]) -> None:
        self.world.status = lost
        self.world.version += 1

    @invariant()
    def names_are_never_used_twice(self) -> None:
        """A pod that has run may have met others, so its name is never reused."""
        for name in self.world.workers():
            pod = self.world.pods[name]
            if pod.started:
                self.ran.setdefault(name, set()).add(pod.uid)
        assert all(len(uids) == 1 for uids in self.ran.values()), self.ran

    @invariant()
    def one_refusal_of_an_object_is_kept(self) -> None:
        """An object of an epoch changes its name with the epoch, but keeps one refusal."""
        scopes = [each.scopes for each in self.world.refusals if each.kind == "PodGroup" and each.scopes]
        assert len(set(scopes)) == len(scopes), self.world.refusals

    @invariant()
    def a_rejection_is_counted_once(self) -> None:
        counted = sum(group.rejections for group in parse_status(self.world.status).groups)
        assert counted <= len(self.rejected), self.world.status

    @invariant()
    def one_epoch_of_a_group_at_a_time(self) -> None:
        epochs: dict[str, set[str]] = {}
        for name in self.world.workers():
            _, group, epoch, _ = name.split("-")
            epochs.setdefault(group, set()).add(epoch)
        assert all(len(found) == 1 for found in epochs.values()), epochs

    @invariant()
    def one_image_of_an_epoch(self) -> None:
        images: dict[str, set[str]] = {}
        for name in self.world.workers():
            (container,) = self.world.manifests[name]["spec"]["containers"]
            images.setdefault(name.rpartition("-")[0], set()).add(container["image"])
        assert all(len(found) == 1 for found in images.values()), images

    def teardown(self) -> None:
        """From any state, a fresh start reaches a fully serving resource."""
        self.world.spec = cpu_pair(restart={"maxRestarts": 3})
        self.world.change_spec(suspend=False, replicas=2, restartedAt="2026-05-05T00:00:00Z")
        self.world.refuses.clear()
        self.world.holds.clear()
        self.world.silent = False
        self.world.webhook = dict
        self.world.meddler = leave_all_alone
        self.world.pod_webhook = dict
        self.world.pod_taker = False
        self.world.strangers.clear()
        self.world.refuses_pods = ""
        self.the_node_goes_silent_or_speaks(silent=False)
        self.somebody_holds_pods_or_lets_them_go(held=False)
        self.world.reports.clear()
        self.labels_are_put_back()
        for _ in range(12):
            self.world.settle()
            self.world.answer_inspection()
            self.world.reap()
            self.world.advance_time(4000)
            self.world.settle()
            self.world.all_ready()
        self.world.settle()
        assert self.world.status["readyReplicas"] == 2, self.world.status["groups"]
        assert self.world.condition("Ready") == ("True", "Serving")
        self.world.live(3600)
        assert self.world.idle_actions() == []


_ORDER = {PatchStatus: 0, CreateObject: 2, ApplyObject: 2}
"""Order of actions: the status, then the deletes that it explains, then creates."""

TestGroupLife = GroupLife.TestCase
TestGroupLife.settings = settings(max_examples=8, stateful_step_count=25, deadline=None)


def test_a_late_rejection_of_a_pod_is_handled() -> None:
    """`GroupLife` finds this case rarely."""
    life = GroupLife()
    while not life.world.workers():
        life.reconcile()
        life.inspection_ends()
    life.reject(life.world.workers()[0])
    for _ in range(3):
        life.reconcile()
        life.time_goes_on(30)
        life.a_rejection_is_counted_once()
    life.teardown()
