"""Groups on nodes: which start, which wait, and their messages."""

from dataclasses import replace
from typing import Any

import pytest

from heteroinfer_contract.plan import Device
from heteroinfer_operator.api import HeteroInferenceSpec
from heteroinfer_operator.errors import PlanError, Shortage
from heteroinfer_operator.manifests.model_pods import model_template
from heteroinfer_operator.manifests.pod_security import PodSecurity
from heteroinfer_operator.manifests.worker_pods import build_pod_spec
from heteroinfer_operator.nodes.demand import Taint, required_node_terms
from heteroinfer_operator.nodes.node_platform import (
    ARCH_LABEL,
    IMAGE_PLATFORM,
    accepts_platform,
    select_platform,
)
from heteroinfer_operator.nodes.node_view import NodeView
from heteroinfer_operator.nodes.other_groups import OtherGroups
from heteroinfer_operator.nodes.placement import FreeNode
from heteroinfer_operator.nodes.role_demand import template_fields
from heteroinfer_operator.planning import (
    Capacity,
    GroupRequest,
    Planned,
    assign_existing_plan,
    build_free_nodes,
    plan_group,
)
from heteroinfer_operator.planning.gpu_floor import usable_gpu_memory
from heteroinfer_operator.planning.gpu_sizes import largest_gpu_bytes_by_role
from tests.unit.planning.planned_models import GIB, cpu, gpu, profile, spec
from tests.unit.planning.test_placement import GPU, ZONE, node

CPU_ONLY = {"onGPUShortage": {"action": "CPUOnly", "after": "10m"}}


def fit(parsed: HeteroInferenceSpec, free_nodes: list[FreeNode] | None, **capacity: Any) -> Planned:
    request = GroupRequest(spec=parsed, profile=profile(), served_name="llama", model_path="/model")
    return plan_group(request, Capacity(free_nodes=free_nodes, **capacity))


def refused(parsed: HeteroInferenceSpec, *nodes: NodeView, **capacity: Any) -> Shortage:
    with pytest.raises(Shortage) as caught:
        fit(parsed, build_free_nodes(nodes), **capacity)
    return caught.value


def big(name: str, gpus: int = 0, memory_mib: int | None = None, **fields: Any) -> NodeView:
    labels = {f"{GPU}.memory": str(memory_mib)} if memory_mib else {}
    return node(
        name,
        gpus=gpus,
        allocatable={"cpu": 64.0, "memory": 512.0 * GIB},
        labels={**labels, **fields.pop("labels", {})},
        **fields,
    )


def test_without_nodes_the_plan_follows_the_roles() -> None:
    planned = fit(spec(gpu(), cpu()), None)
    assert [rank.device for rank in planned.plan.ranks] == [Device.CPU, Device.GPU]
    assert not planned.node_assignment.nodes


def test_pods_are_placed_and_take_their_capacity() -> None:
    free_nodes = build_free_nodes([big("a", gpus=1), big("b")])
    planned = fit(spec(gpu(), cpu(memory="64Gi")), free_nodes)
    assert planned.node_assignment.nodes == {0: "b", 1: "a"}, "pod 0 is the CPU's"
    with pytest.raises(
        Shortage, match=r"node a has 0 free of 1 nvidia\.com/gpu, node b has no nvidia\.com/gpu"
    ):
        fit(spec(gpu(), cpu(memory="64Gi")), free_nodes)


def test_nodes_of_another_system_or_architecture_do_not_count() -> None:
    arm = big("arm", labels={"kubernetes.io/arch": "arm64"})
    windows = big("windows", labels={"kubernetes.io/os": "windows"})
    nameless = replace(big("nameless"), labels={})
    error = refused(spec(cpu(memory="64Gi")), arm, windows, nameless)
    assert "node arm is of architecture arm64, and the pod needs amd64" in error.message
    assert "node windows is of system windows, and the pod needs linux" in error.message
    assert "node nameless is not matched by the pod's nodeSelector or node affinity" in error.message, (
        "as the scheduler says"
    )
    planned = fit(spec(cpu(memory="64Gi")), build_free_nodes([arm, windows, big("amd")]))
    assert planned.node_assignment.nodes == {0: "amd"}


