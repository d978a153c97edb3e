"""Refusals at plan time for published shapes, and their messages."""

from dataclasses import replace
from typing import Any

import pytest

from heteroinfer_contract import load_formats
from heteroinfer_contract.model import Routing, Scheme, SchemeName
from heteroinfer_contract.model_profile import ModelProfile
from heteroinfer_operator.api import HeteroInferenceSpec
from heteroinfer_operator.errors import PlanError
from heteroinfer_operator.nodes.cpu_features import AMX, AVX512
from heteroinfer_operator.nodes.node_platform import IMAGE_PLATFORM
from heteroinfer_operator.nodes.node_view import NodeView
from heteroinfer_operator.planning import Capacity, GroupRequest, Inventory, build_free_nodes, plan_group
from heteroinfer_operator.planning.kv_cache import cache_element_bytes
from heteroinfer_operator.vllm_support.architectures import BROKEN_PIPELINE
from tests.shapes.profiles import recorded_profiles
from tests.unit.planning.planned_models import cpu, gpu, plan, profile, spec

HUGE = {"memory": "4Ti", "pods": 2}
MIXED = (gpu(deviceMemory="80Gi"), cpu(**HUGE))
TEXT_ONLY = {"engine": {"args": ["--language-model-only"]}}


def refusal(name: str, parsed: HeteroInferenceSpec, inventory: Inventory | None = None) -> str:
    with pytest.raises(PlanError) as caught:
        plan(parsed, recorded_profiles()[name], inventory)
    assert caught.value.reason == "UnsupportedModel"
    return caught.value.message


@pytest.mark.parametrize(
    ("name", "why", "remedy"),
    [
        ("DeepSeek-V3.2", "sparse attention", "or DeepSeek-V3 or V3.1"),
        ("Nemotron-3-Nano-30B-A3B", "with the experts' activation relu2_no_mul", "Use GPU roles only"),
        ("gemma-3-27b-it", "in both directions", "--language-model-only"),
    ],
)
def test_refusals_of_cpu_ranks_name_a_remedy(name: str, why: str, remedy: str) -> None:
    message = refusal(name, spec(*MIXED))
    assert why in message
    assert remedy in message


@pytest.mark.parametrize("mode", ["Pipeline", "Tensor"])
@pytest.mark.parametrize("load_format", load_formats.GPU_FORMATS)
def test_cpu_stages_refuse_formats_that_only_gpus_read(mode: str, load_format: str) -> None:
    fields: dict[str, Any] = {
        "parallelism": {"mode": mode},
        "engine": {"args": ["--load-format", load_format]},
    }
    with pytest.raises(PlanError, match=rf"--load-format {load_format}: .* or set safetensors") as caught:
        plan(spec(gpu(), cpu(), **fields))
    assert caught.value.reason == "UnsupportedModel"
    fields["engine"] = {"args": ["--load-format", "safetensors"]}
    assert plan(spec(gpu(), cpu(), **fields)).plan.ranks


@pytest.mark.parametrize("load_format", load_formats.GPU_FORMATS)
def test_plans_with_gpus_only_may_read_any_format(load_format: str) -> None:
    assert plan(spec(gpu(pods=2), engine={"args": ["--load-format", load_format]})).plan.ranks


@pytest.mark.parametrize("name", sorted(recorded_profiles()))
def test_plans_with_gpus_only_ignore_limits_of_cpus(name: str) -> None:
    alone = spec(gpu(deviceMemory="141Gi", pods=16))
    profile = recorded_profiles()[name]
    if profile.architecture in BROKEN_PIPELINE:
        alone = spec(gpu(deviceMemory="141Gi"))
    assert plan(alone, profile).plan.engine.block_size >= 32


@pytest.mark.parametrize("name", ["gemma-3-27b-it", "Qwen2.5-VL-7B-Instruct", "Qwen3-VL-8B-Instruct"])
def test_text_only_models_are_planned_without_the_encoder(name: str) -> None:
    profile = recorded_profiles()[name]
    text = plan(spec(*MIXED, **TEXT_ONLY), profile).plan
    listed = spec(*MIXED, parallelism={"stageOrder": "AsListed"})
    assert text.ranks[-1].weight_bytes > 0
    if name != "gemma-3-27b-it":
        first = plan(listed, profile).plan.ranks[0]
        assert first.num_layers >= profile.first_stage_layers
        without = replace(profile, encoder="", encoder_bytes=0)
        assert first.weight_bytes - plan(listed, without).plan.ranks[0].weight_bytes == profile.encoder_bytes


