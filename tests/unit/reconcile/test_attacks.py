"""Defects that a second attack found, each with the shortest way to cause it."""

from dataclasses import replace
from datetime import timedelta

import pytest

from heteroinfer_contract import names
from heteroinfer_contract.failure import Failure, FailureReason
from heteroinfer_contract.group_key import KEY_BYTES
from heteroinfer_operator.api import parse_status
from heteroinfer_operator.manifests.worker_pods import WorkerImages
from tests.unit.reconcile.world import OPTIONS, World, cpu_pair, waits

CLAIM = "PersistentVolumeClaim"
REFUSED = {"parallelism": {"mode": "Pipeline", "tensor": 3}}
HUB = {"uri": "hf://org/model", "cache": {"size": "10Gi"}}


@pytest.fixture
def world() -> World:
    """Returns a serving pair of CPU pods."""
    world = World(spec=cpu_pair())
    world.serve()
    return world


def kinds(world: World) -> list[str]:
    return sorted(kind for kind, _ in world.objects)


def relabel(world: World, label: str, value: str | None) -> None:
    """Overwrites or removes a label of every worker pod."""
    for name in world.workers():
        labels = {key: kept for key, kept in world.pods[name].labels.items() if key != label}
        labels |= {label: value} if value is not None else {}
        world.pods[name] = replace(world.pods[name], labels=labels)


def made(world: World) -> list[str]:
    """Returns the names of all worker pods that were ever created."""
    return [name for name in world.created if "inspect" not in name]


def create_pods(world: World) -> None:
    """Runs a new resource up to the reconcile that creates its pods."""
    world.settle()
    world.answer_inspection()
    while not world.workers():
        world.step()


@pytest.mark.parametrize("refused", [REFUSED, {"roles": "none"}], ids=["by a rule", "not to be read"])
def test_a_refused_spec_deletes_no_claim(refused: dict[str, object]) -> None:
    """Earlier, a typo in the spec during the first fetch deleted the claim with the fetched files."""
    world = World(spec=cpu_pair(model=HUB))
    world.settle()
    assert CLAIM in kinds(world)
    world.change_spec(**refused)
    world.settle()
    assert CLAIM in kinds(world)
    world.change_spec(**cpu_pair(model={**HUB, "cache": {"size": "20Gi"}}))
    world.settle()
    assert kinds(world).count(CLAIM) == 1  # the accepted spec does not need the other claim


def test_a_refused_spec_deletes_no_service_of_clients(world: World) -> None:
    world.change_spec(replicas=0)
    world.settle()
    world.reap()
    world.change_spec(**REFUSED)
    world.settle()
    assert ("Service", "demo") in world.objects


def test_an_epoch_suspended_at_its_start_is_not_started_again() -> None:
    """The operator created the pods, then stopped before it saw any pod; the pods ran in the meantime."""
    world = World(spec=cpu_pair())
    create_pods(world)
    ran = world.workers()
    world.all_ready()
    world.change_spec(suspend=True)
    world.settle()
    world.reap()
    world.change_spec(suspend=False)
    world.settle()
    assert world.workers()
    assert not set(ran) & set(world.workers())


def test_unseen_loss_of_all_pods_ends_their_epoch() -> None:
    world = World(spec=cpu_pair())
    create_pods(world)
    world.step()
    ran = world.workers()
    world.all_ready()
    world.pods.clear()
    world.settle()
    assert world.workers()
    assert not set(ran) & set(world.workers())


@pytest.mark.parametrize(
    ("away", "back"), [({"suspend": True}, {"suspend": False}), ({"replicas": 0}, {"replicas": 1})]
)
def test_a_reverted_change_is_not_a_failure(
    world: World, away: dict[str, object], back: dict[str, object]
) -> None:
    """Earlier, the operator counted draining pods as deleted by a user, and so as a restart."""
    world.change_spec(**away)
    world.settle()
    world.change_spec(**back)
    world.settle()
    world.reap()
    world.settle()
    world.all_ready()
    world.settle()
    assert world.condition("Ready") == ("True", "Serving")
    assert world.status["groups"][0].get("failures", []) == []


