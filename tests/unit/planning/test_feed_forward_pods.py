"""Mode FeedForward with CPU roles: feed-forward ranks in pods of their own."""

from dataclasses import replace
from typing import Any

import pytest

from heteroinfer_contract.calibration import KernelPart
from heteroinfer_contract.model import SchemeName
from heteroinfer_contract.plan import Device, Mode, Plan
from heteroinfer_operator.api import HeteroInferenceSpec, parse_spec
from heteroinfer_operator.commands.plan_figures import roles_of_unknown_memory
from heteroinfer_operator.errors import PlanError
from heteroinfer_operator.planning.first_token import build_feed_forward_wait
from heteroinfer_operator.planning.inventory import Inventory
from heteroinfer_operator.planning.predicted_plan import predict_again
from heteroinfer_operator.planning.prediction import forecast_first_token, predict
from heteroinfer_operator.planning.remote_ranks import fit_shares
from tests.unit.calibrated import CALIBRATION, kernel
from tests.unit.planning.planned_models import GIB, cpu, gpu, plan
from tests.unit.planning.test_feed_forward import EXPERT, in_units, mixture

OWN = {"cpu": "14", "memory": "64Gi"}


def pods(*roles: dict[str, Any], own: dict[str, Any] | None = None) -> HeteroInferenceSpec:
    """Returns a spec with one GPU and CPU roles in mode FeedForward."""
    asking = gpu(deviceMemory="24Gi", **({"feedForward": own} if own else {}))
    mode = {"parallelism": {"mode": "FeedForward"}, "engine": {"maxModelLen": 4096}}
    return parse_spec({"model": {"uri": "hf://org/model"}, "roles": [asking, *roles], **mode})


def shares(planned: Plan) -> list[int]:
    return [rank.feed_forward.share for rank in planned.ranks if rank.feed_forward is not None]


def test_each_pod_of_a_cpu_role_has_ranks_and_equal_pods_have_equal_shares() -> None:
    planned = plan(pods(cpu(memory="32Gi", pods=3, ranksPerPod=2)), in_units(32)).plan
    assert (planned.mode, planned.tensor_parallel_size) == (Mode.FEED_FORWARD, 1)
    assert [(rank.pod, rank.local_rank) for rank in planned.ranks] == [
        (0, 0),
        *((pod, local) for pod in (1, 2, 3) for local in (0, 1)),
    ]
    assert [pod.role for pod in planned.pods] == ["gpu", "cpu", "cpu", "cpu"]
    assert {rank.device for rank in planned.ranks[1:]} == {Device.CPU}
    assert shares(planned) == [1] * 6


def test_ranks_in_the_pod_of_the_gpu_come_first() -> None:
    planned = plan(pods(cpu(memory="32Gi", pods=2), own={**OWN, "ranks": 2}), in_units(32)).plan
    assert [(rank.pod, rank.local_rank, rank.role) for rank in planned.ranks] == [
        (0, 0, "gpu"),
        (0, 1, "gpu"),
        (0, 2, "gpu"),
        (1, 0, "cpu"),
        (2, 0, "cpu"),
    ]


def test_faster_nodes_have_larger_shares() -> None:
    fast, slow = (
        replace(CALIBRATION, kernels=(kernel(KernelPart.EXPERTS, SchemeName.NONE, rate),), hops=())
        for rate in (240, 80)
    )
    roles = cpu(name="fast", memory="64Gi"), cpu(name="slow", memory="64Gi")
    known = Inventory(calibration={"fast": fast, "slow": slow})
    unequal = plan(pods(*roles), in_units(32), known)
    more, less = shares(unequal.plan)
    assert 2.5 < more / less < 3.5
    one, other = (rank.predicted_step_s for rank in unequal.plan.ranks[1:])
    assert one == pytest.approx(other, rel=0.15), "both take equally long"


def test_a_small_node_gets_a_part_that_fits_its_memory() -> None:
    roles = cpu(name="large", memory="64Gi"), cpu(name="small", memory="3Gi")
    planned = plan(pods(*roles), in_units(32))
    large, small = planned.plan.ranks[1:]
    assert large.weight_bytes > small.weight_bytes
    assert small.weight_bytes < 2 * GIB
    with pytest.raises(
        PlanError,
        match=r"role small: .* lacks .* of memory\. .* Raise resources.limits.memory or pods",
    ):
        plan(pods(cpu(name="small", memory="2Gi", pods=2)), in_units(32))


def test_two_nodes_halve_the_time_of_the_experts_and_the_network_adds_to_it() -> None:
    one, two = (plan(pods(cpu(memory="64Gi", pods=count)), mixture()) for count in (1, 2))
    assert two.remote is not None
    wait = len(two.remote.layers) * 120e-6
    alone, halves = (planned.plan.ranks[1].predicted_step_s - wait for planned in (one, two))
    assert halves == pytest.approx(alone / 2, rel=0.05)
    near = plan(pods(own=OWN), mixture())
    assert predict(near.plan, near.rates).step_s < predict(one.plan, one.rates).step_s