@pytest.mark.parametrize(
    ("roles", "order"),
    [
        ([cpu(memory="64Gi"), gpu(deviceMemory="80Gi")], "GC"),
        ([gpu(deviceMemory="80Gi"), cpu(memory="64Gi")], "GC"),
        ([cpu(memory="64Gi", pods=2), gpu(deviceMemory="80Gi", pods=2)], "GCCG"),
        ([cpu(memory="64Gi"), gpu(deviceMemory="80Gi", ranksPerPod=2)], "GGC"),
    ],
    ids=["CPU listed first", "GPU listed first", "two GPU pods", "two GPUs of a pod"],
)
def test_a_gpu_comes_first_for_an_encoder_and_another_one_last_for_the_head(
    roles: list[dict[str, Any]], order: str
) -> None:
    profile = recorded_profiles()["Qwen2.5-VL-7B-Instruct"]
    ranks = plan(spec(*roles), profile).plan.ranks
    assert "".join(rank.device.value[0] for rank in ranks) == order
    text = plan(spec(*roles, **TEXT_ONLY), profile).plan.ranks
    assert "".join(rank.device.value[0] for rank in text) == "".join(sorted(order)), "the head on a GPU"


@pytest.mark.parametrize(
    ("gpus", "cpus", "order"),
    [
        (gpu(pods=2), cpu(memory="200Gi", pods=4), "GGCCCC"),
        (gpu(pods=2, layers=[4]), cpu(memory="200Gi", pods=4, layers=[12, 12]), "GGCCCC"),
        (gpu(pods=4, layers=[4, 4]), cpu(memory="200Gi", pods=2, layers=[20]), "GGCCGG"),
    ],
    ids=["as planned", "given layers", "two stages of GPUs"],
)
def test_a_stage_of_gpus_comes_first_for_an_encoder(
    gpus: dict[str, Any], cpus: dict[str, Any], order: str
) -> None:
    both = spec(cpus, {**gpus, "deviceMemory": "80Gi"}, parallelism={"mode": "Tensor", "tensor": 2})
    ranks = plan(both, recorded_profiles()["Qwen2.5-VL-7B-Instruct"]).plan.ranks
    assert "".join(rank.device.value[0] for rank in ranks) == order


@pytest.mark.parametrize("name", ["Qwen2.5-VL-7B-Instruct", "Mistral-Small-3.2-24B-Instruct"])
def test_an_encoder_that_no_gpu_may_run_is_refused(name: str) -> None:
    roles = [cpu(memory="64Gi"), gpu(deviceMemory="80Gi")]
    for refused in (spec(roles[0]), spec(*roles, parallelism={"stageOrder": "AsListed"})):
        message = refusal(name, refused)
        assert "first stage is on a CPU" in message
        assert "Add a GPU role and remove parallelism.stageOrder, or serve text only" in message


def test_a_first_stage_with_too_few_layers_for_an_encoder_is_refused() -> None:
    few = spec(gpu(layers=[2]), cpu(layers=[34]), parallelism={"stageOrder": "AsListed"})
    with pytest.raises(PlanError, match=r"the first stage must have at least 3 layers \(got 2\), because"):
        plan(few, recorded_profiles()["Qwen3-VL-8B-Instruct"])


def test_four_bit_weights_run_in_bfloat16_unless_another_type_is_requested() -> None:
    awq = recorded_profiles()["Llama-3.3-70B-Instruct-AWQ"]
    assert plan(spec(*MIXED), awq).plan.engine.dtype == "bfloat16"
    assert plan(spec(gpu()), awq).plan.engine.dtype == "float16"
    assert plan(spec(*MIXED, engine={"dtype": "float16"}), awq).plan.engine.dtype == "float16"


NO_AVX512 = Inventory(cpu_features={"cpu": frozenset(), "gpu": frozenset()})