@pytest.mark.parametrize("label", [names.LABEL_REVISION, names.LABEL_PLAN])
@pytest.mark.parametrize("value", ["zzz", "0", None])
def test_a_damaged_label_has_no_effect(world: World, label: str, value: str | None) -> None:
    pods, objects = world.workers(), set(world.objects)
    relabel(world, label, value)
    world.settle()
    assert world.condition("Ready") == ("True", "Serving")
    assert world.condition("Planned")[0] == "True"
    assert world.workers() == pods
    assert not any(pod.deleting for pod in world.pods.values())
    assert set(world.objects) == objects


def test_a_group_without_its_revision_label_keeps_serving_under_an_unplannable_spec(world: World) -> None:
    relabel(world, names.LABEL_REVISION, None)
    world.change_spec(engine={"maxModelLen": 100_000})
    world.settle()
    assert world.condition("Available") == ("True", "Serving")
    assert not any(pod.deleting for pod in world.pods.values())


def test_a_copy_of_a_pod_is_not_a_rank(world: World) -> None:
    """A user copied a pod by `kubectl get -o yaml`, with labels and owner, under another name."""
    leader = world.pods[world.workers()[0]]
    world.pods["copy"] = replace(leader, name="copy", uid="uid-copy", ready=False, started=False)
    world.settle()
    assert world.condition("Ready") == ("True", "Serving")
    world.end_pod("copy")
    world.settle()
    assert world.condition("Ready") == ("True", "Serving")


def test_an_eviction_never_ends_in_failed(world: World) -> None:
    """Earlier restarts within a larger limit do not fail the group after the limit was lowered."""
    world.end_pod(world.workers()[0])
    world.settle()
    world.reap()
    world.settle()
    world.all_ready()
    world.change_spec(restart={"maxRestarts": 0})
    world.settle()
    evicted = world.workers()[0]
    world.pods[evicted] = replace(world.pods[evicted], disrupted="EvictionByEvictionAPI", deleting=True)
    world.settle()
    world.reap()
    world.settle()
    assert world.condition("Failed")[0] == "False"
    world.all_ready()
    world.settle()
    assert world.condition("Ready") == ("True", "Serving")


def test_a_clock_step_back_does_not_prolong_a_wait(world: World) -> None:
    world.advance_time(36_000)
    for _ in range(2):
        world.end_pod(world.workers()[0])
        world.settle()
        world.reap()
        world.settle()
    assert world.status["groups"][0]["phase"] == "Waiting"
    world.set_clock(-36_000)
    world.settle()
    world.advance_time(301)  # restart.backoffMax is 5 m
    world.settle()
    assert world.workers()


@pytest.mark.parametrize(
    "what", [("NetworkPolicy", "demo-0-ranks"), ("HeteroInference/status", "demo"), "Pod"]
)
def test_a_clock_step_back_does_not_prolong_a_refusal(what: tuple[str, str] | str) -> None:
    """An object that is allowed again is retried within the longest backoff."""
    world = World(spec=cpu_pair())
    world.answer_inspection()
    if isinstance(what, str):
        world.refuses_pods = "exceeded quota"
    else:
        world.refuses[what] = "not allowed"
    for _ in range(6):
        world.step()
        world.answer_inspection()
        world.advance_time(60)
    world.set_clock(-86_400)
    world.refuses.clear()
    world.refuses_pods = ""
    for _ in range(31):
        world.step()
        world.answer_inspection()
        world.advance_time(10)
    assert len(world.workers()) == 2
    assert parse_status(world.status).observed_generation == world.generation


def test_a_clock_step_back_does_not_repeat_model_inspections(world: World) -> None:
    world.advance_time(36_000)
    failure = Failure(reason=FailureReason.MODEL_NOT_READABLE, message="no such file", pod=0)
    world.end_pod(world.workers()[0], message=failure.to_json())
    world.settle()
    world.reap()
    world.now -= timedelta(hours=10)
    world.settle()
    world.answer_inspection()
    world.settle()
    world.advance_time(5)
    world.settle()
    assert world.condition("ModelReady") == ("True", "ProfileRead")
    assert set(world.pods) == set(world.workers())


