"""Mode FeedForward: the ring and the larger steps with which a GPU computes experts of long prompts."""

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import event, example, given, settings
from hypothesis import strategies as st

from heteroinfer_contract.calibration import Calibration, Direction, Transfer
from heteroinfer_contract.errors import ContractError
from heteroinfer_contract.gpu_experts import LEAST_ROWS
from heteroinfer_contract.model import LayerKind, Scheme, SchemeName
from heteroinfer_contract.model_profile import ModelProfile
from heteroinfer_contract.plan import MAX_LANES, Device, Plan
from heteroinfer_operator.api import HeteroInferenceSpec, LoadSpec
from heteroinfer_operator.commands.plan_text import ShownParts, describe_plan
from heteroinfer_operator.errors import PlanError
from heteroinfer_operator.planning import Planned
from heteroinfer_operator.planning.engine_settings import CPU_BATCH_TOKENS
from heteroinfer_operator.planning.feed_forward import peak_extra_bytes, rank_weight_bytes
from heteroinfer_operator.planning.first_token import build_feed_forward_wait
from heteroinfer_operator.planning.gpu_sizes import gpu_memory_mib
from heteroinfer_operator.planning.inventory import Inventory
from heteroinfer_operator.planning.predicted_plan import find_sizes, predict_again
from heteroinfer_operator.planning.prediction import StepLoad, captured_rows, forecast_first_token
from heteroinfer_operator.planning.rates import LINK_BYTES_PER_S, gpu_rates
from heteroinfer_operator.planning.ring_choice import (
    RingChooser,
    describe_long_prompts,
    least_rows,
    predict_plan_wait,
)
from heteroinfer_operator.quantity import parse_bytes
from heteroinfer_operator.reconcile.status_summary import build_plan_status
from heteroinfer_operator.vllm_support.cuda_graphs import most_captured_rows
from tests.unit.calibrated import CALIBRATION
from tests.unit.planning.planned_models import GIB, MIB, cpu, gpu, plan, profile, spec
from vllm_heteroinfer.feed_forward import ring_slots, stream_balance

H200 = Inventory(gpu_product={"gpu": "NVIDIA-H200"})


def qwen(layers: int = 48, **kind: Any) -> ModelProfile:
    """Returns the shape of Qwen3-30B-A3B."""
    expert = LayerKind(
        kv_heads=4,
        kv_width=256,
        experts=128,
        experts_per_token=8,
        expert_bytes=9 * MIB,
        columns=768,
    )
    moe = replace(expert, **kind)
    return profile(
        architecture="Qwen3MoeForCausalLM",
        num_layers=layers,
        layer_bytes=(moe.experts * moe.expert_bytes + 36 * MIB,) * layers,
        kinds=(moe,),
        kind_of_layer=(0,) * layers,
        num_kv_heads=4,
        hidden_size=2048,
        vocab_size=151_936,
        embedding_bytes=594 * MIB,
        head_bytes=594 * MIB,
        column_unit=32,
    )


def asked(
    gpu_memory: str | None = "24Gi",
    memory: str = "64Gi",
    max_model_len: int = 8192,
    load: LoadSpec | None = None,
    **own: Any,
) -> HeteroInferenceSpec:
    feed_forward = {"cpu": "14", "memory": memory, **own}
    role = gpu(feedForward=feed_forward, **({} if gpu_memory is None else {"deviceMemory": gpu_memory}))
    planning = {} if load is None else {"planning": {"load": load.dump()}}
    return spec(role, engine={"maxModelLen": max_model_len}, **planning)


def without_ring(
    parsed: HeteroInferenceSpec, model: ModelProfile, inventory: Inventory, monkeypatch: pytest.MonkeyPatch
) -> Planned:
    """Returns the plan of the version before, in which CPUs compute all experts."""
    with monkeypatch.context() as patched:
        patched.setattr(RingChooser, "choose", lambda chooser, remote: (remote, chooser.engine))
        return plan(parsed, model, inventory)