@pytest.mark.parametrize(
    "name",
    [
        "Llama-3.3-70B-Instruct-AWQ",
        "Llama-3.1-8B-Instruct-GPTQ-INT4",
        "Llama-3.3-70B-Instruct-NVFP4",
        "Llama-3.3-70B-Instruct-FP8-dynamic",
        "Llama-3.1-8B-Instruct-FP8",
    ],
)
def test_linear_layers_of_any_format_run_on_any_cpu(name: str) -> None:
    planned = plan(spec(*MIXED), recorded_profiles()[name], NO_AVX512)
    assert not any("AVX-512" in note or "AMX" in note for note in planned.notes)
    slow, fast = planned.rates[0], plan(spec(*MIXED), recorded_profiles()[name]).rates[0]
    assert slow.source.startswith("default rates for CPUs with AVX2 (")
    assert fast.source.startswith("default rates for CPUs with AVX-512 BF16 (")
    assert slow.quantized_kernel is not None
    assert fast.quantized_kernel is not None
    assert slow.quantized_kernel.rate(16) < fast.quantized_kernel.rate(16)


@pytest.mark.parametrize("name", ["Kimi-K2-Thinking", "Nemotron-3-Nano-30B-A3B", "DeepSeek-V3"])
def test_feed_forward_ranks_take_experts_on_any_cpu(name: str) -> None:
    """These models cannot run in CPU stages because of their activations or attention."""
    model = recorded_profiles()[name]
    assert refusal(name, spec(*MIXED), NO_AVX512)
    role = gpu(feedForward={"ranks": 1, "cpu": "56", "memory": "3Ti"}, deviceMemory="141Gi")
    assert plan(spec(role, parallelism={"mode": "FeedForward"}), model, NO_AVX512).remote


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("Qwen3-235B-A22B-FP8", "AVX-512 is needed on CPUs for experts in FP8 in blocks"),
        ("MiniMax-M2", "experts in FP8 in blocks with MiniMax2 routing: vLLM's expert kernel"),
        ("gpt-oss-120b", "AMX is needed on CPUs for experts in MXFP4"),
    ],
)
def test_only_ranks_that_share_layers_need_kernels_of_vllm_for_experts(name: str, why: str) -> None:
    model = recorded_profiles()[name]
    assert plan(spec(*MIXED), model, NO_AVX512).plan
    shared = spec(cpu(memory="4Ti", pods=2), parallelism={"mode": "Tensor"})
    assert why in refusal(name, shared, NO_AVX512)


def test_experts_of_stages_are_in_every_format_of_our_kernels() -> None:
    model = recorded_profiles()["Qwen3-235B-A22B-FP8"]
    for scheme, bits, group in (
        *(
            (SchemeName.INT4, 4, 32),
            (SchemeName.AWQ, 4, 64),
            (SchemeName.GPTQ, 4, 128),
            (SchemeName.INT8, 8, 0),
        ),
        *((SchemeName.MXFP4, 4, 32), (SchemeName.MXFP8, 8, 32), (SchemeName.NVFP4, 4, 16)),
        *((SchemeName.FP8_CHANNEL, 8, 0), (SchemeName.FP8_TENSOR, 8, 0)),
    ):
        held = replace(
            model, quantization="compressed-tensors", scheme=Scheme(name=scheme, bits=bits, group=group)
        )
        assert plan(spec(*MIXED), held, NO_AVX512).plan, scheme


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"architecture": "KimiK3ForConditionalGeneration"}, "the experts' activation situ"),
        ({"scheme": Scheme(name=SchemeName.OTHER, bits=0)}, "no CPU kernel for this format"),
        ({"scheme": Scheme(name=SchemeName.INT4, bits=8)}, "no CPU kernel for this format"),
        (
            {"scheme": Scheme(name=SchemeName.GPTQ, bits=4, group=16)},
            "groups of 16 weights: the kernel requires groups of a multiple of 32",
        ),
        ({"scheme": Scheme(name=SchemeName.FP8_BLOCK, bits=8, group=64)}, "in FP8 blocks of 128"),
        ({"scheme": Scheme(name=SchemeName.INT4, bits=4, group=1024)}, "supports multiples of 1024 only"),
    ],
)
def test_feed_forward_ranks_refuse_models_without_a_kernel(changed: dict[str, Any], why: str) -> None:
    model = replace(recorded_profiles()["Qwen3-235B-A22B-FP8"], **changed)
    role = gpu(feedForward={"ranks": 1, "cpu": "56", "memory": "3Ti"}, deviceMemory="141Gi")
    with pytest.raises(PlanError, match=why):
        plan(spec(role, parallelism={"mode": "FeedForward"}), model, NO_AVX512)