@pytest.mark.parametrize("replicas", ["two", 65, None])
def test_unreadable_replicas_do_not_mean_zero(replicas: object) -> None:
    world = World(spec=cpu_pair(replicas=replicas, **({} if replicas else REFUSED)), options=OPTIONS)
    world.settle()
    assert world.condition("Ready") == ("False", "InvalidSpec")


def test_a_pod_lost_together_with_the_status_is_not_created_again(world: World) -> None:
    """No record shows that the pod had run, so its name is not reused."""
    ran = world.workers()
    world.status = {}
    world.version += 1
    del world.pods[ran[1]]
    world.settle()
    world.reap()
    world.answer_inspection()
    world.settle()
    assert len(world.workers()) == 2
    assert not set(ran) & set(world.workers())


@pytest.mark.parametrize("group", [0, 1])
def test_a_refused_group_does_not_remove_the_plan_of_another_group(group: int) -> None:
    """Earlier, one blocked group prevented the creation of a shared plan, so the other group's pods hung."""
    world = World(spec=cpu_pair(replicas=2))
    world.refuses["Service", f"demo-{group}-ranks"] = "it is somebody else's"
    world.serve()
    other = 1 - group
    assert {name.split("-")[1] for name in world.workers()} == {str(other)}
    kept = {name for kind, name in world.objects if kind == "ConfigMap"}
    assert {f"demo-plan-{pod.labels[names.LABEL_PLAN]}" for pod in world.pods.values()} <= kept
    assert {f"demo-revision-{pod.labels[names.LABEL_REVISION]}" for pod in world.pods.values()} <= kept


def test_a_pod_that_appears_after_its_epoch_is_deleted(world: World) -> None:
    """Its create had no answer, and the watch was late. Undeleted, the pod would keep its devices."""
    follower = world.pods[world.workers()[1]]
    world.end_pod(world.workers()[0])
    world.settle()
    world.reap()
    world.settle()
    world.all_ready()
    world.settle()
    world.pods[follower.name] = replace(follower, ready=False)
    world.settle()
    assert world.pods[follower.name].deleting
    assert world.condition("Ready") == ("True", "Serving")
    world.reap()
    world.settle()
    assert len(world.workers()) == 2
    assert world.status["groups"][0]["epoch"] == 2


# Gaps after a later attack


def test_epochs_that_begin_at_the_same_time_have_different_names() -> None:
    """Earlier, first epochs were seconds of a clock: two lost statuses within a second led to one epoch."""
    world = World(spec=cpu_pair(), options=replace(OPTIONS, names_come_again=True))
    world.serve()
    for lost in ({}, {"groups": "what is this"}, {}):
        world.pods.clear()
        world.status = dict(lost)
        world.version += 1
        world.settle()
        world.answer_inspection()
        world.settle()
    world.restart_operator()  # it forgets its recent creates
    for replicas in (0, 1, 0, 1):
        world.change_spec(replicas=replicas)
        world.settle()
        world.reap()
        world.settle()
    assert len(world.workers()) == 2
    assert len(made(world)) == len(set(made(world)))


def test_a_clock_step_back_does_not_reuse_pod_names() -> None:
    world = World(spec=cpu_pair(), options=replace(OPTIONS, names_come_again=True))
    world.serve()
    ran = world.workers()
    for _ in range(5):
        world.now -= timedelta(seconds=1)
        world.pods.clear()
        world.status = {}
        world.version += 1
        world.settle()
        world.answer_inspection()
        world.settle()
        assert not set(ran) & set(world.workers())
        ran += world.workers()


