"""Step times against what was measured (docs/benchmarks.md), and what they depend on."""

from typing import Any

import pytest

from heteroinfer_operator.planning import Inventory
from heteroinfer_operator.planning.prediction import STEP_OVERHEAD_S, predict
from tests.unit.planning.planned_models import cpu, gpu, plan, profile, spec

SIXTEEN_CORES = {"resources": {"limits": {"cpu": "16"}}}


@pytest.mark.parametrize(
    ("off", "measured_ms", "other_host_ms"), [(4, 19.8, 30.2), (8, 35.0, None), (16, 66.0, None)]
)
def test_layers_off_the_gpu_as_measured(off: int, measured_ms: float, other_host_ms: float | None) -> None:
    parsed = spec(gpu(layers=[32 - off]), cpu(layers=[off], **SIXTEEN_CORES))
    step = predict(plan(parsed).plan)
    assert step.step_s * 1e3 == pytest.approx(measured_ms, rel=0.10)
    for seconds in (measured_ms / 1e3, other_host_ms and other_host_ms / 1e3):
        assert not seconds or step.least_s <= seconds <= step.most_s
    assert "ms (" in str(step)


def rank_s(role: dict[str, Any], inventory: Inventory | None = None, **engine: Any) -> float:
    parsed = spec(role, engine=engine)
    return plan(parsed, profile(other_bytes=0), inventory).plan.ranks[0].predicted_step_s


def test_cpus_that_are_not_known_are_taken_for_the_measured_machine() -> None:
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
def test_a_gpu_is_as_fast_as_its_label_says(product: str, nominal: int) -> None:
    known = rank_s(gpu(), Inventory(gpu_product={"gpu": product}))
    assert known == pytest.approx(rank_s(gpu()) * 4800 / nominal)


def test_a_step_has_its_share_between_steps() -> None:
    planned = plan(spec(gpu())).plan
    assert predict(planned).step_s == planned.ranks[0].predicted_step_s + STEP_OVERHEAD_S