@pytest.mark.parametrize("mode", ["Pipeline", "FeedForward"])
def test_refuses_keys_and_values_of_different_sizes_on_cpus(mode: str) -> None:
    """MiMo-V2 has keys of 192 and values of 128 elements: kernels exist for each, and for their mean."""
    llama = recorded_profiles()["Llama-3.1-8B-Instruct"]
    kinds = tuple(replace(kind, kv_width=192 + 128, value_width=128) for kind in llama.kinds)
    mimo = replace(llama, head_dim=192, kinds=kinds)
    if mode == "Pipeline":
        attention_on_cpus = spec(*MIXED)
    else:
        role = gpu(feedForward={"ranks": 1, "cpu": "8", "memory": "400Gi"})
        attention_on_cpus = spec(role, parallelism={"mode": mode})
    with pytest.raises(PlanError, match="keys of 192 elements and values of 128 in each head: "):
        plan(attention_on_cpus, mimo, Inventory(on_cpus={"gpu": "no GPU"} if mode == "FeedForward" else {}))
    plan(spec(gpu()), mimo)


def test_refuses_head_sizes_without_a_cpu_kernel_only_if_they_matter() -> None:
    llama = recorded_profiles()["Llama-3.1-8B-Instruct"]

    def wide(size: int) -> ModelProfile:
        kinds = tuple(replace(kind, kv_width=2 * size) for kind in llama.kinds)
        return replace(llama, head_dim=size, kinds=kinds)

    for size in (16, 72, 120, 144, 384):
        with pytest.raises(PlanError, match=rf"heads of {size} elements.* kernels support only 32, 48,"):
            plan(spec(*MIXED), wide(size))
        plan(spec(gpu()), wide(size))
    for size in (48, 80, 256, 512):
        plan(spec(*MIXED), wide(size))
    latent = recorded_profiles()["DeepSeek-V2-Lite-Chat"]
    assert latent.kinds[0].kv_width == 576
    plan(spec(*MIXED), latent)
    of_version_0_1_0 = profile(head_dim=16)
    assert not of_version_0_1_0.kinds
    plan(spec(*MIXED), of_version_0_1_0)


def test_refuses_a_kv_cache_of_another_type_on_cpus() -> None:
    def asked(dtype: str, own: str = "auto") -> dict[str, Any]:
        return {"dtype": own, "args": ["--kv-cache-dtype", dtype]}

    llama = "Llama-3.1-8B-Instruct"
    said = refusal(llama, spec(*MIXED, engine=asked("bfloat16", "float32")))
    assert "--kv-cache-dtype bfloat16 with engine.dtype float32" in said
    assert "engine.dtype: bfloat16" in said
    for same in ("auto", "bfloat16", "fp8"):
        plan(spec(*MIXED, engine=asked(same)), recorded_profiles()[llama])
    plan(spec(gpu(), engine=asked("bfloat16", "float32")), recorded_profiles()[llama])
    narrow = profile(head_dim=80)
    with pytest.raises(PlanError, match=r"fp8 with attention heads of 80 elements.* a multiple of 32"):
        plan(spec(*MIXED, engine=asked("fp8")), narrow)
    plan(spec(*MIXED), narrow)