def test_a_pod_that_vanishes_unseen_is_not_created_again() -> None:
    """The pod may have run since the last reconcile and may still communicate, so its name is not reused."""
    world = World(spec=cpu_pair())
    create_pods(world)
    world.step()
    first = world.workers()
    world.all_started()
    del world.pods[first[1]]
    world.settle()
    world.reap()
    world.settle()
    assert len(world.workers()) == 2
    assert not set(first) & set(world.workers())
    (failure,) = world.status["groups"][0]["failures"]
    assert (failure["reason"], failure["counted"]) == ("PodDeleted", False)


def test_a_pod_that_vanishes_before_the_next_reconcile_is_not_created_again() -> None:
    """The operator stopped after it created the pods and returned after some had vanished."""
    for gone in (slice(1, 2), slice(0, 2)):
        world = World(spec=cpu_pair())
        create_pods(world)
        first = world.workers()
        world.all_started()
        for name in first[gone]:
            del world.pods[name]
        world.settle()
        world.reap()
        world.settle()
        assert len(world.workers()) == 2
        assert not set(first) & set(world.workers())


def test_a_pod_that_may_have_run_on_a_silent_node_is_not_created_again(world: World) -> None:
    """The silent node would not report that the pod runs; the pod could meet pods of the same name."""
    world.end_pod(world.workers()[0])
    world.settle()
    world.reap()
    world.settle()
    first = world.workers()
    world.pods[first[1]] = replace(world.pods[first[1]], node="node")
    assert world.nodes is not None
    world.nodes = tuple(replace(node, unreachable_since=world.now) for node in world.nodes)
    world.advance_time(60)
    world.settle()
    world.reap()
    world.settle()
    assert not set(first) & set(world.workers())
    assert world.status["groups"][0]["failures"][-1]["reason"] == "NodeLost"


def test_pods_deleted_for_a_refused_pod_are_not_created_again(world: World) -> None:
    """The pods may have run before their forced deletion, which does not show how they ended."""
    world.change_spec(replicas=2)
    world.refuses["Pod", "demo-1-*-1"] = "exceeded quota"
    world.settle()
    assert made(world)[-1] == "demo-1-1-0"
    world.refuses = {}
    for _ in range(3):
        world.reap()
        world.advance_time(400)
        world.settle()
    assert len(made(world)) == len(set(made(world)))
    assert len(world.workers()) == 4


FINALIZER = "example.test/hold"


@pytest.mark.parametrize("why", ["suspend", "scale", "scale to zero", "failure", "rollout", "deletion"])
def test_reports_a_pod_with_the_finalizer_that_blocks_it(world: World, why: str) -> None:
    """The pod stays `Terminating`. Earlier, the group reported Stopping without the reason."""
    world.change_spec(replicas=2)
    world.settle()
    world.all_ready()
    world.settle()
    held = next(name for name in world.workers() if name.startswith("demo-1-"))
    world.pods[held] = replace(world.pods[held], finalizers=(FINALIZER,))
    match why:
        case "suspend":
            world.change_spec(suspend=True)
        case "scale":
            world.change_spec(replicas=1)
        case "scale to zero":
            world.change_spec(replicas=0)
        case "failure":
            world.end_pod(held)
        case "rollout":
            world.change_spec(engine={"maxModelLen": 512}, rollout={"maxUnavailable": 2})
        case _:
            world.deleting = True
    world.settle()
    decision = world.step()
    assert decision.look_again_s is not None
    world.advance_time(100)
    world.settle()
    world.reap()
    world.settle()
    assert list(world.pods) == [held] or why in {"scale", "failure", "rollout"}
    progressing = next(c for c in world.status["conditions"] if c["type"] == "Progressing")
    assert (progressing["status"], progressing["reason"]) == ("False", "HeldByFinalizer")
    assert held in progressing["message"]
    assert FINALIZER in progressing["message"]
    world.settle()
    world.step()
    assert world.writes == []
    world.pods[held] = replace(world.pods[held], finalizers=())
    world.reap()
    world.settle()
    assert why == "deletion" or world.condition("Progressing")[1] != "HeldByFinalizer"