@pytest.mark.parametrize(
    "template",
    [
        {"nodeSelector": {"kubernetes.io/arch": "arm64"}},
        {
            "affinity": {
                "nodeAffinity": {
                    "requiredDuringSchedulingIgnoredDuringExecution": {
                        "nodeSelectorTerms": [
                            {
                                "matchExpressions": [
                                    {"key": "kubernetes.io/arch", "operator": "In", "values": ["arm64"]}
                                ]
                            }
                        ]
                    }
                }
            }
        },
    ],
    ids=["node selector", "node affinity"],
)
def test_an_architecture_that_the_user_names_takes_precedence(template: dict[str, Any]) -> None:
    arm = big("arm", labels={"kubernetes.io/arch": "arm64"})
    windows = big("windows", labels={"kubernetes.io/arch": "arm64", "kubernetes.io/os": "windows"})
    asked = spec(cpu(memory="64Gi", template=template))
    assert fit(asked, build_free_nodes([windows, big("amd"), arm])).node_assignment.nodes == {0: "arm"}


ARM_TERM = {"matchExpressions": [{"key": ARCH_LABEL, "operator": "In", "values": ["arm64"]}]}
DEFAULT_ARCH = {"key": ARCH_LABEL, "operator": "In", "values": ["amd64"]}


def with_terms(*terms: dict[str, Any]) -> dict[str, Any]:
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": list(terms)}}
    return {"affinity": {"nodeAffinity": required}}


def test_an_architecture_in_one_alternative_applies_to_this_alternative_only() -> None:
    host = {"key": "kubernetes.io/hostname", "operator": "Exists"}
    fields_term = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["s390x"]}]}
    s390x_term = {"matchExpressions": [{"key": ARCH_LABEL, "operator": "In", "values": ["s390x"]}]}
    template = with_terms({"matchExpressions": [host]}, s390x_term, fields_term, {})
    asked = spec(cpu(memory="64Gi", template=template))
    arm, amd, s390x = (
        big(name, labels={"kubernetes.io/hostname": name, ARCH_LABEL: name})
        for name in ("arm64", "amd64", "s390x")
    )
    assert "not matched by the pod's nodeSelector or node affinity" in refused(asked, arm).message
    for node_ in (amd, s390x):
        assert fit(asked, build_free_nodes([arm, node_])).node_assignment.nodes == {0: node_.name}
    role_template = asked.roles[0].template
    fields = template_fields(role_template)
    assert fields["nodeSelector"] == {"kubernetes.io/os": "linux"}
    assert required_node_terms(fields["affinity"]) == [
        {"matchExpressions": [host, DEFAULT_ARCH]},
        s390x_term,
        {**fields_term, "matchExpressions": [DEFAULT_ARCH]},
        {},
    ]
    model_pod_fields = build_pod_spec(asked, model_template(asked), PodSecurity())
    assert {key: model_pod_fields[key] for key in fields} == fields
    assert role_template is not None
    selected = select_platform(role_template.dump())
    assert [accepts_platform(selected, each.labels) for each in (arm, amd, s390x)] == [False, True, True]


@pytest.mark.parametrize(
    ("operator", "values"), [("NotIn", ["s390x"]), ("Exists", None), ("DoesNotExist", None)]
)
def test_an_architecture_that_is_only_excluded_keeps_the_default(
    operator: str, values: list[str] | None
) -> None:
    expression = {"key": ARCH_LABEL, "operator": operator, **({"values": values} if values else {})}
    template = with_terms({"matchExpressions": [expression]}, {})
    fields = template_fields(spec(cpu(memory="64Gi", template=template)).roles[0].template)
    assert fields == {**template, "nodeSelector": dict(IMAGE_PLATFORM)}


def test_terms_without_an_architecture_leave_the_default_in_the_node_selector() -> None:
    zone = {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}
    for template in (with_terms(zone), with_terms(zone, {}), with_terms({})):
        fields = template_fields(spec(cpu(memory="64Gi", template=template)).roles[0].template)
        assert fields == {**template, "nodeSelector": dict(IMAGE_PLATFORM)}


