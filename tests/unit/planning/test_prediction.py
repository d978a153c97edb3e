"""Predicted step times compared with measured ones (docs/user/benchmarks.md), and their inputs."""

from dataclasses import replace
from typing import Any

import pytest

from heteroinfer_contract.calibration import GpuRate
from heteroinfer_contract.model import AttentionKind, LayerKind
from heteroinfer_operator.nodes.cpu_features import AVX512_BF16
from heteroinfer_operator.planning import Inventory
from heteroinfer_operator.planning.prediction import (
    STEP_OVERHEAD_S,
    StepLoad,
    count_reads,
    forecast,
    forecast_first_token,
    predict,
)
from heteroinfer_operator.planning.rates import GPU_UNKNOWN, describe_cpu_defaults
from tests.unit.calibrated import CALIBRATION, calibration
from tests.unit.planning.planned_models import cpu, gpu, plan, profile, spec

SIXTEEN_CORES = {"resources": {"limits": {"cpu": "16"}}}


@pytest.mark.parametrize(
    ("off", "measured_ms", "other_host_ms"), [(4, 19.8, 30.2), (8, 35.0, None), (16, 66.0, None)]
)
def test_predicts_measured_steps_with_layers_off_the_gpu(
    off: int, measured_ms: float, other_host_ms: float | None
) -> None:
    parsed = spec(gpu(layers=[32 - off]), cpu(layers=[off], **SIXTEEN_CORES))
    planned = plan(parsed)
    step = predict(planned.plan, planned.rates)
    assert step.step_s * 1e3 == pytest.approx(measured_ms, rel=0.10)
    for seconds in (measured_ms / 1e3, other_host_ms and other_host_ms / 1e3):
        assert not seconds or step.least_s <= seconds <= step.most_s
    assert "ms (" in str(step)


def rank_s(role: dict[str, Any], inventory: Inventory | None = None, **engine: Any) -> float:
    parsed = spec(role, engine=engine)
    return plan(parsed, profile(other_bytes=0), inventory).plan.ranks[0].predicted_step_s


def test_unknown_cpus_use_the_rates_of_the_measured_machine() -> None:
    assert rank_s(cpu()) == rank_s(cpu(resources={"limits": {"cpu": "16"}}))


def test_fewer_cores_read_less_and_more_than_measured_no_more() -> None:
    full = rank_s(cpu(resources={"requests": {"cpu": "64"}}))
    assert full == rank_s(cpu(resources={"requests": {"cpu": "16"}}))
    # Seven of the leader's eight... two of which are the engine's.
    assert rank_s(cpu(resources={"limits": {"cpu": "8"}})) == pytest.approx(full * 14 / 6)
    assert rank_s(cpu(resources={"limits": {"cpu": "4"}})) == pytest.approx(full * 14 / 3)


def test_ranks_of_one_stage_in_a_pod_share_its_memory() -> None:
    both = plan(spec(cpu(ranksPerPod=2), parallelism={"tensor": 2})).plan
    one = plan(spec(cpu())).plan
    assert both.ranks[0].predicted_step_s == pytest.approx(one.ranks[0].predicted_step_s, rel=0.01)


def test_other_types_than_bf16_run_on_slower_kernels() -> None:
    # Twice the bytes at little more than half the rate.
    assert rank_s(cpu(), dtype="float32") == pytest.approx(rank_s(cpu()) * 2 * 115 / 60)


@pytest.mark.parametrize(
    ("product", "nominal"),
    [
        ("NVIDIA-H200", 4800),
        ("NVIDIA-H100-80GB-HBM3", 3350),
        ("NVIDIA-A100-SXM4-40GB", 1555),
        ("NVIDIA-A100-SXM4-80GB", 2039),
        ("Tesla-T4", 320),
        ("NVIDIA-L40S", 864),
        ("NVIDIA-RTX-A4000", 4800),
        ("", 4800),
    ],
)
def test_the_label_of_a_gpu_decides_its_planned_speed(product: str, nominal: int) -> None:
    known = rank_s(gpu(), Inventory(gpu_product={"gpu": product}))
    assert known == pytest.approx(rank_s(gpu()) * 4800 / nominal)