@pytest.mark.parametrize("name", ["Gemma3nForCausalLM", "Zamba2ForCausalLM", "Phi4MMForCausalLM"])
def test_models_without_a_pipeline_run_in_one_stage(name: str) -> None:
    model = replace(recorded_profiles()["Llama-3.1-8B-Instruct"], architecture=name)
    for roles in (MIXED, (gpu(pods=2),), (cpu(**HUGE),)):
        with pytest.raises(PlanError, match=rf"{name} cannot run in \d stages: .*\. Use one stage") as caught:
            plan(spec(*roles), model)
        assert caught.value.reason == "UnsupportedModel"
    plan(spec(gpu()), model)
    plan(spec(cpu(memory="1Ti")), model)
    plan(spec(gpu(ranksPerPod=2), parallelism={"tensor": 2}), model)
    plan(spec(gpu(), cpu(memory="1Ti"), parallelism={"mode": "Tensor"}), model)


def test_refuses_gpu_only_classes_of_vllm_on_cpus() -> None:
    llama = recorded_profiles()["Llama-3.1-8B-Instruct"]
    for name, why in (
        ("KimiLinearForCausalLM", "classes for this model are for GPUs only"),
        ("MiniMaxM3SparseForCausalLM", "classes for this model are for GPUs only"),
        ("DeepseekV4ForConditionalGeneration", "classes for this model are for GPUs only"),
        ("DeepseekV4ForCausalLM", "blocks of 256 tokens"),
    ):
        model = replace(llama, architecture=name)
        with pytest.raises(PlanError, match=rf"CPU ranks do not support {name}: .*{why}"):
            plan(spec(*MIXED), model)
        plan(spec(gpu(pods=2)), model)


@pytest.mark.parametrize("routing", list(Routing))
def test_experts_in_bf16_are_chosen_by_any_routing_on_cpus(routing: Routing) -> None:
    model = replace(recorded_profiles()["Qwen3-30B-A3B"], routing=routing)
    assert plan(spec(*MIXED), model).plan


def test_refuses_experts_that_cpus_would_compute_differently() -> None:
    model = recorded_profiles()["Qwen3-30B-A3B"]
    limited = replace(model, limited_experts=True)
    beside = spec(
        gpu(feedForward={"cpu": "14", "memory": "64Gi"}, deviceMemory="80Gi"),
        parallelism={"mode": "FeedForward"},
        engine={"maxModelLen": 4096},
    )
    plan(spec(*MIXED), model)
    with pytest.raises(PlanError, match=r"silently ignore the limit, .* be wrong\. Use GPU roles only"):
        plan(spec(*MIXED), limited)
    in_fp8 = replace(recorded_profiles()["Qwen3-235B-A22B-FP8"], limited_experts=True)
    assert plan(spec(*MIXED), in_fp8, NO_AVX512).plan, "our kernels of quantized experts have limits"
    with pytest.raises(PlanError, match="experts' activation swiglustep"):
        plan(spec(*MIXED), replace(limited, architecture="Step3p5ForCausalLM"))
    assert plan(beside, limited).plan
    assert plan(beside, replace(limited, architecture="Step3p5ForCausalLM")).plan
    plan(spec(gpu(deviceMemory="80Gi")), limited)
    with pytest.raises(PlanError, match="vLLM's router for zero experts needs a GPU"):
        plan(spec(*MIXED), replace(model, architecture="LongcatFlashForCausalLM"))


def test_latents_are_stored_in_bfloat16_on_cpus_and_in_the_requested_type_on_gpus() -> None:
    for name in ("DeepSeek-V3", "DeepSeek-V2-Lite-Chat", "Kimi-K2-Instruct"):
        for asked in ("fp8", "fp8_e5m2", "bfloat16"):
            engine: dict[str, Any] = {"args": ["--kv-cache-dtype", asked]}
            said = refusal(name, spec(*MIXED, engine=engine))
            assert f"(multi-head latent attention) with engine.args --kv-cache-dtype {asked}" in said
            assert "Remove the option, or use GPU roles only" in said
            plan(spec(gpu(), engine=engine), recorded_profiles()[name])
        plan(spec(*MIXED, engine={"args": ["--kv-cache-dtype=auto"]}), recorded_profiles()[name])
        for dtype in ("float16", "float32"):
            said = refusal(name, spec(*MIXED, engine={"dtype": dtype}))
            assert f"with engine.dtype {dtype}" in said
            assert "CPU kernels support bfloat16 only" in said
            assert "engine.dtype: bfloat16" in said
        plan(spec(gpu(), engine={"dtype": "float16"}), recorded_profiles()[name])