def waits_for_configuration(world: World, words: str) -> None:
    """Lets a node pull the images of all pods whose containers then lack their configuration."""
    for name in world.workers():
        waiting = f"CreateContainerConfigError: {words}"
        world.pods[name] = replace(world.pods[name], node="node", waiting=waits(waiting))


def test_a_key_lost_during_image_pulls_is_created_again() -> None:
    """Earlier, the operator created the Secret only with the pods, so existing pods waited without end."""
    world = World(spec=cpu_pair())
    create_pods(world)
    world.settle()
    (secret,) = [key for key in world.objects if key[0] == "Secret"]
    kept = world.objects.pop(secret)
    world.settle()
    waits_for_configuration(world, f'secret "{secret[1]}" not found')
    pods = world.workers()
    world.settle()
    assert world.objects[secret]["data"] == kept["data"]
    assert "CreateContainerConfigError" in world.status["groups"][0]["message"]
    world.all_ready()
    world.settle()
    assert world.condition("Ready") == ("True", "Serving")
    assert world.workers() == pods


@pytest.mark.parametrize("now", [b"n" * KEY_BYTES, None])
def test_a_pod_that_waits_for_a_previous_key_is_replaced(now: bytes | None) -> None:
    """The operator lost its key before the containers were created. Earlier, the Secret stayed missing."""
    world = World(spec=cpu_pair())
    create_pods(world)
    world.settle()
    (secret,) = [key for key in world.objects if key[0] == "Secret"]
    del world.objects[secret]
    world.options = replace(world.options, operator_key=now)
    waits_for_configuration(world, f'secret "{secret[1]}" not found')
    first = world.workers()
    world.settle()
    world.reap()
    world.settle()
    assert len(world.workers()) == 2
    assert not set(first) & set(world.workers())
    (failure,) = world.status["groups"][0]["failures"]
    assert (failure["reason"], failure["counted"]) == ("KeyLost", False)
    assert secret[1] in failure["message"]
    waits_for_configuration(world, 'secret "of-the-user" not found')
    pods = world.workers()
    world.settle()
    assert world.workers() == pods
    world.all_ready()
    world.settle()
    assert world.condition("Ready") == ("True", "Serving")


def test_all_pods_of_an_epoch_have_the_same_image() -> None:
    """If the chart was upgraded before a pod is created again, the epoch ends without counting."""
    world = World(spec=cpu_pair())
    create_pods(world)
    world.settle()
    first = world.workers()
    world.pods[first[1]] = replace(world.pods[first[1]], phase="Failed", reason="OutOfcpu", node="node")
    world.settle()
    world.options = replace(world.options, images=WorkerImages(cpu="worker-cpu:2", gpu="worker:2"))
    for _ in range(3):
        world.advance_time(60)
        world.settle()
        world.reap()
    assert {world.pods[name].images for name in world.workers()} == {"worker-cpu:2"}
    (failure,) = world.status["groups"][0]["failures"]
    assert (failure["reason"], failure["counted"]) == ("ImageChanged", False)
    assert "worker-cpu:2" in failure["message"]
    world.all_ready()
    world.settle()
    assert world.condition("Ready") == ("True", "Serving")


GPU = {"name": "gpu", "device": "GPU", "deviceMemory": "80Gi"}


def reject_a_cpu_pod(world: World) -> None:
    """Runs a group until one of its pods has ended before it ran and must be created again."""
    assert world.nodes is not None
    with_gpus = {**world.nodes[0].allocatable, "nvidia.com/gpu": 1.0}
    world.nodes = (replace(world.nodes[0], allocatable=with_gpus),)
    create_pods(world)
    world.settle()
    cpu = next(name for name in world.workers() if world.pods[name].labels[names.LABEL_DEVICE] == "CPU")
    world.pods[cpu] = replace(world.pods[cpu], phase="Failed", reason="OutOfcpu", node="node")
    world.settle()