@pytest.mark.parametrize(
    ("kind", "key_width"),
    [
        (LayerKind(kv_heads=8, kv_width=256), 128),
        (LayerKind(kv_heads=1, kv_width=256), 128),  # multi-query attention
        (LayerKind(attention=AttentionKind.SPARSE, kv_heads=4, kv_width=256), 128),
        (LayerKind(attention=AttentionKind.SPARSE, kv_heads=1, kv_width=576), 576),
        (LayerKind(attention=AttentionKind.LATENT, kv_heads=1, kv_width=576), 576),
    ],
)
def test_attention_multiplies_queries_with_whole_latents_or_with_keys(
    kind: LayerKind, key_width: int
) -> None:
    model = profile(kinds=(kind,), kind_of_layer=(0,) * 32)
    planned = plan(spec(gpu()))
    sizes = replace(planned.sizes, profile=model)
    reads = count_reads(sizes, 0, 1, StepLoad(context=1000), has_head=False, engine=planned.plan.engine)
    assert reads.attention == 4 * 1000 * model.num_attention_heads * key_width


def test_a_step_includes_the_time_between_steps() -> None:
    planned = plan(spec(gpu())).plan
    assert predict(planned).step_s == planned.ranks[0].predicted_step_s + STEP_OVERHEAD_S


def test_the_range_of_a_step_combines_those_of_the_ranks_rates() -> None:
    parsed = spec(cpu(layers=[4], **SIXTEEN_CORES), gpu(layers=[28]))
    ours = {"cpu": CALIBRATION, "gpu": calibration(gpu=GpuRate(bytes_per_s=3500e9, operations_per_s=5e14))}
    for known, errors in (
        (Inventory(), [(0.3, 3.0), (0.6, 16.0)]),
        (Inventory(gpu_product={"gpu": "NVIDIA-H200"}), [(0.3, 3.0), (0.9, 1.3)]),
        (Inventory(calibration=ours), [(0.9, 1.6), (0.9, 1.3)]),
    ):
        planned = plan(parsed, None, known)
        steps = [rank.predicted_step_s for rank in planned.plan.ranks]
        for step in (
            predict(planned.plan, planned.rates),
            forecast(planned.plan, planned.sizes, planned.rates, StepLoad()),
        ):
            assert step.step_s == pytest.approx(sum(steps) + STEP_OVERHEAD_S)
            for found, end in ((step.least_s, 0), (step.most_s, 1)):
                parts = [seconds * error[end] for seconds, error in zip(steps, errors, strict=True)]
                assert found == pytest.approx(sum(parts) + STEP_OVERHEAD_S * (0.9, 1.3)[end])
        first = forecast_first_token(planned.plan, planned.sizes, planned.rates, 5000)
        assert first.least_s < first.step_s < first.most_s
        assert first.most_s / first.step_s <= max(error[1] for error in errors)


def test_a_plan_without_rates_has_the_range_of_defaults() -> None:
    planned = plan(spec(cpu(), gpu()))
    assert predict(planned.plan) == predict(planned.plan, planned.rates)


def test_defaults_name_their_rate_and_range() -> None:
    assert describe_cpu_defaults(AVX512_BF16) == (
        "default rates for CPUs with AVX-512 BF16 (115 GB/s by 14 threads; a step may take 0.3 to 3 times "
        "the predicted time)"
    )
    assert "3500 GB/s; a step may take 0.6 to 16 times the predicted time" in GPU_UNKNOWN
    known = plan(spec(gpu()), None, Inventory(gpu_product={"gpu": "Tesla-T4"})).rates[0].source
    assert (
        known == "default rates for Tesla-T4 (233 GB/s; a step may take 0.9 to 1.3 times the predicted time)"
    )
    assert plan(spec(gpu()), None, Inventory(gpu_product={"gpu": "Some-GPU"})).rates[0].source == GPU_UNKNOWN