def test_refuses_latent_sizes_without_a_cpu_kernel() -> None:
    model = recorded_profiles()["DeepSeek-V2-Lite-Chat"]
    small = replace(model, kinds=tuple(replace(kind, kv_width=320) for kind in model.kinds))
    with pytest.raises(
        PlanError, match=r"latents of 320 elements.* kernels support only multiples of 576\. Use GPU"
    ):
        plan(spec(*MIXED), small)
    assert plan(spec(gpu(deviceMemory="141Gi")), small).plan


def test_refuses_latent_attention_without_amx() -> None:
    without = Inventory(cpu_features={"cpu": frozenset()})
    said = refusal("DeepSeek-V2-Lite-Chat", spec(*MIXED), without)
    assert "vLLM uses KV blocks of 16 tokens and no chunked prefill on CPU ranks, unlike on" in said
    assert "Put CPU roles on nodes that have AMX" in said


def test_refuses_a_type_without_a_kernel() -> None:
    blocks, shared = "Qwen3-235B-A22B-FP8", {"mode": "Tensor"}
    role = cpu(memory="4Ti", pods=2)
    said = refusal(blocks, spec(role, parallelism=shared, engine={"dtype": "float16"}))
    assert "FP8 in blocks, with engine.dtype float16" in said
    assert "expert kernel for CPU stages supports bfloat16 only. Set engine.dtype: bfloat16" in said
    assert plan(spec(role, parallelism=shared), recorded_profiles()[blocks]).plan.engine.dtype == "bfloat16"
    for dtype in ("float16", "bfloat16"):
        assert plan(spec(*MIXED, engine={"dtype": dtype}), recorded_profiles()[blocks]).plan


def test_a_scheme_of_eight_bits_in_gptq_has_no_kernel() -> None:
    profile = recorded_profiles()["Llama-3.1-8B-Instruct-GPTQ-INT4"]
    eight = replace(profile, scheme=replace(profile.scheme, name=SchemeName.GPTQ, bits=8))
    with pytest.raises(PlanError, match="weights in 8-bit GPTQ, groups of 128 weights"):
        plan(spec(*MIXED), eight)


def test_refuses_amx_models_without_amx_and_notes_unknown_nodes() -> None:
    for name in ("DeepSeek-V3", "DeepSeek-V2-Lite-Chat"):
        profile = recorded_profiles()[name]
        without = Inventory(cpu_features={"cpu": frozenset()})
        assert "feature.node.kubernetes.io/cpu-cpuid.AMXTILE" in refusal(name, spec(*MIXED), without)
        assert any("do not show whether" in note for note in plan(spec(*MIXED), profile).notes)
        known = plan(spec(*MIXED), profile, Inventory(cpu_features={"cpu": frozenset({AMX})}))
        assert not any("AMX" in note for note in known.notes)
    assert not any("AMX" in note for note in plan(spec(*MIXED), recorded_profiles()["Qwen3-30B-A3B"]).notes)


def test_refuses_avx_512_models_without_it_and_notes_unknown_nodes() -> None:
    in_fp8: dict[str, Any] = {"engine": {"args": ["--kv-cache-dtype", "fp8"]}}
    tensor: dict[str, Any] = {"parallelism": {"mode": "Tensor"}}
    for name, roles, fields, what in (
        ("Qwen3-235B-A22B-FP8", [cpu(**HUGE)], tensor, "experts in FP8 in blocks"),
        ("Llama-3.1-8B-Instruct", MIXED, in_fp8, "a KV cache in FP8"),
    ):
        asked, model = spec(*roles, **fields), recorded_profiles()[name]
        said = refusal(name, asked, Inventory(cpu_features={"cpu": frozenset()}))
        assert f"AVX-512 is needed on CPUs for {what}" in said
        assert "feature.node.kubernetes.io/cpu-cpuid.AVX512F: 'true'" in said
        assert any("AVX-512" in note and "do not show whether" in note for note in plan(asked, model).notes)
        for features in ({AVX512}, {AMX}):
            known = plan(asked, model, Inventory(cpu_features={"cpu": frozenset(features)}))
            assert not any("AVX-512" in note for note in known.notes)
        plan(spec(gpu(pods=4), **fields), model)
    assert not plan(spec(cpu(**HUGE)), recorded_profiles()["Llama-3.1-8B-Instruct"]).notes


