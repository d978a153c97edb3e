"""Mode Auto: the choice in twelve cells, its figures, its reasons, and what it leaves out."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from heteroinfer_contract.model import LayerKind
from heteroinfer_contract.model_profile import ModelProfile
from heteroinfer_contract.plan import Device, Mode
from heteroinfer_operator.api import HeteroInferenceSpec, LoadSpec, parse_spec
from heteroinfer_operator.commands.plan_text import ShownParts, describe_plan
from heteroinfer_operator.errors import PlanError, Shortage
from heteroinfer_operator.nodes.node_platform import IMAGE_PLATFORM
from heteroinfer_operator.nodes.node_view import NodeView
from heteroinfer_operator.planning import Capacity, GroupRequest, Planned, build_free_nodes, plan_group
from heteroinfer_operator.planning.auto_mode import predict_load
from tests.unit.planning.planned_models import GIB, MIB, cpu, gpu, plan, profile

CPUS = {"requests": {"cpu": "14", "memory": "80Gi"}}
LOADS = {"one": LoadSpec(), "many": LoadSpec(requests=32, prompt_tokens=256, output_tokens=512)}


@cache
def shapes() -> dict[str, ModelProfile]:
    expert = 9 * MIB
    routed = LayerKind(kv_heads=4, kv_width=256, experts=128, experts_per_token=8, expert_bytes=expert)
    mixture = profile(
        num_layers=24,
        layer_bytes=(128 * expert + 40 * MIB,) * 24,
        kinds=(routed,),
        kind_of_layer=(0,) * 24,
        embedding_bytes=600 * MIB,
        head_bytes=600 * MIB,
        hidden_size=2048,
    )
    dense = LayerKind(kv_heads=8, kv_width=256, mlp_bytes=336 * MIB)
    return {"dense": profile(kinds=(dense,), kind_of_layer=(0,) * 32), "mixture": mixture}


def auto(*roles: dict[str, Any], load: LoadSpec = LOADS["one"], **fields: Any) -> HeteroInferenceSpec:
    return parse_spec(
        {
            "model": {"uri": "hf://org/model"},
            "engine": {"maxModelLen": 4096},
            "roles": list(roles),
            "planning": {"load": load.dump()},
            **fields,
        }
    )


def forced(memory: str, load: LoadSpec) -> dict[str, HeteroInferenceSpec]:
    """Returns the specs of a user who knows the modes and has the same GPU and CPUs."""
    both = (gpu(deviceMemory=memory), cpu(resources=CPUS))
    own = {"cpu": "14", "memory": "80Gi"}
    return {
        "GPU only": auto(both[0], load=load, parallelism={"mode": "Pipeline"}),
        "FeedForward": auto(
            gpu(deviceMemory=memory, feedForward=own), load=load, parallelism={"mode": "FeedForward"}
        ),
        "FeedForward, CPU pods": auto(*both, load=load, parallelism={"mode": "FeedForward"}),
        "Pipeline": auto(*both, load=load, parallelism={"mode": "Pipeline"}),
        "Tensor": auto(*both, load=load, parallelism={"mode": "Tensor"}),
    }


def title(planned: Planned) -> str:
    assert planned.choice is not None
    return planned.choice.chosen.title


@pytest.mark.parametrize(
    ("shape", "memory", "load", "chosen"),
    [
        ("dense", "8Gi", "one", "FeedForward"),
        ("dense", "8Gi", "many", "Pipeline"),
        ("dense", "16Gi", "one", "Pipeline"),
        ("dense", "16Gi", "many", "Pipeline"),
        ("dense", "40Gi", "one", "GPU only"),
        ("dense", "40Gi", "many", "GPU only"),
        ("mixture", "8Gi", "one", "FeedForward"),
        ("mixture", "8Gi", "many", "FeedForward"),
        ("mixture", "24Gi", "one", "FeedForward"),
        ("mixture", "24Gi", "many", "FeedForward"),
        ("mixture", "80Gi", "one", "FeedForward"),
        ("mixture", "80Gi", "many", "GPU only"),
    ],
)
def test_no_forced_mode_is_more_than_a_tenth_faster(shape: str, memory: str, load: str, chosen: str) -> None:
    model, wanted = shapes()[shape], LOADS[load]
    planned = plan(auto(gpu(deviceMemory=memory), cpu(resources=CPUS), load=wanted), model)
    own_s = predict_load(planned, wanted).total_s
    assert title(planned) == chosen
    for name, spec in forced(memory, wanted).items():
        try:
            other_s = predict_load(plan(spec, model), wanted).total_s
        except PlanError:
            assert name != chosen
            continue
        assert other_s >= 0.9 * own_s, f"{name} takes {other_s} s, {chosen} {own_s} s"


def test_equal_arguments_give_an_equal_choice_and_a_plan_of_the_chosen_spec() -> None:
    spec = auto(gpu(deviceMemory="24Gi"), cpu(resources=CPUS))
    first, second = (plan(spec, shapes()["mixture"]) for _ in range(2))
    assert first == second
    assert first.choice is not None
    resolved = first.request.spec
    assert resolved == first.choice.chosen.apply_to(spec)
    assert plan(resolved, shapes()["mixture"]).plan == first.plan


def test_moved_resources_are_those_of_the_cpu_role_and_no_more() -> None:
    planned = plan(auto(gpu(deviceMemory="24Gi"), cpu(resources=CPUS)), shapes()["mixture"])
    (role,) = planned.request.spec.roles
    assert role.feed_forward is not None
    assert (role.feed_forward.ranks, role.feed_forward.cpu) == (1, "14")
    assert role.feed_forward.memory == "81920Mi"
    assert {rank.role for rank in planned.plan.ranks} == {"gpu"}
    assert planned.plan.mode is Mode.FEED_FORWARD


def test_the_load_decides_which_mode_is_the_fastest() -> None:
    """For many requests, a large KV cache gives more speed than the fastest step of one request."""
    model = shapes()["dense"]
    roles = (gpu(deviceMemory="23Gi"), cpu(resources=CPUS))
    one, many = (
        plan(auto(*roles, load=LoadSpec(requests=requests, output_tokens=2000)), model)
        for requests in (1, 256)
    )
    assert one.choice is not None
    assert many.choice is not None
    alone = {each.title: each.figures for each in one.choice.options}["GPU only"]
    crowded = {each.title: each.figures for each in many.choice.options}["GPU only"]
    assert alone is not None
    assert crowded is not None
    assert alone.num_concurrent == 1 < crowded.num_concurrent < 256, "the KV cache bounds the requests"
    assert crowded.total_s > 256 / crowded.num_concurrent * alone.total_s / 2


def test_every_mode_has_figures_or_a_reason() -> None:
    planned = plan(auto(gpu(deviceMemory="12Gi"), cpu(resources=CPUS)), shapes()["dense"])
    assert planned.choice is not None
    options = planned.choice.options
    assert sorted(each.title for each in options) == [
        "FeedForward",
        "FeedForward, CPU pods",
        "GPU only",
        "Pipeline",
        "Tensor",
    ]
    assert all((each.figures is None) == bool(each.reason) for each in options)
    words = str(planned.choice)
    assert words.startswith("Pipeline chosen by prediction for 1 request of 1,024 prompt and 256 output")
    assert "GPU only does not fit: roles: memory for" in words
    text = describe_plan(planned, "demo", ShownParts())
    assert "mode Pipeline, chosen by the plan" in text
    assert "<- chosen" in text
    assert "GPU only: roles: memory for" in text


def test_reports_the_gain_of_a_larger_gpu() -> None:
    planned = plan(auto(gpu(deviceMemory="12Gi"), cpu(resources=CPUS)), shapes()["dense"])
    assert planned.choice is not None
    (gain,) = planned.choice.gains
    assert gain.startswith("with GPUs of 24Gi, GPU only would take")
    assert planned.request.spec.roles[0].device_memory == "12Gi", "the plan adds nothing"


def test_reports_the_gain_of_more_feed_forward_memory() -> None:
    small = {"requests": {"cpu": "2", "memory": "30Gi"}}
    own = {"cpu": "14", "memory": "8Gi"}
    roles = (gpu(deviceMemory="16Gi", feedForward=own), cpu(resources=small))
    planned = plan(auto(*roles), shapes()["mixture"])
    assert planned.choice is not None
    assert title(planned) == "FeedForward, CPU pods"
    assert any(
        "of memory for each feed-forward rank, FeedForward would take" in gain
        for gain in planned.choice.gains
    )


def test_refuses_only_if_no_mode_fits_and_names_each_reason() -> None:
    tiny = {"requests": {"cpu": "2", "memory": "4Gi"}}
    with pytest.raises(PlanError) as caught:
        plan(auto(gpu(deviceMemory="6Gi"), cpu(resources=tiny)), shapes()["dense"])
    lines = caught.value.message.splitlines()
    assert caught.value.reason == "InsufficientMemory"
    for name in ("GPU only", "FeedForward", "Pipeline", "Tensor"):
        assert any(line.startswith(f"{name}: ") for line in lines), lines


def test_a_reason_that_all_modes_share_is_printed_once() -> None:
    roles = (gpu(deviceMemory="24Gi"), cpu(resources=CPUS))
    with pytest.raises(PlanError) as caught:
        plan(auto(*roles, engine={"args": ["--pipeline-parallel-size", "2"]}), shapes()["dense"])
    assert len(caught.value.message.splitlines()) == 1


def test_auto_mode_with_unknown_memory_uses_the_mode_of_the_roles() -> None:
    pipeline = plan(auto(gpu(), cpu(resources=CPUS)), shapes()["dense"])
    assert title(pipeline) == "Pipeline"
    own = {"cpu": "14", "memory": "64Gi"}
    feed_forward = plan(auto(gpu(feedForward=own)), shapes()["mixture"])
    assert title(feed_forward) == "FeedForward"
    assert feed_forward.choice is not None
    assert "the memory of a rank is unknown" in str(feed_forward.choice)


def test_the_only_mode_needs_no_memory() -> None:
    planned = plan(auto(gpu()))
    assert title(planned) == "Pipeline"
    assert planned.plan.ranks[0].device is Device.GPU


def test_gpus_of_one_pod_share_layers() -> None:
    """Two GPUs read half of each layer each, at the cost of two all-reduces a layer."""
    planned = plan(auto(gpu(ranksPerPod=2, deviceMemory="40Gi")))
    assert title(planned) == "Tensor"


def test_settings_of_the_user_limit_the_modes() -> None:
    planned = plan(auto(gpu(deviceMemory="24Gi", layers=[20]), cpu(layers=[12], resources=CPUS)))
    assert title(planned) == "Pipeline"
    assert planned.plan.layers_by_stage == (12, 20)


def node(name: str, cpus: int, gpus: int = 0) -> NodeView:
    devices = {"nvidia.com/gpu": float(gpus)} if gpus else {}
    return NodeView(
        name=name,
        allocatable={"cpu": cpus, "memory": 512 * GIB, "pods": 100, **devices},
        labels=IMAGE_PLATFORM,
    )


def on_nodes(spec: HeteroInferenceSpec, *nodes: NodeView) -> tuple[Planned, Capacity]:
    request = GroupRequest(spec=spec, profile=shapes()["mixture"], served_name="m", model_path="/model")
    capacity = Capacity(free_nodes=build_free_nodes(nodes))
    return plan_group(request, capacity), capacity


def test_a_mode_does_not_fit_if_its_pods_fit_on_no_node() -> None:
    """FeedForward in the GPU's pod is faster, but needs 14 CPUs on the GPU's node."""
    spec = auto(gpu(deviceMemory="24Gi"), cpu(resources=CPUS))
    together, _ = on_nodes(spec, node("a", 32, gpus=1), node("b", 32))
    assert title(together) == "FeedForward"
    apart, capacity = on_nodes(spec, node("a", 8, gpus=1), node("b", 32))
    assert title(apart) == "FeedForward, CPU pods"
    assert [rank.pod for rank in apart.plan.ranks] == [0, 1]
    assert apart.choice is not None
    reasons = {each.title: each.reason for each in apart.choice.options}
    assert "needs 1 pod (role gpu)" in reasons["FeedForward"]
    assert {node.node.name: node.free["cpu"] for node in capacity.free_nodes or ()} == {"a": 8, "b": 18}, (
        "modes that were only tried take nothing"
    )


def test_nothing_is_chosen_while_all_modes_lack_capacity() -> None:
    with pytest.raises(Shortage):
        on_nodes(auto(gpu(deviceMemory="24Gi"), cpu(resources=CPUS)), node("b", 32))


def test_without_gpus_the_choice_is_between_plans_on_cpus() -> None:
    roles = (gpu(deviceMemory="24Gi", resources=CPUS), cpu(resources=CPUS))
    planning = {"onGPUShortage": {"action": "CPUOnly", "after": "0s"}}
    planned, _ = on_nodes(auto(*roles, planning=planning), node("a", 64), node("b", 64))
    assert {rank.device for rank in planned.plan.ranks} == {Device.CPU}
    assert planned.choice is not None


def test_the_default_load_is_one_request() -> None:
    spec = auto(gpu())
    without = spec.changed(planning=spec.planning.changed(load=None))
    assert without.planning.chosen_load == LoadSpec(requests=1, prompt_tokens=1024, output_tokens=256)
    assert replace_load(spec, LOADS["many"]).planning.chosen_load == LOADS["many"]


def replace_load(spec: HeteroInferenceSpec, load: LoadSpec) -> HeteroInferenceSpec:
    return spec.changed(planning=spec.planning.changed(load=load))


def test_a_short_model_bounds_the_load() -> None:
    spec = auto(gpu(deviceMemory="40Gi"), load=LoadSpec(prompt_tokens=100_000, output_tokens=100_000))
    planned = plan(spec)
    longest = replace(planned.plan.engine).max_model_len
    assert longest == 4096
    assert planned.choice is not None
    assert planned.choice.options[0].figures is not None
