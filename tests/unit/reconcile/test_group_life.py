"""Causes that end an epoch, causes that only replace a pod, and limits of a start."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from heteroinfer_contract.failure import Failure, FailureReason
from heteroinfer_contract.group_report import GroupReport, RankPhase, RankStatus
from tests.unit.reconcile.world import World, cpu_pair, waits

LEADER, FOLLOWER = "demo-0-1-0", "demo-0-1-1"
NEXT = ["demo-0-2-0", "demo-0-2-1"]
CULPRIT = Failure(
    reason=FailureReason.RANK_EXITED, message="rank 1 was killed by SIGKILL", pod=1, rank=1, exit_code=-9
)


@pytest.fixture
def world() -> World:
    return World(spec=cpu_pair())


def create_pods(world: World) -> None:
    """Runs a resource until its pods are created; no pod runs."""
    world.settle()
    world.answer_inspection()
    world.settle()
    world.reap()
    assert world.workers() == [LEADER, FOLLOWER]


def change(world: World, name: str, **fields: Any) -> None:
    world.pods[name] = replace(world.pods[name], **fields)


def report(world: World, *phases: RankPhase, **fields: Any) -> None:
    """Lets the leader report the progress of each rank."""
    ranks = tuple(RankStatus(rank=i, pod=i, phase=phase, **fields) for i, phase in enumerate(phases))
    world.reports[0] = GroupReport(
        group_uid="u", epoch=1, plan_hash="h", ready=False, message="waiting: rank 1 (pod 1)", ranks=ranks
    )


def silence_node(world: World, name: str = "node") -> None:
    assert world.nodes is not None
    world.nodes = tuple(
        replace(node, schedulable=False, unreachable_since=world.now) if node.name == name else node
        for node in world.nodes
    )


def group(world: World) -> dict[str, Any]:
    (found,) = world.status["groups"]
    return dict(found)


# Pods that end before they ran


@pytest.mark.parametrize("others_run", [False, True])
@pytest.mark.parametrize("reason", ["OutOfcpu", "UnexpectedAdmissionError"])
def test_a_pod_rejected_by_its_node_is_replaced_without_the_others(
    world: World, reason: str, *, others_run: bool
) -> None:
    create_pods(world)
    if others_run:
        change(world, LEADER, phase="Running", started=True, node="node")
    kept = world.pods[LEADER].uid
    rejected = world.pods[FOLLOWER].uid
    change(world, FOLLOWER, phase="Failed", reason=reason, message="no capacity", node="node")
    decision = world.step()
    assert f"rejected by node node before it ran ({reason}: no capacity)" in group(world)["message"]
    assert FOLLOWER in world.pods, "not immediately: the scheduler may choose the same node"
    assert decision.look_again_s == pytest.approx(10.1)
    world.advance_time(10)
    world.settle()
    assert (world.pods[LEADER].uid, world.pods[FOLLOWER].uid != rejected) == (kept, True)
    assert world.graces[FOLLOWER] == 0
    assert "PodReplaced" in world.events
    assert (group(world)["epoch"], group(world)["failures"]) == (1, [])
    world.all_ready()
    world.settle()
    assert world.condition("Ready") == ("True", "Serving")


def reject(world: World, name: str) -> None:
    change(world, name, phase="Failed", reason="OutOfcpu", message="no capacity", node="node")


@pytest.mark.parametrize("pending_s", [0, 4000])
def test_a_rejection_is_counted_only_once(world: World, pending_s: float) -> None:
    """The operator may see the deletion late, or restart in the meantime."""
    create_pods(world)
    world.advance_time(pending_s)
    reject(world, FOLLOWER)
    rejected = dict(world.pods)
    world.advance_time(30)
    for _ in range(5):
        world.pods = dict(rejected)
        world.step()
        assert group(world)["rejections"] == 1
        world.restart_operator()
    assert group(world)["rejectedPods"] == [1]
    world.settle()
    assert world.workers() == [LEADER, FOLLOWER]
    assert group(world)["rejectedPods"] == []


def test_successive_rejections_are_all_counted(world: World) -> None:
    create_pods(world)
    assert world.pods[LEADER].created == world.pods[FOLLOWER].created
    reject(world, FOLLOWER)
    world.advance_time(10)
    world.settle()
    reject(world, LEADER)
    world.advance_time(10)
    world.settle()
    assert group(world)["rejections"] == 2


def test_rejections_count_after_a_clock_step_back(world: World) -> None:
    create_pods(world)
    reject(world, FOLLOWER)
    world.advance_time(10)
    world.step()
    world.set_clock(-3600)
    world.settle()
    reject(world, FOLLOWER)
    world.advance_time(20)
    world.settle()
    assert group(world)["rejections"] == 2


def test_a_pending_pod_that_is_deleted_is_replaced_once_it_is_gone(world: World) -> None:
    create_pods(world)
    kept = world.pods[LEADER].uid
    world.delete_pod(FOLLOWER)
    world.settle()
    assert world.pods[FOLLOWER].deleting, "its name is free only once the pod is gone"
    assert "was deleted before it ran" in group(world)["message"]
    world.reap()
    world.settle()
    assert world.workers() == [LEADER, FOLLOWER]
    assert world.pods[LEADER].uid == kept
    assert group(world)["epoch"] == 1


def test_a_vanished_pending_pod_ends_its_epoch_and_does_not_count_as_a_restart(world: World) -> None:
    """The pod may have run since the last reconcile."""
    create_pods(world)
    world.settle()
    del world.pods[FOLLOWER]
    world.settle()
    world.reap()
    world.settle()
    assert world.workers() == NEXT
    (failure,) = group(world)["failures"]
    assert (failure["reason"], failure["counted"]) == ("PodDeleted", False)
    assert FOLLOWER in failure["message"]


def test_repeatedly_vanishing_pods_are_created_with_backoff(world: World) -> None:
    create_pods(world)
    for _ in range(360):
        world.advance_time(10)
        world.settle()
        world.pods.clear()
    assert len(world.created) <= 60, f"{len(world.created)} pods in an hour"
    assert world.condition("Stalled")[0] == "False"


def test_a_group_that_vanishes_after_it_ran_has_failed(world: World) -> None:
    world.serve()
    world.pods.clear()
    world.settle()
    assert world.workers() == NEXT
    assert group(world)["failures"][0]["reason"] == "PodDeleted"


@pytest.mark.parametrize("end", ["rollout", "failure"])
def test_a_group_that_ends_on_a_silent_node_is_reported_once(world: World, end: str) -> None:
    world.serve()
    silence_node(world)
    world.step()
    if end == "rollout":
        world.change_spec(engine={"maxModelLen": 512})
        world.step()  # the new revision is tried first
    else:
        world.end_pod(LEADER)
    world.step()
    assert group(world)["phase"] == "Stopping"
    assert "its kubelet has sent no heartbeat since" in group(world)["message"]
    reported = group(world)
    world.step()
    assert group(world) == reported


def test_a_failed_pod_ends_the_epoch_while_another_pod_is_pending(world: World) -> None:
    create_pods(world)
    world.end_pod(LEADER, exit_code=64, message="")
    world.settle()
    world.reap()
    world.settle()
    assert world.workers() == NEXT
    assert group(world)["failures"][0]["exitCode"] == 64


# Lost nodes


def on_two_nodes(world: World) -> None:
    """Runs a serving group whose follower has its own node."""
    assert world.nodes is not None
    world.nodes = (*world.nodes, replace(world.nodes[0], name="far"))
    create_pods(world)
    change(world, FOLLOWER, node="far")
    world.all_ready()
    world.settle()


def test_pods_of_a_lost_node_are_force_deleted(world: World) -> None:
    on_two_nodes(world)
    silence_node(world, "far")
    change(world, FOLLOWER, ready=False)
    decision = world.step()
    assert "node far of pod demo-0-1-1 is unreachable: its kubelet has sent no" in group(world)["message"]
    assert FOLLOWER in world.pods
    assert decision.look_again_s == pytest.approx(15), "its leader still answers"
    world.advance_time(59)
    assert world.step().look_again_s == pytest.approx(1)
    world.advance_time(1)
    world.step()
    assert world.condition("Ready") == ("False", "NodeLost")
    assert world.graces == {
        LEADER: 2,
        FOLLOWER: 0,
        **{n: g for n, g in world.graces.items() if "inspect" in n},
    }
    world.reap()
    world.settle()
    assert world.workers() == NEXT
    (failure,) = group(world)["failures"]
    assert (failure["reason"], failure["counted"], group(world).get("restarts", 0)) == ("NodeLost", False, 0)


def test_a_lost_pod_is_attributed_to_its_lost_node(world: World) -> None:
    world.change_spec(restart={"maxRestarts": 0})
    on_two_nodes(world)
    seen = Failure(reason=FailureReason.POD_LOST, message="pod 1 was silent", pod=1)
    world.end_pod(LEADER, exit_code=71, message=seen.to_json())
    world.step()
    assert world.condition("Failed")[0] == "True", "the loss of the node is not known yet"
    world.advance_time(40)
    silence_node(world, "far")
    world.settle()
    assert FOLLOWER in world.pods, "deleted, but no kubelet confirms its end"
    world.advance_time(60)
    world.settle()
    assert FOLLOWER not in world.pods
    world.reap()
    world.settle()
    assert world.condition("Failed")[0] == "False"
    assert world.workers() == NEXT
    (failure,) = group(world)["failures"]
    assert (failure["reason"], failure["counted"], failure["epoch"]) == ("NodeLost", False, 1)
    assert "before that: pod 1 was silent" in failure["message"]
    assert "NodeLost" in world.events


def test_a_final_failure_on_a_lost_node_keeps_the_number_of_restarts(world: World) -> None:
    world.change_spec(restart={"maxRestarts": 1})
    on_two_nodes(world)
    world.end_pod(LEADER, exit_code=71, message="")
    world.settle()
    world.reap()
    world.settle()
    leader, follower = NEXT
    change(world, follower, node="far")
    world.all_ready()
    world.settle()
    seen = Failure(reason=FailureReason.POD_LOST, message="pod 1 was silent", pod=1)
    world.end_pod(leader, exit_code=71, message=seen.to_json())
    world.settle()
    assert (world.condition("Failed")[0], group(world)["restarts"]) == ("True", 1), "no restart follows"
    silence_node(world, "far")
    world.advance_time(60)
    world.settle()
    assert world.condition("Failed")[0] == "False"
    assert group(world)["failures"][-1]["reason"] == "NodeLost"
    assert group(world)["restarts"] == 1, "the first failure still counts"


def test_a_pod_of_a_deleted_node_is_force_deleted_after_its_grace_period(world: World) -> None:
    on_two_nodes(world)
    assert world.nodes is not None
    world.nodes = world.nodes[:1]
    world.delete_pod(FOLLOWER)
    world.settle()
    assert FOLLOWER in world.pods, "the operator may not have seen the node yet"
    world.advance_time(100)
    world.settle()
    assert FOLLOWER not in world.pods


def test_a_lost_pod_is_attributed_to_its_deleted_node(world: World) -> None:
    on_two_nodes(world)
    assert world.nodes is not None
    world.nodes = world.nodes[:1]
    seen = Failure(reason=FailureReason.POD_LOST, message="pod 1 was silent", pod=1)
    world.end_pod(LEADER, exit_code=71, message=seen.to_json())
    world.settle()
    assert group(world)["failures"][-1]["reason"] == "PodLost", "the operator may not have seen the node yet"
    world.advance_time(100)
    world.settle()
    world.reap()
    world.settle()
    assert world.workers() == NEXT
    (failure,) = group(world)["failures"]
    assert (failure["reason"], failure["counted"], group(world).get("restarts", 0)) == ("NodeLost", False, 0)
    assert "node far of pod demo-0-1-1 no longer exists" in failure["message"]


def test_no_node_is_lost_without_permission_to_read_nodes(world: World) -> None:
    on_two_nodes(world)
    world.nodes = None
    world.delete_pod(FOLLOWER)
    world.advance_time(1e5)
    world.settle()
    assert FOLLOWER in world.pods


@pytest.mark.parametrize("how", ["suspend", "scale", "delete"])
def test_a_stopping_group_does_not_wait_for_a_lost_node(world: World, how: str) -> None:
    on_two_nodes(world)
    silence_node(world, "far")
    if how == "delete":
        world.deleting = True
    else:
        world.change_spec(**({"suspend": True} if how == "suspend" else {"replicas": 0}))
    world.settle()
    assert world.pods[FOLLOWER].deleting
    world.advance_time(60)
    world.settle()
    assert FOLLOWER not in world.pods


def test_a_pending_pod_on_a_lost_node_ends_its_epoch(world: World) -> None:
    """The lost node does not report whether the pod runs."""
    assert world.nodes is not None
    world.nodes = (*world.nodes, replace(world.nodes[0], name="far"))
    create_pods(world)
    change(world, FOLLOWER, node="far")
    silence_node(world, "far")
    world.advance_time(60)
    world.settle()
    assert world.graces[FOLLOWER] == 0
    world.reap()
    world.settle()
    assert world.workers() == NEXT
    (failure,) = group(world)["failures"]
    assert (failure["reason"], failure["counted"]) == ("NodeLost", False)


# Ends that let running requests finish


@pytest.mark.parametrize(
    "how", ["suspend", "scale", "rollout", "a pod is deleted", "a pod is evicted", "the resource is deleted"]
)
def test_pods_stopped_on_purpose_keep_their_grace_period(world: World, how: str) -> None:
    world.serve()
    match how:
        case "suspend":
            world.change_spec(suspend=True)
        case "scale":
            world.change_spec(replicas=0)
        case "rollout":
            world.change_spec(engine={"maxModelLen": 512})
        case "a pod is deleted":
            world.delete_pod(FOLLOWER)
        case "a pod is evicted":
            world.delete_pod(FOLLOWER)
            change(world, FOLLOWER, disrupted="EvictionByEvictionAPI")
        case _:
            world.deleting = True
    world.settle()
    assert world.graces[LEADER] is None
    assert world.condition("Ready")[0] == "False"


def test_pods_of_a_failed_epoch_are_deleted_at_once(world: World) -> None:
    world.serve()
    world.end_pod(FOLLOWER, message=CULPRIT.to_json())
    world.settle()
    assert world.graces[LEADER] == 2


# Causes


def test_reports_the_rank_that_ran_out_of_memory(world: World) -> None:
    world.serve()
    world.end_pod(FOLLOWER, message=CULPRIT.to_json(), reason="OOMKilled")
    world.step()
    assert world.condition("Ready") == ("False", "OOMKilled")
    (failure,) = group(world)["failures"]
    assert (failure["rank"], failure["exitCode"]) == (1, -9)
    assert failure["message"].startswith("pod demo-0-1-1 reached its memory limit: rank 1 was killed")


def test_the_condition_failed_reports_rank_reason_exit_code_and_last_log_line(world: World) -> None:
    world.change_spec(restart={"maxRestarts": 0})
    world.serve()
    said = replace(CULPRIT, message="x" * 900, last_log="y" * 200 + " CUDA error: an illegal access")
    world.end_pod(FOLLOWER, message=said.to_json())
    world.settle()
    assert world.condition("Failed") == ("True", "RestartsUsedUp")
    (failure,) = group(world)["failures"]
    assert (failure["rank"], failure["reason"], failure["exitCode"]) == (1, "RankExited", -9)
    assert failure["message"].endswith("CUDA error: an illegal access)")
    assert "rank 1" in group(world)["message"]


# Start-up by phase


def test_the_phases_of_a_start_with_their_times(world: World) -> None:
    reported = []

    def look() -> None:
        world.advance_time(10)
        world.settle()
        startup = group(world).get("startup")
        reported.append((startup["phase"], startup["since"]) if startup else None)
        if group(world)["phase"] == "Starting":
            assert world.condition("Progressing") == ("True", group(world)["startup"]["phase"])

    look()
    world.answer_inspection()
    look()
    world.pods = {name: replace(pod, node="node") for name, pod in world.pods.items()}
    look()
    world.all_started()
    look()
    report(world, RankPhase.CONNECTING, RankPhase.LOADING)
    look()
    report(world, RankPhase.LOADING, RankPhase.LOADING)
    look()
    look()
    report(world, RankPhase.READY, RankPhase.WARMING_UP)
    look()
    world.all_ready()
    look()
    seconds = (10, 20, 30, 40, 60, 80)
    since = [f"2026-01-01T00:{s // 60:02}:{s % 60:02}Z" for s in seconds]
    model, scheduling, image, connecting, loading, warming_up = since
    assert reported == [
        ("Model", model),
        ("Scheduling", scheduling),
        ("Image", image),
        ("Connecting", connecting),
        ("Connecting", connecting),
        ("Loading", loading),
        ("Loading", loading),
        ("WarmingUp", warming_up),
        None,
    ]


def test_a_slow_pull_or_missing_capacity_is_reported_and_ends_nothing(world: World) -> None:
    create_pods(world)
    change(world, LEADER, phase="Running", started=True, node="node")
    change(world, FOLLOWER, unschedulable="0/3 nodes are available")
    world.advance_time(1e6)
    world.settle()
    assert group(world)["message"] == "pod demo-0-1-1 is not placed: 0/3 nodes are available"
    change(world, FOLLOWER, unschedulable="", node="node", waiting=waits("ContainerCreating"))
    world.advance_time(1e6)
    world.settle()
    assert group(world)["message"] == "pod demo-0-1-1 waits: ContainerCreating"
    assert "PodWaits" not in world.events
    for waiting in (
        "ErrImagePull: no such tag",
        "ImagePullBackOff: no such tag",
        "ErrImagePull: no such tag",
    ):
        change(world, FOLLOWER, waiting=waits(waiting))
        world.advance_time(1e6)
        world.settle()
        assert group(world)["message"] == f"pod demo-0-1-1 waits: {waiting}"
    assert world.events.count("PodWaits") == 1
    assert world.workers() == [LEADER, FOLLOWER]
    assert (group(world)["epoch"], group(world)["startup"]["phase"]) == (1, "Image")


def test_load_progress_is_written_once_a_minute_without_a_deadline(world: World) -> None:
    create_pods(world)
    world.all_started()
    report(world, RankPhase.LOADING, RankPhase.LOADING, loaded_bytes=2**20, total_bytes=2**30)
    world.settle()
    assert group(world)["startup"]["bytesDone"] == 2 * 2**20
    assert group(world)["message"] == "reading weights: 2.0 MiB of 2.00 GiB"
    report(world, RankPhase.LOADING, RankPhase.LOADING, loaded_bytes=2**21, total_bytes=2**30)
    world.advance_time(30)
    assert world.step().look_again_s == pytest.approx(15)
    assert world.writes == []
    world.advance_time(30)
    world.settle()
    assert group(world)["startup"]["bytesDone"] == 4 * 2**20
    world.advance_time(1e6)
    world.settle()
    assert group(world)["epoch"] == 1


def test_pods_that_run_without_connecting_are_restarted(world: World) -> None:
    world.change_spec(startup={"timeout": "5m"})
    create_pods(world)
    world.all_started()
    world.settle()
    world.advance_time(1e5)
    world.settle()
    assert group(world)["epoch"] == 1, "the leader does not answer the operator: no conclusion is possible"
    assert "does not answer the operator" in group(world)["message"]
    change(world, FOLLOWER, node="")
    world.settle()
    change(world, FOLLOWER, node="node")
    report(world, RankPhase.CONNECTING, RankPhase.STARTING)
    world.settle()
    world.live(329)
    assert group(world)["epoch"] == 1
    world.live(20)
    world.reap()
    world.settle()
    assert world.workers() == NEXT
    (failure,) = group(world)["failures"]
    assert (failure["reason"], failure["counted"]) == ("StartupTimeout", True)
    expected = "their ranks did not connect within 300 s (startup.timeout): waiting: rank 1 (pod 1)"
    assert expected in failure["message"]


def test_the_start_timeout_counts_only_time_that_the_operator_observed(world: World) -> None:
    """A clock change, or a stopped or restarted operator, does not make a rank late."""
    world.change_spec(startup={"timeout": "5m"})
    create_pods(world)
    world.all_started()
    report(world, RankPhase.CONNECTING, RankPhase.STARTING)
    world.live(60)
    for _ in range(3):
        world.set_clock(36_000)
        world.settle()
        world.set_clock(-72_000)
        world.settle()
        world.advance_time(36_000)  # the operator does not run
        world.settle()
    world.live(150)
    assert (group(world)["epoch"], group(world)["startup"]["phase"]) == (1, "Connecting")
    world.restart_operator()
    world.live(320)
    assert group(world)["epoch"] == 1
    world.live(20)
    assert group(world)["epoch"] == 2
    assert group(world)["failures"][0]["reason"] == "StartupTimeout"


# Status of a resource in deletion


def test_deletion_shows_in_the_status(world: World) -> None:
    world.serve()
    world.deleting = True
    world.generation += 1
    world.settle()
    assert world.condition("Ready") == ("False", "Deleting")
    assert world.condition("Progressing") == ("True", "Deleting")
    assert world.status["observedGeneration"] == world.generation
    assert group(world)["phase"] == "Stopping"
    assert world.status.get("readyReplicas", 0) == 0
    world.advance_time(30)
    world.step()
    assert world.writes == []


def test_messages_do_not_contain_the_time_of_the_reconcile(world: World) -> None:
    """Otherwise every reconcile would write the status."""
    world.serve()
    silence_node(world)
    world.settle()
    for _ in range(3):
        world.now += timedelta(seconds=7)
        world.step()
        assert world.writes == []


def test_ready_reports_the_failure_until_the_group_recovers() -> None:
    """Earlier, a suspension cleared the reason too early, and a group that served for days kept it."""
    world = World(spec=cpu_pair(restart={"maxRestarts": 0}))
    world.serve()
    world.end_pod(world.workers()[1])
    turn(world)
    assert world.condition("Ready") == ("False", "PodFailed")
    for changes in ({"suspend": True}, {"suspend": False}, {"replicas": 0}, {"replicas": 1}):
        world.change_spec(**changes)
        turn(world)
    assert world.condition("Ready") == ("False", "PodFailed"), "its restarts are still used up"
    (stored,) = world.status["groups"]
    world.status = {**world.status, "groups": [{k: v for k, v in stored.items() if k != "afterFailure"}]}
    world.version += 1
    world.settle()
    assert world.condition("Ready") == ("False", "PodFailed"), "also if an older operator wrote the status"


def test_ready_does_not_report_a_failure_after_the_group_has_served() -> None:
    world = World(spec=cpu_pair())
    world.serve()
    world.end_pod(world.workers()[1])
    turn(world)
    world.all_ready()
    world.settle()
    assert world.condition("Ready") == ("True", "Serving")
    world.advance_time(86_400)
    name = world.workers()[1]
    world.pods[name] = replace(world.pods[name], ready=False)
    world.settle()
    assert world.condition("Ready") == ("False", "Connecting")


def turn(world: World) -> None:
    """Lets deleted pods disappear, and time pass."""
    for _ in range(3):
        world.settle()
        world.reap()
        world.advance_time(60)