def test_a_node_selector_counts_for_all_alternatives() -> None:
    template = {
        "nodeSelector": {ARCH_LABEL: "arm64"},
        **with_terms(ARM_TERM, {"matchExpressions": [DEFAULT_ARCH]}),
    }
    fields = template_fields(spec(cpu(memory="64Gi", template=template)).roles[0].template)
    assert fields == {**template, "nodeSelector": {"kubernetes.io/os": "linux", ARCH_LABEL: "arm64"}}


def test_the_largest_gpu_is_on_a_node_of_an_accepted_architecture() -> None:
    zone = {"matchExpressions": [{"key": "zone", "operator": "Exists"}]}
    nodes = [
        big("arm", gpus=1, memory_mib=97871, labels={ARCH_LABEL: "arm64"}),
        big("amd", gpus=1, memory_mib=40960),
    ]
    s390x_term = {"matchExpressions": [{"key": ARCH_LABEL, "operator": "In", "values": ["s390x"]}]}
    for terms, size_mib in (((zone, s390x_term), 40960), ((zone, ARM_TERM), 97871), ((ARM_TERM,), 97871)):
        asked = spec(gpu(template=with_terms(*terms)))
        assert largest_gpu_bytes_by_role(asked, nodes) == {"gpu": size_mib * 2**20}


def test_gpus_on_other_nodes_do_not_count_for_a_pod() -> None:
    error = refused(spec(gpu(ranksPerPod=2)), node("a", gpus=1), node("b", gpus=1))
    assert error.reason == "InsufficientGPU"
    assert error.message.startswith(
        "needs 1 pod (role gpu) with 2 nvidia.com/gpu; nodes a, b have 1 free of 1 nvidia.com/gpu; "
        "the group waits for GPUs. Add GPUs, or set planning.onGPUShortage.action: CPUOnly"
    )


def test_the_taint_that_keeps_gpu_nodes_for_gpu_pods_is_tolerated() -> None:
    tainted = big("a", gpus=1, taints=(Taint(key=GPU, value="present"),))
    assert fit(spec(gpu()), build_free_nodes([tainted])).node_assignment.nodes == {0: "a"}
    other = big("b", gpus=1, taints=(Taint(key="team", value="x"),))
    assert "node b is tainted team=x:NoSchedule" in refused(spec(gpu()), other).message


def test_missing_memory_is_not_a_shortage_of_gpus() -> None:
    error = refused(
        spec(gpu(deviceMemory="80Gi"), cpu(memory="400Gi"), planning=CPU_ONLY), node("a", gpus=1), node("b")
    )
    assert error.reason == "InsufficientCapacity"
    assert error.message == (
        "needs 1 pod (role cpu) with 400.00 GiB of memory; nodes a, b have 32.00 GiB free of 32.00 GiB of "
        "memory; the group waits: the operator creates no pod until all pods of the group fit"
    )


def test_reports_permanent_errors_before_shortages() -> None:
    for nodes in ([big("a", gpus=1)], []):
        with pytest.raises(PlanError) as caught:
            fit(spec(gpu(deviceMemory="8Gi")), build_free_nodes(nodes))
        assert caught.value.reason == "InsufficientMemory"


@pytest.mark.parametrize(("age_s", "waits"), [(0.0, True), (599.0, True), (600.0, False), (None, False)])
def test_cpu_only_waits_and_reports_its_cost(age_s: float | None, *, waits: bool) -> None:
    parsed, nodes = spec(gpu(), planning=CPU_ONLY), [big("a")]
    cost = "(expected step time on CPUs: 133 ms (41 to 394) instead of 6.39 ms (4.46 to 71.3))"
    if waits:
        error = refused(parsed, *nodes, shortage_age_s=age_s)
        assert error.message == (
            "needs 1 pod (role gpu) with 1 nvidia.com/gpu; node a has no nvidia.com/gpu; the group will use "
            f"CPUs once GPUs have been missing for 10m {cost}"
        )
        return
    planned = fit(parsed, build_free_nodes(nodes), shortage_age_s=age_s)
    assert planned.plan.ranks[0].device is Device.CPU
    assert planned.on_cpus == (
        "role gpu runs on CPUs, because planning.onGPUShortage.action is CPUOnly: needs 1 pod (role gpu) "
        f"with 1 nvidia.com/gpu; node a has no nvidia.com/gpu {cost}"
    )


