"""Networks of other teams: egress policies, address families, unreachable pods, meshes."""

from dataclasses import replace
from typing import Any

import pytest

from heteroinfer_contract import names
from heteroinfer_contract.group_report import GroupReport, RankPhase, RankStatus
from heteroinfer_operator.cluster import ApplyObject, ContainerTermination
from tests.unit.reconcile.test_model import fetched, hub_model, run_fetch, say
from tests.unit.reconcile.world import World, cpu_pair

POLICY = "NetworkPolicy"


@pytest.fixture
def world() -> World:
    world = World(spec=cpu_pair())
    world.serve()
    return world


def policies(world: World) -> list[str]:
    """Returns the names of the policies, without hashes and without the group's port policy."""
    found = sorted(name for kind, name in world.objects if kind == POLICY and name != "demo-0-ranks")
    return [name.rpartition("-")[0] if "-egress-" in name else name for name in found]


def test_egress_policies_exist_while_other_policies_restrict_egress(world: World) -> None:
    assert policies(world) == []
    pods = dict(world.pods)
    world.restricted_selectors = ({},)
    world.settle()
    assert policies(world) == ["demo-0-ranks-egress"]
    world.restricted_selectors = (
        {"matchLabels": {names.LABEL_LEADER: "true"}},
        {"matchLabels": {"app": "db"}},
    )
    world.settle()
    assert policies(world) == ["demo-0-ranks-egress"] * 2
    world.restricted_selectors = None  # an operator that has just started keeps the existing policies
    world.settle()
    assert policies(world) == ["demo-0-ranks-egress"] * 2
    world.restricted_selectors = ()
    world.settle()
    assert policies(world) == []
    assert world.pods == pods


@pytest.mark.parametrize(
    "restricted_selectors", [({},), ({"matchLabels": {"team": "a"}}, {"matchLabels": {"team": "b"}})]
)
def test_serving_pods_keep_an_egress_policy_until_the_new_one_exists(
    restricted_selectors: tuple[Any, ...],
) -> None:
    def way_out(world: World) -> str:
        (found,) = (name for kind, name in world.objects if kind == POLICY and "-egress-" in name)
        return found

    world, later = (
        World(spec=cpu_pair(), restricted_selectors=each)
        for each in (({"matchLabels": {"team": "a"}},), restricted_selectors)
    )
    world.serve()
    later.settle()
    old, new = way_out(world), way_out(later)
    world.refuses = {(POLICY, new): "exceeded quota: policies"}
    world.restricted_selectors = restricted_selectors
    for _ in range(4):
        world.advance_time(40)
        world.step()
    assert (POLICY, old) in world.objects
    world.refuses = {}
    world.advance_time(600)
    world.settle()
    assert way_out(world) == new


def test_a_group_waits_for_its_egress_policy() -> None:
    world = World(spec=cpu_pair(), restricted_selectors=({},))
    world.refuses = {(POLICY, "demo-0-ranks-egress-*"): "no policies here"}
    world.settle()
    world.answer_inspection()
    world.settle()
    assert world.workers() == []
    assert world.condition("Ready") == ("False", "ObjectRefused")


def test_a_fetch_has_its_policies_for_the_whole_life_of_its_pod() -> None:
    world = World(spec=cpu_pair(model=hub_model()), restricted_selectors=({},))
    world.settle()
    assert [name for name in policies(world) if "fetch" in name] == ["demo-fetch", "demo-fetch-egress"]
    run_fetch(world)
    world.settle()
    assert [name for name in policies(world) if "fetch" in name] == ["demo-fetch", "demo-fetch-egress"]
    world.answer_inspection(fetched())
    world.settle()
    world.reap()
    world.settle()
    assert [name for name in policies(world) if "fetch" in name] == []


