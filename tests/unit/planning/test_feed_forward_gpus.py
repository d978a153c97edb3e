"""Mode FeedForward with several GPUs in one pod: what each GPU and its feed-forward ranks hold."""

from dataclasses import replace
from math import ceil

import pytest

from heteroinfer_contract.plan import BY_RATE, Device
from heteroinfer_operator.api import HeteroInferenceSpec
from heteroinfer_operator.errors import PlanError, PlanReason
from heteroinfer_operator.planning import Planned
from heteroinfer_operator.planning.inventory import Inventory
from heteroinfer_operator.planning.predicted_plan import predict_again
from heteroinfer_operator.planning.prediction import StepLoad, predict
from tests.unit.planning.planned_models import plan
from tests.unit.planning.test_feed_forward import EXPERT, MOE, feed_forward, mixture, seconds

LAYERS = 12
COLUMNS = replace(MOE, columns=768)


def gpus(count: int, *, ranks: int, columns: int = 768, unit: int = 32, layers: int = LAYERS) -> Planned:
    """Returns a plan with this number of GPUs and feed-forward ranks, and 12 layers on CPUs."""
    model = mixture()
    kinds = (model.kinds[0], replace(COLUMNS, columns=columns))
    return plan(_spec(count, ranks, layers), replace(model, kinds=kinds, column_unit=unit))


def _spec(count: int, ranks: int, layers: int) -> HeteroInferenceSpec:
    own = {"ranks": ranks, "layers": layers}
    return feed_forward(own=own, ranksPerPod=count, memory="128Gi", device_memory="80Gi")


@pytest.mark.parametrize(("count", "ranks"), [(2, 2), (2, 4), (4, 4), (4, 8)])
def test_each_gpu_has_its_part_of_the_layers_and_its_own_feed_forward_ranks(count: int, ranks: int) -> None:
    planned = gpus(count, ranks=ranks)
    own = planned.plan
    assert (own.tensor_parallel_size, own.pipeline_parallel_size) == (count, 1)
    assert [rank.device for rank in own.ranks] == [Device.GPU] * count + [Device.CPU] * ranks
    assert {rank.pod for rank in own.ranks} == {0}
    assert [rank.local_rank for rank in own.ranks] == list(range(count + ranks))
    assert all(len(own.feed_forward_ranks_of(rank)) == ranks // count for rank in own.stage_ranks)
    shares = [rank.feed_forward for rank in own.ranks[count:]]
    assert all(each is not None and len(each.layers) == LAYERS and each.share == BY_RATE for each in shares)
    assert {rank.weight_bytes for rank in own.ranks[count:]} == {LAYERS * 128 * EXPERT // ranks}
    (one,) = gpus(1, ranks=1).plan.stage_ranks
    for rank in own.stage_ranks:
        assert rank.weight_bytes == pytest.approx(ceil(one.weight_bytes / count), rel=0.01)
    assert own.batches_at_once == 1


def test_feed_forward_ranks_of_two_gpus_take_as_long_as_those_of_one() -> None:
    """They read the same bytes with the same cores."""
    one, two = gpus(1, ranks=2), gpus(2, ranks=2)
    load = StepLoad(requests=4)
    assert seconds(two, load) == pytest.approx(seconds(one, load))
    assert predict(two.plan, two.rates).step_s > max(rank.predicted_step_s for rank in two.plan.ranks[2:])


def test_units_that_cannot_be_divided_equally_enlarge_the_largest_part() -> None:
    """24 units of 32 columns: a GPU has 12, of which five ranks have 2 or 3."""
    planned = gpus(2, ranks=10)
    sizes = [rank.weight_bytes for rank in planned.plan.ranks[2:]]
    assert sizes[:5] == sizes[5:]
    assert max(sizes) == LAYERS * 128 * EXPERT * 3 // 24
    assert sum(sizes) == LAYERS * 128 * EXPERT


def test_ranks_of_a_gpu_share_whole_experts_of_its_columns() -> None:
    """A GPU has 384 columns, 12 units, so 13 ranks share experts, of which each has those columns."""
    planned = gpus(1, ranks=13, columns=384)
    assert planned.remote is not None
    assert planned.remote.by_experts
    two = gpus(2, ranks=14, columns=384)  # 6 units for 7 ranks
    assert two.remote is not None
    assert two.remote.by_experts
    assert max(rank.weight_bytes for rank in two.plan.ranks[2:]) == LAYERS * 19 * EXPERT // 2
    assert seconds(two, StepLoad()) > 0


@pytest.mark.parametrize(
    ("count", "unit", "fix"), [(4, 128, "ranksPerPod: 1 or 2"), (2, 512, "mode Pipeline")]
)
def test_columns_that_the_gpus_cannot_divide_are_refused(count: int, unit: int, fix: str) -> None:
    with pytest.raises(PlanError, match=f"{count} GPUs cannot share the 768 intermediate columns") as caught:
        gpus(count, ranks=count, unit=unit)
    assert caught.value.reason == PlanReason.UNSUPPORTED_PARALLELISM
    assert f"Use {fix}" in caught.value.message


def test_a_stored_plan_gets_the_same_prediction_again() -> None:
    planned = gpus(2, ranks=4)
    again = predict_again(planned.plan, _spec(2, 4, LAYERS), planned.request.profile, Inventory())
    assert again is not None
    assert again.plan == planned.plan
    assert again.step == predict(planned.plan, planned.rates)


def test_several_gpus_hold_more_layers_than_one_gpu() -> None:
    one, two = feed_forward(), feed_forward(ranksPerPod=2, own={"ranks": 2})
    moved = [len(plan(each, mixture()).plan.ranks[-1].layers) for each in (one, two)]
    assert moved[1] < moved[0]