def test_refuses_states_without_a_cpu_kernel() -> None:
    hybrid = recorded_profiles()["Nemotron-H-8B-Base-8K"]
    for name in ("JambaForCausalLM", "OlmoHybridForCausalLM"):
        model = replace(hybrid, architecture=name)
        with pytest.raises(PlanError, match=f"CPU ranks do not support {name} with recurrent states"):
            plan(spec(*MIXED), model)
        plan(spec(gpu(pods=2)), model)
    plan(spec(*MIXED), hybrid)


def test_refuses_a_class_without_a_working_pipeline_only_in_stages() -> None:
    name = "granite-4.0-h-small"
    said = refusal(name, spec(*MIXED))
    assert "GraniteMoeHybridForCausalLM cannot run in 3 stages: vLLM's class of this model fails" in said
    assert "Use one stage: put all GPUs into one pod" in said
    plan(spec(gpu()), recorded_profiles()[name])


def test_gated_delta_nets_are_for_bfloat16_on_cpus() -> None:
    name = "Qwen3-Next-80B-A3B-Instruct"
    for dtype in ("float16", "float32"):
        said = refusal(name, spec(*MIXED, engine={"dtype": dtype}))
        assert f"(gated delta nets) with engine.dtype {dtype}" in said
        assert "engine.dtype: bfloat16" in said
    plan(spec(gpu(), engine={"dtype": "float16"}), recorded_profiles()[name])


def test_features_are_read_from_the_labels_of_the_nodes() -> None:
    def node(name: str, **labels: str) -> NodeView:
        found = {**IMAGE_PLATFORM} | {
            f"feature.node.kubernetes.io/cpu-cpuid.{key}": value for key, value in labels.items()
        }
        return NodeView(name=name, allocatable={"cpu": 64.0, "memory": 2.0**43, "pods": 110.0}, labels=found)

    request = GroupRequest(
        spec=spec(cpu(memory="900Gi", pods=2)),
        profile=recorded_profiles()["DeepSeek-V3"],
        served_name="m",
        model_path="/model",
    )

    def on(*nodes: NodeView) -> tuple[str, ...]:
        return plan_group(request, Capacity(free_nodes=build_free_nodes(nodes))).notes

    with_amx = node("a", AMXTILE="true", AMXBF16="true", AVX512F="true")
    assert not on(with_amx, replace(with_amx, name="b"))
    assert any("do not show" in note for note in on(node("a"), node("b")))
    with pytest.raises(PlanError, match="but the role's nodes do not have it"):
        on(node("a", AVX2="true"), node("b", AVX2="true"))

    quantized = replace(
        request,
        spec=spec(cpu(memory="900Gi", pods=2), parallelism={"mode": "Tensor"}),
        profile=recorded_profiles()["Qwen3-235B-A22B-FP8"],
    )
    for labels in ({"AVX512F": "true"}, {"AMXTILE": "true", "AMXBF16": "true"}):
        placed = Capacity(free_nodes=build_free_nodes([node("a", **labels), node("b", **labels)]))
        assert not plan_group(quantized, placed).notes
    with pytest.raises(PlanError, match="AVX-512 is needed on CPUs for experts in FP8 in blocks"):
        plan_group(quantized, Capacity(free_nodes=build_free_nodes([node("a", AVX2="true")])))


def test_fp8_per_channel_takes_a_shorter_step_than_bf16() -> None:
    fp8, bf16 = (
        plan(spec(cpu(**HUGE)), recorded_profiles()[name])
        for name in ("Llama-3.3-70B-Instruct-FP8-dynamic", "Llama-3.1-70B-Instruct")
    )
    steps = [sum(rank.predicted_step_s for rank in planned.plan.ranks) for planned in (fp8, bf16)]
    assert steps[0] < steps[1]


