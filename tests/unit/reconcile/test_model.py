"""A model from a hub, from apply to serving: progress, reported errors, retries and changes."""

import copy
from dataclasses import replace
from typing import Any

import pytest

from heteroinfer_contract import names
from heteroinfer_contract.failure import Failure, FailureReason
from heteroinfer_contract.model_fetch import FetchedModel, FetchProgress
from heteroinfer_operator.cluster import CleanupPod, PatchStatus, PodView, ResourceObservation
from tests.unit.reconcile.world import PROFILE, World, cpu_pair, waits

COMMIT, NEXT_COMMIT = "a" * 40, "b" * 40
GIB = 2**30
DENIED = Failure(reason=FailureReason.MODEL_ACCESS_DENIED, message="gated: accept its licence")


def hub_model(**model: Any) -> dict[str, Any]:
    return {"uri": "hf://acme/llama", "revision": "v1", "cache": {"size": "20Gi"}, **model}


@pytest.fixture
def world() -> World:
    return World(spec=cpu_pair(model=hub_model()))


def fetched(commit: str = COMMIT) -> str:
    return FetchedModel(commit=commit, size_bytes=10 * GIB, profile=PROFILE).to_json()


def the_fetch(world: World) -> str:
    """Returns the name of the only fetch pod."""
    (name,) = [name for name in world.pods if "-fetch-" in name and not world.pods[name].deleting]
    return name


def arguments(world: World) -> list[str]:
    found: list[str] = world.manifests[the_fetch(world)]["spec"]["containers"][0]["args"]
    return found


def run_fetch(world: World) -> None:
    """Runs the fetch pod, as a kubelet does."""
    name = the_fetch(world)
    world.pods[name] = replace(world.pods[name], phase="Running", started=True, ready=True, node="node")


def say(world: World, done: float, total: float = 10.0, message: str = "") -> None:
    """Lets the fetch pod report its progress in GiB."""
    world.fetch = FetchProgress(
        commit=COMMIT, done_bytes=int(done * GIB), total_bytes=int(total * GIB), message=message
    )


def serve(world: World, commit: str = COMMIT) -> None:
    """Fetches the model and runs the group to Ready."""
    world.settle()
    world.answer_inspection(fetched(commit))
    world.fetch = None
    world.settle()
    world.reap()
    world.settle()
    world.all_ready()
    world.settle()
    world.reap()


def message(world: World, kind: str) -> str:
    text: str = next(c for c in world.status["conditions"] if c["type"] == kind).get("message", "")
    return text


def test_the_model_is_fetched_into_a_new_claim_before_planning(world: World) -> None:
    world.settle()
    (claim,) = [name for kind, name in world.objects if kind == "PersistentVolumeClaim"]
    assert arguments(world)[1:5] == ["--repository", "acme/llama", "--revision", "v1"]
    volume = world.manifests[the_fetch(world)]["spec"]["volumes"][-1]
    assert volume["persistentVolumeClaim"]["claimName"] == claim
    assert world.workers() == []
    assert world.condition("ModelReady") == ("Unknown", "Fetching")
    assert world.condition("Planned")[0] == "Unknown"
    assert world.status["model"]["phase"] == "Downloading"


def test_a_model_is_downloaded_and_then_served(world: World) -> None:
    serve(world)
    assert world.condition("Ready") == ("True", "Serving")
    model = world.status["model"]
    assert (model["phase"], model["commit"]) == ("Ready", COMMIT)
    assert model["bytesDone"] == model["bytesTotal"] == 10 * GIB
    assert "ModelFetched" in world.events
    (plan,) = [stored for (_, name), stored in world.objects.items() if "-plan-" in name]
    assert f"/model/acme--llama/{COMMIT}" in plan["data"][names.PLAN_KEY]
    assert list(world.pods) == world.workers(), "the pod that fetched is gone"


def test_progress_is_written_in_steps_of_one_percent(world: World) -> None:
    world.settle()
    run_fetch(world)
    writes = 0
    for step in range(301):
        say(world, step / 30)
        world.step()
        writes += sum(isinstance(action, PatchStatus) for action in world.writes)
    assert 95 <= writes <= 101
    assert world.status["model"]["bytesDone"] == 10 * GIB
    assert "100 % of 10.00 GiB" in message(world, "ModelReady")
    for _ in range(3):
        decision = world.step()
        assert world.writes == []
        assert decision.look_again_s == 5.0