def test_pods_on_cpus_must_fit_too() -> None:
    parsed = spec(gpu(resources={"limits": {"memory": "64Gi"}}), planning=CPU_ONLY)
    error = refused(parsed, node("a"), shortage_age_s=None)
    assert error.reason == "InsufficientCapacity"
    assert "needs 1 pod (role gpu) with 64.00 GiB of memory" in error.message


def test_only_the_roles_that_lack_gpus_run_on_cpus() -> None:
    roles = [gpu(name="two", ranksPerPod=2), gpu(name="one")]
    planned = fit(spec(*roles, planning=CPU_ONLY), build_free_nodes([big("a", gpus=1), big("b")]))
    devices = {rank.role: rank.device for rank in planned.plan.ranks}
    assert devices == {"two": Device.CPU, "one": Device.GPU}


def test_gpus_of_other_kinds_do_not_help() -> None:
    amd = spec(gpu(deviceResourceName="amd.com/gpu"))
    error = refused(amd, big("a", gpus=8))
    assert "node a has no amd.com/gpu" in error.message
    assert fit(
        amd, build_free_nodes([node("b", allocatable={"amd.com/gpu": 1.0})])
    ).node_assignment.nodes == {0: "b"}


def test_all_pods_of_a_group_have_one_value_of_the_topology_label() -> None:
    parsed = spec(gpu(pods=2), scheduling={"topologyKey": ZONE})
    nodes = [big(f"n{i}", gpus=1, labels={ZONE: zone}) for i, zone in enumerate("122")]
    planned = fit(parsed, build_free_nodes(nodes))
    assert planned.node_assignment.domain == (ZONE, "2")
    assert set(planned.node_assignment.nodes.values()) == {"n1", "n2"}


# What node labels say of GPUs


def test_memory_and_product_of_gpus_come_from_labels() -> None:
    small = big("small", gpus=1, memory_mib=12 * 1024, labels={f"{GPU}.product": "NVIDIA-A10"})
    large = big("large", gpus=1, memory_mib=80 * 1024, labels={f"{GPU}.product": "NVIDIA-H200"})
    on_large = fit(spec(gpu(), cpu(memory="64Gi")), build_free_nodes([small, large]))
    on_small = fit(spec(gpu(), cpu(memory="64Gi")), build_free_nodes([small]))
    assert on_large.plan.layers_by_stage == (1, 31)
    assert on_large.hybrid_not_needed
    assert on_small.plan.layers_by_stage[0] > 5
    gpu_rank = on_small.plan.ranks[-1]
    # 600 of 4800 GB/s.
    assert gpu_rank.predicted_step_s / gpu_rank.num_layers > 7 * (
        on_large.plan.ranks[-1].predicted_step_s / on_large.plan.ranks[-1].num_layers
    )
    needed = on_large.node_assignment.gpu_memory_mib[1]
    assert 12 * 1024 < needed <= 80 * 1024, "another node that has it would do"


@pytest.mark.parametrize("memory_mib", [8192, 11264, 16384, 24576, 81920])
def test_a_pod_requests_a_gpu_with_memory_beyond_weights_and_kv_cache(memory_mib: int) -> None:
    group, labelled = spec(gpu(), cpu(memory="96Gi")), [big("a", gpus=1, memory_mib=memory_mib)]
    planned = fit(group, build_free_nodes(labelled))
    rank = planned.plan.ranks[1]
    floor = planned.sizes.gpu_floor
    asked = planned.node_assignment.gpu_memory_mib[1]
    floor_bytes = floor.total(embeds=False, samples=True, gpus=1)
    assert rank.weight_bytes + rank.kv_cache_bytes <= usable_gpu_memory(asked * 2**20, floor_bytes)
    assert asked <= memory_mib
    again, _ = assign_existing_plan(
        group, planned.plan, Capacity(free_nodes=build_free_nodes(labelled)), floor
    )
    assert again.gpu_memory_mib == {1: asked}