def test_the_gpu_gets_a_ring_and_larger_steps() -> None:
    planned = plan(asked("48Gi"), qwen(), H200)
    own, theirs = planned.plan.ranks
    assert own.ring_bytes >= 4 * 9 * MIB, "three slots for an expert, and room for an unpacked one"
    assert theirs.ring_bytes == 0
    assert planned.plan.engine.max_num_batched_tokens == 8192
    assert Plan.from_json(planned.plan.to_json()) == planned.plan
    wait = build_feed_forward_wait(planned.plan, planned.sizes, planned.rates, planned.remote)
    # The CUDA graphs of decoding hold up to 128 rows, which stay on the CPUs.
    assert wait(StepLoad(tokens=129)) < 0.8 * wait(StepLoad(tokens=128))


def test_only_plentiful_memory_allows_steps_for_prompts_longer_than_8192() -> None:
    def step(gpu_memory: str, max_model_len: int) -> int:
        parsed = asked(gpu_memory, layers=24, max_model_len=max_model_len)
        return plan(parsed, qwen(), H200).plan.engine.max_num_batched_tokens

    assert step("80Gi", 32768) == 16384
    assert step("80Gi", 8192) == 8192
    assert step("38Gi", 32768) == 8192


@pytest.mark.parametrize("experts", [1, 2, 26])
def test_the_worker_divides_a_ring_as_planned(experts: int) -> None:
    remote = plan(asked("80Gi", layers=24), qwen(), H200).remote
    assert remote is not None
    assert remote.ring is not None
    ring, expert = remote.ring.with_slots_for(experts), 9 * MIB
    sizes = ring_slots.ring_sizes(
        ring.num_bytes, packed_bytes=expert, dense_bytes=expert, arrays=4 * MAX_LANES, most_experts=128
    )
    assert sizes.slot_experts == ring.experts_per_slot == experts
    assert sizes.num_bytes <= ring.num_bytes


@pytest.mark.parametrize("eager", [False, True])
def test_the_plan_and_the_worker_share_from_the_same_number_of_rows(eager: bool) -> None:
    engine = replace(plan(asked("80Gi", layers=24), qwen(), H200).plan.engine, eager_gpu=eager)
    first = next(stream_balance.rows_to_measure(captured_rows(engine), engine.max_num_batched_tokens))
    assert first == least_rows(engine)
    assert first > captured_rows(engine)


def unsupported() -> list[Any]:
    limited = replace(qwen(), limited_experts=True)
    dense = LayerKind(kv_heads=8, kv_width=256, mlp_bytes=336 * MIB, columns=14336)
    other_pods = spec(gpu(deviceMemory="24Gi"), cpu(memory="80Gi"), parallelism={"mode": "FeedForward"})
    both = spec(
        gpu(deviceMemory="24Gi", feedForward={"cpu": "14", "memory": "64Gi"}),
        cpu(memory="80Gi"),
        parallelism={"mode": "FeedForward"},
    )
    cases = {
        "limits": (asked(), limited, H200),
        "no gate": (asked(), replace(qwen(), architecture="NemotronHForCausalLM"), H200),
        "MLPs": (asked("12Gi"), profile(kinds=(dense,), kind_of_layer=(0,) * 32), H200),
        "other pods": (other_pods, qwen(), H200),
        "also other pods": (both, qwen(), H200),
        "unknown memory": (asked(None), qwen(), H200),
        "no GPU": (asked(), qwen(), Inventory(on_cpus={"gpu": "no GPU"})),
    }
    return [pytest.param(*case, id=name) for name, case in cases.items()]


@pytest.mark.parametrize(("parsed", "model", "inventory"), unsupported())
def test_no_ring_is_planned_if_the_worker_would_not_use_it(
    parsed: HeteroInferenceSpec, model: ModelProfile, inventory: Inventory
) -> None:
    planned = plan(parsed, model, inventory)
    assert not any(rank.ring_bytes for rank in planned.plan.ranks)
    assert planned.plan.engine.max_num_batched_tokens == CPU_BATCH_TOKENS