class Cleaned(World):
    """A world in which a fetch pod of another resource may remove commits."""

    cleanup_pods: tuple[CleanupPod, ...] = ()

    def observe(self) -> ResourceObservation:
        return replace(super().observe(), cleanup_pods=self.cleanup_pods)

    def begin_cleanup(self) -> None:
        pod = PodView(name="other-fetch", uid="p", labels={}, created=self.now)
        self.cleanup_pods = (CleanupPod(pod=pod, claims=("models",)),)


def test_a_resource_waits_for_a_fetch_that_may_remove_its_commit() -> None:
    world = Cleaned(spec=cpu_pair(model={"uri": f"pvc://models/acme--llama/{NEXT_COMMIT}"}))
    world.begin_cleanup()
    world.settle()
    assert not world.pods
    assert world.condition("ModelReady") == ("Unknown", "CacheCleaning")
    assert "because pod other-fetch may now remove old commits" in message(world, "ModelReady")
    assert world.look_again_s == 2.0
    world.cleanup_pods = ()
    world.settle()
    assert [name for name in world.pods if "-inspect-" in name]


def test_the_status_drops_an_earlier_model_while_a_fetch_may_remove_commits() -> None:
    world = Cleaned(spec=cpu_pair(model={"uri": "file:///models/tiny"}))
    world.serve()
    before, commit = world.status["model"], f"pvc://models/acme--llama/{NEXT_COMMIT}"
    assert before["phase"] == "Ready"
    world.begin_cleanup()
    world.change_spec(model={"uri": commit})
    world.step()
    assert world.condition("ModelReady") == ("Unknown", "CacheCleaning")
    waiting = world.status["model"]
    assert waiting["phase"] == "Pending"
    assert waiting["key"] not in ("", before["key"])
    assert "profile" not in waiting
    world.cleanup_pods = ()
    world.settle()
    assert world.status["model"]["key"] == waiting["key"]
    assert world.status["model"]["phase"] == "Inspecting"


def test_a_group_that_runs_keeps_its_pods_while_a_fetch_may_remove_commits() -> None:
    """A new process of the operator does not know what an earlier process confirmed."""
    world = Cleaned(spec=cpu_pair(model={"uri": f"pvc://models/acme--llama/{NEXT_COMMIT}"}))
    world.serve()
    before = dict(world.pods)
    assert world.condition("Ready")[0] == "True"
    world.begin_cleanup()
    world.settle()
    assert world.pods == before
    assert world.condition("Ready")[0] == "True"
    world.cleanup_pods = ()
    world.settle()
    assert world.pods == before
    assert world.condition("ModelReady")[0] == "True"


def test_reports_the_cause_of_a_waiting_fetch(world: World) -> None:
    world.settle()
    name = the_fetch(world)
    world.pods[name] = replace(world.pods[name], unschedulable="no node has free capacity")
    world.step()
    assert "no node has free capacity" in message(world, "ModelReady")
    run_fetch(world)
    world.pods[name] = replace(world.pods[name], unschedulable="")
    say(world, 1, message="another fetch of this model is running")
    world.step()
    assert "10 % of 10.00 GiB: another fetch" in message(world, "ModelReady")


def test_reports_a_missing_secret(world: World) -> None:
    world.settle()
    name = the_fetch(world)
    waiting = 'CreateContainerConfigError: secret "hub" not found'
    world.pods[name] = replace(world.pods[name], waiting=waits(waiting), node="node")
    world.settle()
    assert world.condition("ModelReady") == ("False", "CreateContainerConfigError")
    assert 'secret "hub" not found' in message(world, "ModelReady")
    assert "CreateContainerConfigError" in world.events


def test_reports_an_unavailable_image_once(world: World) -> None:
    world.settle()
    name = the_fetch(world)
    for waiting in ("ErrImagePull: no such host", "ImagePullBackOff: Back-off pulling") * 3:
        world.pods[name] = replace(world.pods[name], waiting=waits(waiting), node="node")
        world.settle()
    assert world.events.count("ImagePullBackOff") == 1
    assert "its image cannot be pulled (example.test/worker-cpu:1)" in message(world, "ModelReady")