@pytest.mark.parametrize("evictions", [0, 3])
@pytest.mark.parametrize("gpu", [OPTIONS.images.gpu, "worker:2"])
def test_pods_of_all_devices_have_images_of_the_same_version(gpu: str, evictions: int) -> None:
    """The upgrade changed only the CPU image, or both; the next epoch starts immediately."""
    world = World(spec=cpu_pair(roles=[GPU, cpu_pair()["roles"][0]]))
    reject_a_cpu_pod(world)
    disrupted = {"epoch": 1, "reason": "PodDisrupted", "message": "", "counted": False}
    failures = [{**disrupted, "time": world.now.isoformat()}] * evictions
    world.status["groups"][0]["failures"] = failures
    first = world.workers()
    world.options = replace(world.options, images=WorkerImages(cpu="worker-cpu:2", gpu=gpu))
    world.advance_time(11)
    world.settle()
    world.reap()
    world.settle()
    assert not set(first) & set(world.workers())
    found = {world.manifests[name]["spec"]["containers"][0]["image"] for name in world.workers()}
    assert found == {"worker-cpu:2", gpu}
    group = world.status["groups"][0]
    last = group["failures"][-1]
    assert (last["reason"], last["counted"]) == ("ImageChanged", False)
    assert OPTIONS.images.cpu in last["message"]
    assert "worker-cpu:2" in last["message"]
    assert group.get("restarts", 0) == 0


def test_a_pod_with_an_image_from_the_spec_is_created_again() -> None:
    world = World(spec=cpu_pair(roles=[GPU, cpu_pair()["roles"][0]], engine={"image": "of-the-user:1"}))
    reject_a_cpu_pod(world)
    first = world.workers()
    world.options = replace(world.options, images=WorkerImages(cpu="worker-cpu:2", gpu="worker:2"))
    world.advance_time(11)
    world.settle()
    world.settle()
    assert world.workers() == first
    assert len(made(world)) == 3
    assert not world.status["groups"][0].get("failures")


def test_an_unseen_loss_of_a_pod_does_not_count_as_upgrade() -> None:
    """The pod is not created again with any image."""
    world = World(spec=cpu_pair())
    create_pods(world)
    world.settle()
    del world.pods[world.workers()[1]]
    world.options = replace(world.options, images=WorkerImages(cpu="worker-cpu:2", gpu="worker:2"))
    world.settle()
    assert [each["reason"] for each in world.status["groups"][0]["failures"]] == ["PodDeleted"]


def test_constantly_changing_images_do_not_restart_the_group_each_time() -> None:
    """A webhook rewrites the annotation, and the node rejects pods."""
    world = World(spec=cpu_pair())
    create_pods(world)
    for _ in range(360):
        for name in world.workers():
            world.pods[name] = replace(world.pods[name], images="mirror.test/worker-cpu:1")
            if name.endswith("-1") and not world.pods[name].ended:
                world.pods[name] = replace(world.pods[name], phase="Failed", reason="OutOfcpu")
        world.step()
        world.reap()
        world.advance_time(10)
    assert len(world.created) <= 60, f"{len(world.created)} pods in an hour"
    assert world.condition("Stalled")[0] == "False"


@pytest.mark.parametrize("says", [True, False], ids=["of this version", "of an older version"])
def test_a_chart_upgrade_does_not_affect_running_groups(says: bool) -> None:
    world = World(spec=cpu_pair())
    world.serve()
    pods = world.workers()
    if not says:
        world.pods |= {name: replace(world.pods[name], images="") for name in pods}
    world.options = replace(world.options, images=WorkerImages(cpu="worker-cpu:2", gpu="worker:2"))
    for _ in range(3):
        world.advance_time(60)
        world.settle()
    assert world.workers() == pods
    assert world.condition("Ready") == ("True", "Serving")