def test_reports_policies_that_block_the_proxy_of_a_fetch() -> None:
    engine = {"env": [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}]}
    world = World(spec=cpu_pair(model=hub_model(), engine=engine))
    world.settle()
    assert "3128" not in world.message("ModelReady"), "no policy restricts it"
    world.restricted_selectors = ({},)
    world.settle()
    assert "HTTPS_PROXY (engine.env) needs port 3128" in world.message("ModelReady")
    assert "fetchEgress.ports" in world.message("ModelReady")
    run_fetch(world)
    say(world, 1.0)
    world.settle()
    assert "3128" not in world.message("ModelReady"), "it makes progress"


def test_the_clients_service_of_an_older_version_keeps_its_families(world: World) -> None:
    service: dict[str, Any] = world.objects["Service", "demo"]
    assert service["spec"]["ipFamilyPolicy"] == "PreferDualStack"
    old = {**service["spec"], "ipFamilyPolicy": "SingleStack", "ipFamilies": ["IPv6"]}
    world.objects["Service", "demo"] = {**service, "spec": old}
    world.settle()
    assert not world.writes
    assert world.objects["Service", "demo"]["spec"] == old
    world.objects["Service", "demo"] = {**service, "spec": {**old, "ports": []}}
    [write] = [each for each in world.step().actions if isinstance(each, ApplyObject)]
    assert write.manifest["spec"]["ipFamilyPolicy"] == "SingleStack"
    assert write.manifest["spec"]["ipFamilies"] == ["IPv6"]


def test_reports_the_pod_that_does_not_reach_the_leader() -> None:
    world = World(spec=cpu_pair())
    world.settle()
    world.answer_inspection()
    world.settle()
    world.all_started()
    world.settle()
    leader, follower = world.workers()
    [group] = world.status["groups"]
    assert f"the leader, pod {leader}, does not answer the operator at port 8081" in group["message"]
    ranks = tuple(RankStatus(rank=rank, pod=rank, phase=RankPhase.STARTING) for rank in range(2))
    report = GroupReport(
        group_uid="u", epoch=1, plan_hash="h", ready=False, message="", ranks=ranks, missing_pods=(1, 7)
    )
    world.reports[0] = report
    world.settle()
    [group] = world.status["groups"]
    assert f"pod {follower} does not reach the leader, pod {leader}, at port 29499" in group["message"]
    world.reports[0] = replace(report, missing_pods=())
    world.settle()
    assert world.status["groups"][0]["message"].startswith(
        "the ranks are starting: they import Python modules"
    )
    connecting = tuple(replace(rank, phase=RankPhase.CONNECTING) for rank in ranks)
    world.reports[0] = replace(report, missing_pods=(), ranks=connecting)
    world.settle()
    assert world.status["groups"][0]["message"] == "the ranks are connecting"


def held(world: World, name: str) -> None:
    """Ends a pod's worker while a sidecar keeps running."""
    ended = ContainerTermination(exit_code=70)
    world.pods[name] = replace(world.pods[name], termination=ended, still_running=("istio-proxy",))


def test_reports_an_injected_container_that_keeps_a_pod_from_ending(world: World) -> None:
    world.change_spec(replicas=0)
    name = world.workers()[1]
    held(world, name)
    world.settle()
    [group] = world.status["groups"]
    words = f"pod {name}: its worker has ended, but container istio-proxy still runs"
    assert words in group["message"]


def test_reports_an_injected_container_of_a_pod_that_is_deleted(world: World) -> None:
    world.change_spec(replicas=0)
    name = world.workers()[1]
    world.pods[name] = replace(world.pods[name], still_running=("istio-proxy",))
    world.settle()
    [group] = world.status["groups"]
    assert f"pod {name}: is being deleted, but container istio-proxy still runs" in group["message"]


def test_reports_an_injected_container_in_a_failed_group(world: World) -> None:
    world.change_spec(restart={"maxRestarts": 0})
    held(world, world.workers()[1])
    world.settle()
    [group] = world.status["groups"]
    assert group["phase"] == "Failed"
    assert "container istio-proxy still runs" in group["message"]
    assert "exit code 70" in group["message"]