def test_a_failed_fetch_is_reported_and_retried_with_backoff(world: World) -> None:
    world.settle()
    waits = []
    for _ in range(6):
        world.answer_inspection(DENIED.to_json(), exit_code=names.EXIT_FETCH_FAILED)
        decision = world.step()
        assert world.condition("ModelReady") == ("False", "ModelAccessDenied")
        assert "accept its licence" in message(world, "ModelReady")
        world.settle()
        assert decision.look_again_s is not None
        waits.append(decision.look_again_s)
        world.advance_time(decision.look_again_s - 1)
        world.step()
        assert not world.pods[the_fetch(world)].deleting
        world.advance_time(1)
        world.settle()
        world.reap()
        world.settle()
        # The reason stays until the next attempt makes progress.
        assert world.condition("ModelReady") == ("False", "ModelAccessDenied")
    assert waits == [30, 60, 120, 240, 300, 300]
    assert world.events.count("ModelAccessDenied") == 1
    run_fetch(world)
    say(world, 1)
    world.settle()
    assert world.condition("ModelReady") == ("Unknown", "Fetching")
    assert "failures" not in world.status["model"]


def test_a_new_token_is_used_at_once(world: World) -> None:
    world.settle()
    world.answer_inspection(DENIED.to_json(), exit_code=names.EXIT_FETCH_FAILED)
    world.settle()
    refused = the_fetch(world)
    world.change_spec(model=hub_model(tokenSecretRef={"name": "hub"}))
    world.settle()
    world.reap()
    world.settle()
    assert the_fetch(world) != refused
    env = world.manifests[the_fetch(world)]["spec"]["containers"][0]["env"]
    assert {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}} in env


def test_a_new_revision_is_fetched_while_the_old_one_serves(world: World) -> None:
    serve(world)
    old = dict(world.pods)
    world.change_spec(model=hub_model(revision="v2"))
    world.settle()
    assert arguments(world)[3:5] == ["--revision", "v2"]
    run_fetch(world)
    say(world, 5)
    world.settle()
    assert world.condition("Available") == ("True", "Serving")
    assert world.condition("Ready") == ("False", "RollingOut")
    assert all(not world.pods[name].deleting for name in old)
    world.answer_inspection(fetched(NEXT_COMMIT))
    world.settle()
    world.reap()
    world.settle()
    world.all_ready()
    world.settle()
    assert world.condition("Ready") == ("True", "Serving")
    assert set(world.workers()) & set(old) == set()
    plans = [stored["data"] for (_, name), stored in world.objects.items() if "-plan-" in name]
    assert any(NEXT_COMMIT in plan[names.PLAN_KEY] for plan in plans)


def test_a_claim_that_its_user_enlarged_stays_as_it_is(world: World) -> None:
    serve(world)
    (key,) = [key for key in world.objects if key[0] == "PersistentVolumeClaim"]
    enlarged = copy.deepcopy(world.objects[key])
    enlarged["spec"]["resources"]["requests"]["storage"] = "80Gi"
    world.objects[key] = enlarged
    assert world.idle_actions() == []
    world.settle()
    assert world.objects[key] == enlarged
    assert world.condition("Ready") == ("True", "Serving")


def test_a_larger_cache_gets_a_new_claim_and_the_old_claim_stays_while_mounted(world: World) -> None:
    def claims() -> set[str]:
        return {name for kind, name in world.objects if kind == "PersistentVolumeClaim"}

    serve(world)
    (small,) = claims()
    world.change_spec(model=hub_model(cache={"size": "40Gi"}))
    world.settle()
    assert small in claims()
    assert len(claims()) == 2
    serve(world)
    assert world.condition("Ready") == ("True", "Serving")
    world.settle()
    assert small not in claims()
    assert len(claims()) == 1


def test_an_unreadable_model_is_inspected_again_at_its_commit(world: World) -> None:
    serve(world)
    world.advance_time(100)
    lost = Failure(reason=FailureReason.MODEL_NOT_READABLE, message="no such file", pod=1)
    world.end_pod("demo-0-1-1", exit_code=64, message=lost.to_json())
    world.settle()
    assert world.condition("Ready")[0] == "False"
    assert arguments(world)[3:5] == ["--revision", COMMIT], "a branch may have moved; this model has not"
    world.reap()
    world.advance_time(60)
    world.settle()
    assert world.workers() == []
    serve(world)
    assert world.condition("Ready") == ("True", "Serving")
    world.advance_time(100)
    world.settle()
    assert not [name for name in world.pods if "-fetch-" in name], "one inspection for one failure"