@pytest.mark.parametrize(
    ("args", "least", "most"),
    [(["--kv-cache-dtype", "fp8"], 0.49, 0.51), (["--kv-cache-dtype=fp8_e4m3"], 0.49, 0.51), ([], 1, 1)],
)
def test_the_type_of_the_kv_cache_counts(args: list[str], least: float, most: float) -> None:
    asked: Any = {"args": args}
    profile = recorded_profiles()["Llama-3.1-8B-Instruct"]
    plain, smaller = (
        plan(spec(gpu(), **fields), profile).plan.ranks[0] for fields in ({}, {"engine": asked})
    )
    assert least <= smaller.kv_cache_bytes / plain.kv_cache_bytes <= most


@pytest.mark.parametrize(
    ("args", "bytes_each"),
    [
        ([], 4),
        (["--kv-cache-dtype=auto"], 4),
        (["--kv-cache-dtype", "bfloat16"], 2),
        (["--kv_cache_dtype=fp8"], 1),
    ],
)
def test_the_kv_cache_of_a_float32_model_may_be_smaller(args: list[str], bytes_each: int) -> None:
    assert cache_element_bytes("float32", args) == bytes_each


def test_quantization_at_load_halves_layers_on_gpus_and_is_refused_on_cpus() -> None:
    engine: dict[str, Any] = {"args": ["--quantization", "fp8"]}
    profile = recorded_profiles()["Llama-3.1-8B-Instruct"]
    plain, smaller = (
        plan(spec(gpu(), **fields), profile).plan.ranks[0] for fields in ({}, {"engine": engine})
    )
    assert plain.weight_bytes - smaller.weight_bytes == pytest.approx(sum(profile.layer_bytes) / 2, rel=0.01)
    assert "--quantization fp8" in refusal("Llama-3.1-8B-Instruct", spec(*MIXED, engine=engine))


def test_states_have_the_same_type_on_every_rank_and_blocks_fit_them() -> None:
    planned = plan(spec(*MIXED), recorded_profiles()["Qwen3-Next-80B-A3B-Instruct"]).plan
    assert planned.engine.block_size == 1056
    assert planned.engine.extra_args[:2] == ("--mamba-ssm-cache-dtype", "float32")


@pytest.mark.parametrize(("dtype", "tokens"), [("auto", 1056), ("bfloat16", 1056), ("float32", 1088)])
def test_the_type_of_the_convolutions_states_counts(dtype: str, tokens: int) -> None:
    """The expected values come from vLLM 0.32 with `--mamba-cache-dtype` (tests/shapes/oracle.py)."""
    engine: dict[str, Any] = {"args": ["--mamba-cache-dtype", dtype]}
    profile = recorded_profiles()["Qwen3-Next-80B-A3B-Instruct"]
    planned = plan(spec(*MIXED, engine=engine), profile)
    assert planned.plan.engine.block_size == tokens
    assert planned.sizes.kv.block_bytes(0, 24) == 6 * tokens * 2048


@pytest.mark.parametrize("device", ["8Gi", "140Gi"])
@pytest.mark.parametrize("memory", ["4Gi", "3000Gi"])
def test_reports_unsupported_models_before_missing_memory(memory: str, device: str) -> None:
    own = gpu(deviceMemory=device, feedForward={"cpu": "28", "memory": memory})
    model = replace(recorded_profiles()["Kimi-K2-Thinking"], architecture="KimiK3ForConditionalGeneration")
    with pytest.raises(PlanError, match="the experts' activation situ"):
        plan(spec(own, parallelism={"mode": "FeedForward"}), model)


def test_reports_all_reasons_at_once() -> None:
    """If each reason came alone, the user would need one attempt for each."""
    coarse = Scheme(name=SchemeName.INT4, bits=4, group=16)
    sees = replace(
        recorded_profiles()["Kimi-K2-Thinking"], scheme=coarse, encoder="images", encoder_bytes=2**30
    )
    with pytest.raises(PlanError) as caught:
        plan(spec(*reversed(MIXED), parallelism={"stageOrder": "AsListed"}), sees)
    images, experts, ways = caught.value.message.splitlines()
    assert "first stage is on a CPU" in images
    assert "the kernel requires groups of a multiple of 32" in experts
    assert ways.startswith("model: alternatives that can run it, with one request of 8,192 tokens: ")