def test_a_running_plan_is_predicted_again() -> None:
    planned = plan(pods(cpu(memory="64Gi", pods=2), own=OWN), in_units(32))
    again = predict_again(planned.plan, planned.request.spec, in_units(32), Inventory())
    assert again is not None
    assert again.plan == planned.plan
    fewer = pods(cpu(memory="64Gi"), own=OWN)
    other = predict_again(planned.plan, fewer, in_units(32), Inventory())
    assert other is None


def test_the_weights_of_all_ranks_together_are_all_experts() -> None:
    planned = plan(pods(cpu(memory="64Gi", pods=3), own=OWN), in_units(32)).plan
    assert planned.ranks[1].feed_forward is not None
    count = len(planned.ranks[1].feed_forward.layers)
    total = sum(rank.weight_bytes for rank in planned.ranks[1:])
    assert total == pytest.approx(count * 128 * EXPERT, rel=1e-6)


@pytest.mark.parametrize(
    ("speeds", "most", "expected"),
    [
        ((1, 1), (1, 1), (0.5, 0.5)),
        ((3, 1), (1, 1), (0.75, 0.25)),
        ((3, 1), (0.5, 1), (0.5, 0.5)),
        ((1, 1, 1), (0.2, 1, 1), (0.2, 0.4, 0.4)),
        ((4, 1, 1), (0.5, 0.2, 1), (0.5, 0.2, 0.3)),
    ],
)
def test_shares_follow_speeds_as_far_as_memory_allows(
    speeds: tuple[float, ...], most: tuple[float, ...], expected: tuple[float, ...]
) -> None:
    found = fit_shares(speeds, most)
    assert [each / sum(found) for each in found] == pytest.approx(expected, abs=0.02)


def test_every_pod_has_a_share_even_if_no_memory_suffices() -> None:
    assert all(share >= 1 for share in fit_shares((1, 2), (0.1, 0.1)))


@pytest.mark.parametrize(
    ("max_parts", "units", "expected"),
    [
        ((1.0, 1.0), 6, [1, 1]),
        ((0.46, 0.60), 24, [11, 13]),
        ((0.30, 1.0), 6, [1, 5]),
        ((0.02, 1.1), 24, None),  # not even one unit fits
        ((1.0, 1.0, 1.0, 1.0), 6, [2, 2, 1, 1]),
    ],
)
def test_shares_are_whole_units_within_the_memory(
    max_parts: tuple[float, ...], units: int, expected: list[int] | None
) -> None:
    found = fit_shares((1.0,) * len(max_parts), max_parts, units)
    if expected is None:
        assert min(found) >= 1
    else:
        assert sorted(found, reverse=True) == sorted(expected, reverse=True)
        assert all(share / sum(found) <= most + 1e-9 for share, most in zip(found, max_parts, strict=True))


def test_refuses_more_pods_than_a_gpu_rank_exchanges_rows_with() -> None:
    assert plan(pods(cpu(memory="32Gi", pods=24)), in_units(32)).plan.ranks
    with pytest.raises(PlanError, match=r"role cpu: pods must be at most 24 \(got 25\)"):
        plan(pods(cpu(memory="32Gi", pods=25)), in_units(32))
    with pytest.raises(PlanError, match=r"role cpu: pods must be at most 22 \(got 23\)"):
        plan(pods(cpu(memory="32Gi", pods=23), own={**OWN, "ranks": 2}), in_units(32))


def test_a_plan_of_other_numbers_of_pods_is_not_predicted_again() -> None:
    def spec_of(first: int, second: int) -> HeteroInferenceSpec:
        return pods(cpu(name="a", memory="64Gi", pods=first), cpu(name="b", memory="64Gi", pods=second))

    planned = plan(spec_of(2, 1), in_units(32))
    assert predict_again(planned.plan, spec_of(1, 2), in_units(32), Inventory()) is None


def test_the_range_of_a_step_is_that_of_the_least_known_rank() -> None:
    known = Inventory(calibration={"a": CALIBRATION})
    one, other = (
        plan(pods(*(cpu(name=name, memory="64Gi") for name in order)), in_units(32), known)
        for order in ("ab", "ba")
    )
    first, second = (
        forecast_first_token(
            each.plan,
            each.sizes,
            each.rates,
            512,
            build_feed_forward_wait(each.plan, each.sizes, each.rates, each.remote),
        )
        for each in (one, other)
    )
    assert (first.least_s, first.most_s) == pytest.approx((second.least_s, second.most_s), rel=0.02)


def test_unknown_memory_of_cpu_pods_is_reported() -> None:
    planned = plan(pods(cpu(pods=2)), in_units(32))
    assert roles_of_unknown_memory(planned) == ("cpu",)


def test_a_layer_that_pods_cannot_share_names_the_fields_of_their_role() -> None:
    few = in_units(384)
    kinds = tuple(
        replace(kind, experts=0, experts_per_token=0, mlp_bytes=kind.routed_bytes, expert_bytes=0)
        for kind in few.kinds
    )
    few = replace(few, kinds=kinds)
    with pytest.raises(PlanError, match="lower pods and ranksPerPod of role cpu"):
        plan(pods(cpu(memory="64Gi", pods=4)), few)