def test_a_suspended_resource_fetches_nothing(world: World) -> None:
    world.settle()
    fetch = the_fetch(world)
    world.change_spec(suspend=True)
    world.settle()
    assert world.pods[fetch].deleting
    world.reap()
    world.settle()
    assert not world.pods
    world.change_spec(suspend=False)
    serve(world)
    assert world.condition("Ready") == ("True", "Serving")


def test_an_evicted_fetch_is_restarted(world: World) -> None:
    world.settle()
    name = the_fetch(world)
    world.pods[name] = replace(world.pods[name], phase="Failed", reason="Evicted", message="disk pressure")
    world.settle()
    assert world.condition("ModelReady") == ("False", "ModelPodEnded")
    world.advance_time(31)
    world.settle()
    world.reap()
    serve(world)
    assert world.condition("Ready") == ("True", "Serving")


def test_progress_of_another_models_fetch_is_ignored(world: World) -> None:
    world.settle()
    run_fetch(world)
    say(world, 5)
    world.settle()
    assert world.status["model"]["bytesDone"] == 5 * GIB
    world.change_spec(model=hub_model(revision="v2"))
    world.step()
    assert "bytesDone" not in world.status["model"]


def test_a_fetch_on_a_lost_node_is_force_deleted(world: World) -> None:
    world.settle()
    run_fetch(world)
    name = the_fetch(world)
    lost = replace(world.nodes[0], schedulable=False, unreachable_since=world.now) if world.nodes else None
    assert lost is not None
    world.nodes = (lost,)
    world.advance_time(30)
    world.settle()
    assert not world.pods[name].deleting
    world.advance_time(31)
    world.settle()
    world.reap()
    world.settle()
    assert world.graces[name] == 0
    assert world.created.count(name) == 2


def test_a_failed_fetch_of_a_new_model_keeps_the_old_one_serving(world: World) -> None:
    serve(world)
    world.change_spec(model=hub_model(revision="gone"))
    world.settle()
    failure = Failure(reason=FailureReason.MODEL_NOT_FOUND, message="no revision gone")
    world.answer_inspection(failure.to_json(), exit_code=names.EXIT_FETCH_FAILED)
    world.settle()
    assert world.condition("ModelReady") == ("False", "ModelNotFound")
    assert world.condition("Available") == ("True", "Serving")
    assert world.condition("Ready") == ("False", "RolloutStuck")
    world.change_spec(model=hub_model())
    serve(world)
    assert world.condition("Ready") == ("True", "Serving")
    assert world.status["groups"][0]["epoch"] == 1, "back at the old revision nothing is replaced"


def test_reports_a_hub_model_without_a_cache() -> None:
    world = World(spec=cpu_pair(model={"uri": "hf://acme/llama"}))
    world.settle()
    assert world.condition("ModelReady") == ("False", "ModelCacheNotGiven")
    assert "cache.size" in message(world, "ModelReady")


def test_reports_a_profile_that_is_too_large_for_the_status() -> None:
    world = World(spec=cpu_pair())
    world.settle()
    world.answer_inspection(replace(PROFILE, num_layers=2000, layer_bytes=(300_000_000,) * 2000).to_json())
    world.settle()
    assert world.condition("ModelReady") == ("False", "ModelNotReadable")
    words = message(world, "ModelReady")
    assert "the model's 2000 layers has" in words
    assert "must have at most 16384" in words


def test_the_inspect_pod_stays_until_its_result_is_stored() -> None:
    """Only the pod has the result. Earlier, the result was lost while a status write waited."""
    world = World(spec=cpu_pair())
    world.settle()
    (inspect,) = world.pods
    world.answer_inspection()
    world.refuses["HeteroInference/status", "*"] = "the object is too large"
    world.step()
    assert inspect in world.pods
    world.refuses.clear()
    world.live(20)
    world.settle()
    assert inspect not in world.pods
    assert world.condition("ModelReady")[0] == "True"
    assert len(world.workers()) == 2