def test_an_existing_plan_keeps_its_gpu_size_despite_nodes_of_another_architecture() -> None:
    group, large = spec(gpu(), cpu(memory="96Gi")), big("a", gpus=1, memory_mib=81920)
    planned = fit(group, build_free_nodes([large]))
    arm = big("arm", gpus=1, labels={"kubernetes.io/arch": "arm64"})  # without a label of its memory

    def asked(*nodes: NodeView) -> dict[int, int]:
        capacity = Capacity(free_nodes=build_free_nodes(nodes))
        return dict(
            assign_existing_plan(group, planned.plan, capacity, planned.sizes.gpu_floor)[0].gpu_memory_mib
        )

    assert asked(large, arm) == asked(large) == dict(planned.node_assignment.gpu_memory_mib)


def test_a_plan_that_leaves_too_little_gpu_memory_free_still_gets_its_gpu() -> None:
    """Earlier versions made such plans, and no GPU of the cluster is larger."""
    group = spec(gpu(), cpu(memory="96Gi"))
    planned = fit(group, build_free_nodes([big("a", gpus=1, memory_mib=16384)]))
    full = replace(planned.plan.ranks[1], kv_cache_bytes=int(14.4 * GIB) - planned.plan.ranks[1].weight_bytes)
    plan, floor = replace(planned.plan, ranks=(planned.plan.ranks[0], full)), planned.sizes.gpu_floor

    def asked(memory_mib: int) -> int:
        nodes = build_free_nodes([big("a", gpus=1, memory_mib=memory_mib)])
        return assign_existing_plan(group, plan, Capacity(free_nodes=nodes), floor)[0].gpu_memory_mib[1]

    assert asked(16384) == 16384
    assert asked(24576) > 16384


def test_device_memory_of_the_role_takes_precedence_over_labels() -> None:
    nodes = build_free_nodes([big("a", gpus=1, memory_mib=80 * 1024)])
    planned = fit(spec(gpu(deviceMemory="12Gi"), cpu(memory="64Gi")), nodes)
    assert planned.plan.layers_by_stage[0] > 5
    assert planned.node_assignment.gpu_memory_mib == {}, "the user knows better than the label"


# Pods may wait


def test_plans_despite_a_shortage_if_pods_may_wait() -> None:
    planned = fit(spec(gpu()), build_free_nodes([node("a")]), pods_may_wait=True)
    assert planned.plan.ranks[0].device is Device.GPU
    assert planned.missing == "needs 1 pod (role gpu) with 1 nvidia.com/gpu; node a has no nvidia.com/gpu"
    assert not planned.node_assignment.nodes
    fits = fit(spec(gpu()), build_free_nodes([node("a", gpus=1)]), pods_may_wait=True)
    assert (fits.missing, fits.node_assignment.nodes) == ("", {})


def test_cpu_only_is_decided_whether_or_not_pods_may_wait() -> None:
    parsed, nodes = spec(gpu(), planning=CPU_ONLY), [node("a")]
    assert "will use CPUs once" in refused(parsed, *nodes, pods_may_wait=True, shortage_age_s=0.0).message
    planned = fit(parsed, build_free_nodes(nodes), pods_may_wait=True, shortage_age_s=600.0)
    assert planned.plan.ranks[0].device is Device.CPU


# Apart from the resource's other groups


def apart_from(nodes: list[NodeView], *occupied: str) -> dict[str, Any]:
    return {"others": OtherGroups.on_nodes([{name} for name in occupied], nodes)}


def chosen(parsed: HeteroInferenceSpec, nodes: list[NodeView], *occupied: str) -> set[str]:
    planned = fit(parsed, build_free_nodes(nodes), **apart_from(nodes, *occupied))
    return set(planned.node_assignment.nodes.values())