@pytest.mark.parametrize("now", [b"n" * KEY_BYTES, None])
def test_all_pods_of_an_epoch_have_the_same_key(now: bytes | None) -> None:
    """Pods with different keys cannot connect: the epoch ends without counting, with a new key for all."""
    world = World(spec=cpu_pair())
    create_pods(world)
    world.settle()
    first = world.workers()
    rejected = first[1]
    world.pods[rejected] = replace(world.pods[rejected], phase="Failed", reason="OutOfcpu", node="node")
    world.settle()
    world.options = replace(world.options, operator_key=now)
    for _ in range(3):
        world.advance_time(60)
        world.settle()
        world.reap()
    keys = {pod.key_secret for name, pod in world.pods.items() if name in world.workers()}
    assert len(keys) == 1
    assert not set(first) & set(world.workers())
    assert [each["reason"] for each in world.status["groups"][0]["failures"]] == ["KeyLost"]
    world.all_ready()
    world.settle()
    assert world.condition("Ready") == ("True", "Serving")


@pytest.mark.parametrize("how", ["gone", "damaged"])
def test_a_plan_lost_during_image_pulls_ends_the_epoch(how: str) -> None:
    """Containers need the plan, so pods without a container would never start."""
    world = World(spec=cpu_pair())
    create_pods(world)
    world.settle()
    first = world.workers()
    world.pods[first[0]] = replace(world.pods[first[0]], phase="Running", started=True, node="node")
    (plan,) = [key for key in world.objects if "-plan-" in key[1]]
    kept = world.objects.pop(plan)
    if how == "damaged":  # a user replaced the ConfigMap, because an immutable one cannot be edited
        world.objects[plan] = {**kept, "data": {names.PLAN_KEY: '{"new": 1'}}
    world.settle()
    world.reap()
    world.settle()
    assert len(world.workers()) == 2
    assert not set(first) & set(world.workers())
    assert world.objects[plan]["data"] == kept["data"]
    assert [each["reason"] for each in world.status["groups"][0]["failures"]] == ["PlanLost"]
    world.all_ready()
    world.settle()
    assert world.condition("Ready") == ("True", "Serving")


@pytest.mark.parametrize("away", [1, 0])
@pytest.mark.parametrize("seconds", [30, 7200])
def test_scaling_does_not_clear_failures(away: int, seconds: float) -> None:
    """Earlier, restarts never ended if an autoscaler scaled down and up between two failed starts."""
    world = World(spec=cpu_pair(replicas=2), options=replace(OPTIONS, names_come_again=True))
    world.serve()
    for _ in range(12):
        for name in world.workers():
            if name.startswith("demo-1-") and not world.pods[name].ended:
                world.end_pod(name)
        for replicas in (away, 2):
            world.settle()
            world.reap()
            world.advance_time(seconds)
            world.change_spec(replicas=replicas)
        world.settle()
        world.reap()
        world.advance_time(400)
        world.settle()
    epochs = {name.rsplit("-", 1)[0] for name in world.created if name.startswith("demo-1-")}
    assert len(epochs) <= 7, epochs  # the epoch that served, the next epoch, and restart.maxRestarts
    assert world.condition("Failed")[0] == "True"
    world.change_spec(restartedAt="2026-05-05T00:00:00Z")
    for _ in range(4):
        world.settle()
        world.reap()
        world.settle()
        world.all_ready()
    world.settle()
    assert world.condition("Ready") == ("True", "Serving")


def test_a_retired_group_does_not_count_as_a_group(world: World) -> None:
    world.change_spec(replicas=2)
    world.settle()
    world.all_ready()
    world.settle()
    world.end_pod(next(name for name in world.workers() if name.startswith("demo-1-")))
    world.settle()
    world.change_spec(replicas=1)
    for _ in range(2):
        world.settle()
        world.reap()
    world.settle()
    assert [each["index"] for each in world.status["groups"]] == [0]
    assert [each["index"] for each in world.status["retiredGroups"]] == [1]
    assert world.status["replicas"] == 1
    assert world.condition("Ready") == ("True", "Serving")
    assert world.condition("Progressing") == ("False", "Settled")
    world.change_spec(replicas="none that can be read")
    world.settle()
    assert world.status["replicas"] == 1
    world.change_spec(replicas=1)
    world.settle()
    world.advance_time(4000)  # restart.window is 1 h
    world.settle()
    assert not world.status.get("retiredGroups")
