"""Fields of a pod's spec that restrict its nodes: the user's, and the operator's decisions."""

from typing import Any

from heteroinfer_contract.plan import Device
from heteroinfer_operator.api import parse_spec
from heteroinfer_operator.cluster import ResourceKey
from heteroinfer_operator.manifests.identity import EpochRef, Owner
from heteroinfer_operator.manifests.scheduling import assigned_fields
from heteroinfer_operator.nodes.demand import pod_demand, preferred_node
from heteroinfer_operator.nodes.node_assignment import NodeAssignment
from heteroinfer_operator.nodes.node_platform import IMAGE_PLATFORM
from heteroinfer_operator.nodes.role_demand import role_fields
from tests.unit.planning.planned_models import gpu, plan, spec

GROUP = EpochRef(owner=Owner(key=ResourceKey(namespace="ns", name="llama"), uid="u"), index=0, epoch=3)


def fields(role: dict[str, Any], node_assignment: NodeAssignment, **changes: Any) -> dict[str, Any]:
    parsed = spec(role, **changes)
    (pod,) = plan(parsed).plan.pods
    return assigned_fields(parsed, GROUP, parsed.roles[0], pod, node_assignment)


def test_the_taint_of_gpu_nodes_is_tolerated_once() -> None:
    wanted = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    assert fields(gpu(), NodeAssignment())["tolerations"] == [wanted]
    given = gpu(template={"tolerations": [wanted, {"key": "team", "operator": "Exists"}]})
    assert fields(given, NodeAssignment())["tolerations"] == [wanted, {"key": "team", "operator": "Exists"}]
    parsed = parse_spec({"model": {"uri": "hf://a/b"}, "roles": [gpu()]})
    assert "tolerations" not in role_fields(parsed, parsed.roles[0], Device.CPU), "it stays off GPU nodes"


def test_all_pods_of_a_group_require_the_topology_domain_with_capacity_for_them() -> None:
    made = fields(
        gpu(template={"nodeSelector": {"a": "b"}}),
        NodeAssignment(domain=("zone", "2")),
        scheduling={"topologyKey": "zone"},
    )
    assert made["nodeSelector"] == {**IMAGE_PLATFORM, "a": "b", "zone": "2"}
    (term,) = made["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert term["topologyKey"] == "zone"
    assert term["labelSelector"]["matchLabels"]["heteroinfer.dev/epoch"] == "3"


def test_gpu_memory_is_required_of_each_alternative_of_the_user() -> None:
    alternatives = [
        {"matchExpressions": [{"key": "disk", "operator": "Exists"}]},
        {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n"]}]},
    ]
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": alternatives}}
    made = fields(
        gpu(template={"affinity": {"nodeAffinity": required}}),
        NodeAssignment(gpu_memory_mib={0: 40960}, nodes={0: "n"}),
    )
    demand = pod_demand("p", {}, made)
    assert demand.preferred_node == "n"
    memory = {"key": "nvidia.com/gpu.memory", "operator": "Gt", "values": ["40959"]}
    assert [term["matchExpressions"][-1] for term in demand.node_terms] == [memory, memory]
    assert demand.node_terms[0]["matchExpressions"][0]["key"] == "disk"


def test_a_planned_node_comes_before_the_distance_to_other_groups() -> None:
    others = frozenset(f"n{number:03}" for number in range(150))
    made = fields(gpu(), NodeAssignment(nodes={0: "n"}, apart=True, nodes_of_others=others))
    assert "podAntiAffinity" not in made["affinity"]
    planned, fallback = made["affinity"]["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert planned == preferred_node("n")
    assert fallback["weight"] < planned["weight"]
    excluded = [
        term["values"] for term in fallback["preference"]["matchFields"] if term["operator"] == "NotIn"
    ]
    assert excluded == [[f"n{number:03}"] for number in range(100)]
    assert pod_demand("p", {}, made).preferred_node == "n"
    without_node = fields(gpu(), NodeAssignment(apart=True, nodes_of_others=others))["affinity"]
    assert list(without_node) == ["podAntiAffinity"]