def test_a_node_without_another_group_comes_before_larger_gpus() -> None:
    nodes = [
        big(name, gpus=gpus, memory_mib=size)
        for name, gpus, size in (("a", 8, 81559), ("b", 1, 40960), ("c", 2, 40959), ("d", 2, 8192))
    ]
    for parsed in (spec(gpu()), spec(gpu(deviceMemory="80Gi")), spec(gpu(), scheduling={"gang": "Never"})):
        assert chosen(parsed, nodes) <= {"a"}
    assert chosen(spec(gpu()), nodes, "a") == {"b"}, "the largest GPU of the other nodes"
    assert chosen(spec(gpu()), nodes, "a", "b") == {"c"}
    assert chosen(spec(gpu()), nodes, "a", "b", "c") == {"a"}, "the model does not fit on d"


def test_a_node_with_fewer_other_groups_comes_before_larger_gpus() -> None:
    nodes = [big("a", gpus=8, memory_mib=81559), big("b", gpus=8, memory_mib=40960)]
    occupied: list[str] = []
    for _ in range(4):
        occupied += chosen(spec(gpu()), nodes, *occupied)
    assert occupied == ["a", "b", "a", "b"]


def test_a_zone_with_fewer_other_groups_is_no_reason_for_smaller_gpus() -> None:
    sizes = (("a", "x", 81559), ("b", "x", 81559), ("c", "y", 40960))
    nodes = [big(name, gpus=8, memory_mib=size, labels={ZONE: zone}) for name, zone, size in sizes]
    assert chosen(spec(gpu()), nodes, "a", "b", "c") == {"a"}


def test_a_smaller_gpu_that_would_change_the_split_of_layers_is_not_used() -> None:
    nodes = [big("a", gpus=2, memory_mib=81559), big("b", gpus=1, memory_mib=12 * 1024)]
    roles = [gpu(), cpu(memory="64Gi")]
    planned = fit(spec(*roles), build_free_nodes(nodes), **apart_from(nodes, "a"))
    assert planned.node_assignment.nodes[1] == "a"
    assert planned.plan.layers_by_stage == (1, 31)


def test_a_smaller_gpu_must_hold_the_requests_of_the_load() -> None:
    nodes = [big("a", gpus=2, memory_mib=81559), big("b", gpus=1, memory_mib=24 * 1024)]
    engine = {"maxModelLen": 32768}
    assert chosen(spec(gpu(), engine=engine), nodes, "a") == {"b"}
    load = {"load": {"requests": 12, "promptTokens": 8000, "outputTokens": 192}}
    assert chosen(spec(gpu(), engine=engine, planning=load), nodes, "a") == {"a"}


def test_a_size_given_by_the_user_does_not_lead_to_a_gpu_that_is_too_small() -> None:
    nodes = [big(name, gpus=2, memory_mib=size) for name, size in (("a", 81559), ("b", 8192), ("c", 81558))]
    parsed = spec(gpu(deviceMemory="80Gi"))
    assert chosen(parsed, nodes, "a") == {"c"}
    assert chosen(parsed, nodes, "a", "c") == {"a"}


def test_cpu_pods_prefer_nodes_without_another_group_to_nodes_without_gpus() -> None:
    nodes = [big("plain"), big("with-gpu", gpus=1)]
    assert chosen(spec(cpu(memory="64Gi")), nodes) == {"plain"}
    assert chosen(spec(cpu(memory="64Gi")), nodes, "plain") == {"with-gpu"}


def test_an_existing_plan_uses_another_node_if_its_gpu_holds_the_plan() -> None:
    sizes = (("a", 81559), ("b", 8192), ("c", 81558))
    nodes = [big(name, gpus=2, memory_mib=size) for name, size in sizes]
    for group in (spec(gpu()), spec(gpu(deviceMemory="80Gi"))):
        planned = fit(group, build_free_nodes(nodes[2:]))
        for occupied, expected in (((), "a"), (("a",), "c"), (("a", "c"), "a")):
            capacity = Capacity(free_nodes=build_free_nodes(nodes), **apart_from(nodes, *occupied))
            assigned, _ = assign_existing_plan(group, planned.plan, capacity, planned.sizes.gpu_floor)
            assert assigned.nodes == {0: expected}