def test_a_ring_that_slows_the_load_down_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many short requests need the memory for their KV cache."""
    many = asked("24Gi", load=LoadSpec(requests=64, prompt_tokens=256, output_tokens=2048))
    kept = without_ring(many, qwen(), H200, monkeypatch)
    assert plan(many, qwen(), H200).plan == kept.plan
    assert plan(asked("24Gi"), qwen(), H200).plan.ranks[0].ring_bytes


@st.composite
def models(draw: st.DrawFn) -> ModelProfile:
    """Draws models in bf16 and in AWQ."""
    topk, bits = draw(st.sampled_from([1, 2, 8])), draw(st.sampled_from([16, 4]))
    model = qwen(experts_per_token=topk, expert_bytes=9 * MIB * bits // 16, experts_quantized=bits < 16)
    if bits == 16:
        return model
    return replace(model, scheme=Scheme(name=SchemeName.AWQ, bits=4, group=128), quantization="awq")


@st.composite
def specs(draw: st.DrawFn) -> HeteroInferenceSpec:
    own: dict[str, Any] = {
        "ranks": draw(st.integers(1, 4)),
        "layers": draw(st.none() | st.integers(1, 48)),
    }
    return asked(
        f"{draw(st.integers(6, 100))}Gi",
        f"{draw(st.integers(3, 80))}Gi",
        draw(st.sampled_from([512, 4096, 8192, 40_000])),
        **{name: value for name, value in own.items() if value is not None},
    )


@settings(max_examples=60)
@given(
    parsed=specs(),
    model=models(),
    known=st.sampled_from([H200, Inventory(), Inventory(gpu_product={"gpu": "NVIDIA-L4"})]),
)
@example(parsed=asked("30Gi", "33Gi", 512, ranks=1), model=qwen(), known=H200)  # 33.05 GiB needed
@example(parsed=asked(), model=qwen(), known=H200)  # without a bound, 40 % of the KV cache would be lost
def test_a_ring_never_needs_more_memory_than_there_is_and_never_refuses_a_plan(
    parsed: HeteroInferenceSpec, model: ModelProfile, known: Inventory
) -> None:
    try:
        before = without_ring(parsed, model, known, pytest.MonkeyPatch())
    except PlanError:
        with pytest.raises(PlanError):
            plan(parsed, model, known)
        return
    planned = plan(parsed, model, known)
    check_gpu_memory(planned)
    check_memory_of_ranks(planned)
    check_pace(planned, before)
    check_kv_cache(planned, before)


def check_kv_cache(planned: Planned, before: Planned) -> None:
    """Checks that ring and larger steps leave three quarters of the KV cache."""
    kept, whole = planned.plan.ranks[0].kv_cache_bytes, before.plan.ranks[0].kv_cache_bytes
    assert kept >= 0.75 * whole - planned.sizes.kv.block_bytes(0, 48)


def check_gpu_memory(planned: Planned) -> None:
    asking, ring = planned.plan.ranks[0], planned.sizes.ring
    event(f"ring: {ring is not None}, {planned.plan.engine.max_num_batched_tokens} tokens")
    budget, gpu_memory = planned.budgets[0].ranks[0].budget, planned.request.spec.roles[0].device_memory
    assert budget is not None
    assert gpu_memory is not None
    assert (ring is not None) == (asking.ring_bytes > 0)
    assert ring is None or ring.total_bytes > asking.ring_bytes
    held_bytes = asking.weight_bytes + asking.kv_cache_bytes + (ring.total_bytes if ring else 0)
    assert held_bytes <= budget
    floor_bytes = planned.sizes.gpu_floor.total(embeds=True, samples=True, gpus=1)
    assert held_bytes + floor_bytes <= parse_bytes(gpu_memory)
    assert asking.kv_cache_bytes >= planned.sizes.cache_bytes(0, 48), "one request of the promised length"


def check_memory_of_ranks(planned: Planned) -> None:
    setting = planned.request.spec.roles[0].feed_forward
    assert planned.remote is not None
    assert setting is not None
    for number in range(setting.ranks):
        needed = rank_weight_bytes(planned.remote, planned.plan.engine, number)
        needed += peak_extra_bytes(planned.remote, planned.plan.engine, (number,))
        assert needed <= parse_bytes(setting.memory)


def check_pace(planned: Planned, before: Planned) -> None:
    """Checks that a step takes no longer than before for each layer: decoding keeps its pace."""
    assert planned.remote is not None
    assert before.remote is not None
    setting = planned.request.spec.roles[0].feed_forward
    layers, layers_before = len(planned.remote.layers), len(before.remote.layers)
    assert 0 <= layers - layers_before <= (setting is not None and setting.layers is None)
    step_s, step_before_s = (
        build_feed_forward_wait(each.plan, each.sizes, each.rates, each.remote)(
            StepLoad(tokens=each.plan.engine.max_num_batched_tokens)
        )
        for each in (planned, before)
    )
    assert step_s / layers <= 1.001 * step_before_s / layers_before


@settings(max_examples=25)
@given(less=st.integers(14, 90), more=st.integers(0, 20), layers=st.integers(1, 48))
def test_more_gpu_memory_never_gives_slower_prompts(less: int, more: int, layers: int) -> None:
    """The number of layers on CPUs is the same."""

    def tokens_per_s(gib: int) -> float:
        parsed = asked(f"{gib}Gi", layers=layers)
        planned = plan(parsed, qwen(), H200)
        tokens = planned.plan.engine.max_num_batched_tokens
        wait = build_feed_forward_wait(planned.plan, planned.sizes, planned.rates, planned.remote)
        return tokens / wait(StepLoad(tokens=tokens))

    try:
        slower = tokens_per_s(less)
    except PlanError:
        event("refused")
    else:
        assert tokens_per_s(less + more) >= 0.999 * slower


def test_little_memory_for_ranks_means_smaller_steps() -> None:
    def step(memory: str) -> int:
        return plan(asked("80Gi", memory, layers=24), qwen(), H200).plan.engine.max_num_batched_tokens

    assert (step("31Gi"), step("29Gi"), step("29184Mi")) == (8192, 4096, 2048)
    with pytest.raises(PlanError, match="the feed-forward rank with the largest share lacks"):
        step("28Gi")


def test_a_kept_plan_is_predicted_with_its_ring_and_needs_gpus_with_room_for_it() -> None:
    parsed = asked("48Gi")
    planned = plan(parsed, qwen(), H200)
    again = predict_again(planned.plan, parsed, qwen(), H200)
    assert again is not None
    assert again.plan == planned.plan
    found = find_sizes(planned.plan, parsed, qwen())
    assert found is not None
    assert found == (planned.sizes, found[1])
    unlabelled = asked(None)
    kept = gpu_memory_mib(unlabelled, planned.plan, {"gpu": 80 * GIB}, planned.sizes.gpu_floor)
    own = planned.plan.ranks[0]
    needed = own.weight_bytes + own.kv_cache_bytes + own.ring_bytes
    assert kept[0] * MIB >= needed + planned.sizes.gpu_floor.total(embeds=True, samples=True, gpus=1)


def test_a_plan_of_the_version_before_keeps_its_steps_and_no_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed = asked("48Gi")
    before = without_ring(parsed, qwen(), H200, monkeypatch).plan
    assert "ring_bytes" not in before.to_json()
    again = predict_again(before, parsed, qwen(), H200)
    assert again is not None
    assert again.plan == before
    found = find_sizes(before, parsed, qwen())
    assert found is not None
    assert found[0].ring is None


def test_only_a_gpu_whose_feed_forward_ranks_are_in_its_pod_has_a_ring() -> None:
    planned = plan(asked("48Gi"), qwen(), H200).plan
    own, theirs = planned.ranks
    for ranks in (
        (replace(own, device=Device.CPU), theirs),
        (own, replace(theirs, ring_bytes=1)),
        (own, replace(theirs, pod=1, local_rank=0)),
    ):
        with pytest.raises(ContractError, match="ring_bytes: must be 0 unless the rank has a GPU"):
            replace(planned, ranks=ranks)


MEASURED = {128: 83.6, 512: 98.7, 1024: 112.2, 2048: 133.6, 4096: 163.5}
"""Milliseconds to the first token of 8 layers, all with their experts off the GPU (H200, 2026-11-27)."""
CPU_MS = {4: 10.2, 16: 12.9, 64: 26.7, 512: 159.0, 2048: 636.0}
"""Milliseconds in which the CPUs of that host compute a layer, by rows of each expert, in the same run."""


def of_that_host() -> Calibration:
    """Returns a calibration with the rates of that run."""
    layer_bytes = 128 * 9 * MIB
    kernels = tuple(
        replace(
            kernel,
            bytes_per_s=115e9,
            more_rows=tuple(layer_bytes / ms * 1e3 for ms in CPU_MS.values()),
            threads=14,
        )
        for kernel in CALIBRATION.kernels
        if (kernel.part, kernel.scheme) == ("experts", SchemeName.NONE)
    )
    readings = tuple(replace(each, bytes_per_s=115e9) for each in CALIBRATION.readings)
    transfers = (Transfer(direction=Direction.TO_GPU, bytes_per_s=55e9),)
    return replace(CALIBRATION, kernels=kernels, readings=readings, transfers=transfers)


def test_first_tokens_are_predicted_as_measured() -> None:
    known = replace(H200, calibration={"gpu": of_that_host()})
    planned = plan(asked("140Gi", layers=8), qwen(8), known)
    assert planned.remote is not None
    # That run captured graphs of up to 64 rows.
    engine = replace(planned.plan.engine, max_num_seqs=32)
    measured_plan = replace(planned.plan, engine=engine)
    wait = build_feed_forward_wait(measured_plan, planned.sizes, planned.rates, planned.remote)
    for tokens, measured_ms in MEASURED.items():
        first = forecast_first_token(measured_plan, planned.sizes, planned.rates, tokens, wait)
        assert first.step_s * 1e3 == pytest.approx(measured_ms, rel=0.15), tokens


def test_the_gpu_takes_more_experts_of_longer_prompts() -> None:
    planned = plan(asked("48Gi"), qwen(), H200)
    assert planned.remote is not None
    parts = [
        predict_plan_wait(planned.plan, planned.sizes, planned.rates, planned.remote, load).gpu_part
        for load in (StepLoad(tokens=tokens) for tokens in (1, 128, 129, 512, 2048, 8192))
    ]
    assert parts[:2] == [0, 0]
    assert 0 < parts[2] < parts[3] < parts[4] < parts[5] <= 1


def test_plan_and_status_show_the_rule_of_long_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed = asked("48Gi")
    planned = plan(parsed, qwen(), H200)
    text = describe_plan(planned, "moe", ShownParts(explain=True))
    rule = (
        r"in steps of 129 tokens or more, the GPU computes a part of the experts and the CPUs the rest "
        r"\(\d+% with 129, \d+% with 2,048, \d+% with 8,192\); in shorter steps, CPUs compute all experts"
    )
    assert re.search(rf"  long prompts +{rule}\n", text)
    shown = build_plan_status(planned.plan, predict_again(planned.plan, parsed, qwen(), H200)).long_prompts
    assert shown is not None
    assert re.fullmatch(rule, shown)
    before = without_ring(parsed, qwen(), H200, monkeypatch)
    assert "long prompts" not in describe_plan(before, "moe", ShownParts(explain=True))
    again = predict_again(before.plan, parsed, qwen(), H200)
    assert build_plan_status(before.plan, again).long_prompts is None


def test_options_of_cuda_graphs_move_the_limit_of_short_steps() -> None:
    def shown(*args: str) -> str:
        parsed = asked("80Gi", layers=24)
        parsed = parsed.changed(engine=parsed.engine.changed(args=args))
        planned = plan(parsed, qwen(), H200)
        return describe_long_prompts(planned.plan, planned.sizes, planned.rates, planned.remote)

    assert "in steps of 129 tokens or more" in shown()
    assert "in steps of 257 tokens or more" in shown("--max-cudagraph-capture-size", "256")
    assert f"in steps of {LEAST_ROWS} tokens or more" in shown("-cc.cudagraph_mode=NONE")


@pytest.mark.parametrize(
    ("args", "rows"),
    [
        ((), 128),
        (("--max-cudagraph-capture-size", "250"), 248),
        (("--max_cudagraph_capture_size=300",), 288),
        (("--max-cudagraph-capture-size", "5"), 4),
        (("--max-cudagraph-capture-size", "5000"), 2048),
        (("--cudagraph-capture-sizes", "1", "48", "7", "--enable-prefix-caching", "96"), 48),
        (("--cudagraph-capture-sizes", "16", "4096"), 16),
        (("--compilation-config", '{"cudagraph_capture_sizes": [4, 24], "mode": 3}'), 24),
        (("-cc", '{"max_cudagraph_capture_size": 64}'), 64),
        (("--compilation-config.max_cudagraph_capture_size", "32"), 32),
        (("-cc.cudagraph_mode=NONE",), 0),
        (("-O0",), 0),
        (("--optimization-level", "1"), 128),
        (("--compilation-config", "not json"), 128),
    ],
)
def test_captured_rows_follow_the_options_of_vllm(args: tuple[str, ...], rows: int) -> None:
    assert most_captured_rows(args, 64, 2048) == rows


def test_no_graph_has_more_rows_than_a_step() -> None:
    assert most_captured_rows((), 64, 64) == 64
    assert most_captured_rows((), 1000, 2048) == 512


def test_the_user_may_set_the_tokens_of_a_step() -> None:
    def tokens_and_ring(*roles: dict[str, Any], tokens: int) -> tuple[int, bool]:
        parsed = spec(*roles, engine={"maxModelLen": 8192, "maxBatchedTokens": tokens})
        planned = plan(parsed, qwen(), H200).plan
        return planned.engine.max_num_batched_tokens, planned.ranks[0].ring_bytes > 0

    role = gpu(deviceMemory="80Gi", feedForward={"cpu": "14", "memory": "64Gi", "layers": 24})
    assert tokens_and_ring(role, tokens=3000) == (3000, True)
    assert tokens_and_ring(role, tokens=32768) == (32768, True)
    assert tokens_and_ring(gpu(deviceMemory="80Gi"), tokens=4096) == (4096, False)
    with pytest.raises(PlanError, match="the feed-forward rank with the largest share lacks"):
        tokens_and_ring({**role, "feedForward": {**role["feedForward"], "memory": "29Gi"}}, tokens=32768)


def test_the_link_is_that_of_the_calibration_or_of_the_product() -> None:
    slow = Transfer(direction=Direction.TO_GPU, bytes_per_s=20e9, contended=True)
    fast = Transfer(direction=Direction.TO_GPU, bytes_per_s=25e9)
    back = Transfer(direction=Direction.FROM_GPU, bytes_per_s=1e9, contended=True)
    measured = replace(CALIBRATION, transfers=(fast, slow, back))
    assert gpu_rates("NVIDIA-H200", measured).link == 20e9
    assert gpu_rates("NVIDIA-H200", replace(measured, transfers=(fast, back))).link == 25e9
    assert gpu_rates("NVIDIA-H200", CALIBRATION).link == LINK_BYTES_PER_S
    assert gpu_rates("NVIDIA-A100-SXM4-80GB").link == LINK_BYTES_PER_S / 2
    assert gpu_rates("NVIDIA-L4").link == LINK_BYTES_PER_S / 2
    assert gpu_rates("Tesla-T4").link == LINK_BYTES_PER_S / 4
    assert gpu_rates("").link == gpu_rates("NVIDIA-GeForce-RTX-4090").link == LINK_BYTES_PER_S / 2