def test_an_existing_plan_waits_for_a_gpu_of_its_size() -> None:
    """The pods require such a GPU, so no other node is of use."""
    group = spec(gpu())
    planned = fit(group, build_free_nodes([big("a", gpus=1, memory_mib=81559)]))
    used = big("a", gpus=1, memory_mib=81559, requested={GPU: 1.0})
    nodes = build_free_nodes([used, big("b", gpus=1, memory_mib=8192)])
    with pytest.raises(Shortage, match=r"node b is not matched by the pod's nodeSelector or node affinity"):
        assign_existing_plan(group, planned.plan, Capacity(free_nodes=nodes), planned.sizes.gpu_floor)


def sized(name: str, gpus: int, cores: float, memory_gib: int, gpu_mib: int = 81559) -> NodeView:
    labels = {f"{GPU}.memory": str(gpu_mib)} if gpus else {}
    return node(name, gpus=gpus, allocatable={"cpu": cores, "memory": memory_gib * GIB}, labels=labels)


def test_cpu_pods_beside_gpu_pods_leave_nodes_with_gpus_to_later_groups() -> None:
    nodes = [*(sized(f"gpu-{index}", 1, 20.0, 100) for index in range(3)), sized("plain", 0, 128.0, 512)]
    parsed = spec(gpu(resources={"limits": {"memory": "50Gi"}}), cpu(memory="90Gi"))
    free_nodes = build_free_nodes(nodes)
    gpu_nodes: set[str] = set()
    for _ in range(3):
        occupied = (*gpu_nodes, "plain") if gpu_nodes else ()
        planned = fit(parsed, free_nodes, **apart_from(nodes, *occupied))
        assert planned.node_assignment.nodes[0] == "plain"
        gpu_nodes.add(planned.node_assignment.nodes[1])
    assert gpu_nodes == {"gpu-0", "gpu-1", "gpu-2"}


def test_gpu_pods_use_different_nodes_although_cpu_pods_share_one() -> None:
    nodes = [sized("plain", 0, 128.0, 512), sized("gpu-0", 2, 20.0, 120)]
    smaller = sized("gpu-1", 1, 20.0, 120, gpu_mib=40960)
    parsed = spec(gpu(resources={"limits": {"memory": "50Gi"}}), cpu(memory="160Gi"))
    assert chosen(parsed, [*nodes, smaller], "plain", "gpu-0") == {"plain", "gpu-1"}


def test_another_zone_is_no_reason_for_a_smaller_gpu() -> None:
    nodes = [
        big(name, gpus=1, memory_mib=size, labels={ZONE: zone})
        for name, size, zone in (("a", 81559, "1"), ("b", 81559, "1"), ("c", 24576, "2"))
    ]
    assert chosen(spec(gpu()), nodes, "a") == {"b"}


def test_an_existing_plan_does_not_move_to_a_gpu_of_unknown_memory() -> None:
    nodes = [big("a", gpus=2, memory_mib=81559), big("unlabelled", gpus=1)]
    group = spec(gpu())
    planned = fit(group, build_free_nodes(nodes[:1]))
    capacity = Capacity(free_nodes=build_free_nodes(nodes), **apart_from(nodes, "a"))
    assigned, _ = assign_existing_plan(group, planned.plan, capacity, planned.sizes.gpu_floor)
    assert assigned.nodes == {0: "a"}


def test_devices_without_a_memory_label_do_not_end_the_search_of_larger_gpus() -> None:
    network = "rdma/hca"
    parsed = spec(gpu(resources={"limits": {network: "1"}}))
    nodes = [
        big(name, gpus=gpus, memory_mib=size, labels={ZONE: zone})
        for name, gpus, size, zone in (("a", 2, 81559, "1"), ("b", 1, 40960, "1"), ("c", 1, 8192, "2"))
    ]
    nodes = [replace(each, allocatable={**each.allocatable, network: 8.0}) for each in nodes]
    assert chosen(parsed, nodes, "a") == {"b"}
