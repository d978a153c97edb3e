"""Plans with the measured network between the asking rank and feed-forward ranks in pods of their own."""

import json
import math
import re
from dataclasses import replace
from itertools import product

import pytest

from heteroinfer_contract.errors import ContractError
from heteroinfer_contract.network_measurement import NetworkMeasurement
from heteroinfer_operator.api import parse_spec
from heteroinfer_operator.commands.plan_details import describe_details
from heteroinfer_operator.commands.plan_figures import Figures
from heteroinfer_operator.commands.plan_pod_counts import describe_pod_counts
from heteroinfer_operator.nodes.calibrations import (
    Calibrations,
    MeasuredKind,
    MeasuredNetwork,
    describe_network,
    read_stored_calibrations,
)
from heteroinfer_operator.nodes.node_platform import IMAGE_PLATFORM
from heteroinfer_operator.nodes.node_view import NodeView
from heteroinfer_operator.planning import Capacity, GroupRequest, Planned, build_free_nodes, plan_group
from heteroinfer_operator.planning.auto_mode import make_plan
from heteroinfer_operator.planning.inventory import Inventory
from heteroinfer_operator.planning.predicted_plan import predict_again
from heteroinfer_operator.planning.prediction import predict
from heteroinfer_operator.planning.rates import DEFAULT_NETWORK, NETWORK_S
from tests.unit.calibrated import CALIBRATION, NETWORK
from tests.unit.planning.planned_models import cpu, gpu, plan
from tests.unit.planning.test_feed_forward import in_units
from tests.unit.planning.test_feed_forward_pods import OWN, pods

KIND = "kind"
SLOW = replace(NETWORK, round_trip_s=10e-3)
SPEC = pods(cpu(memory="64Gi", pods=2))


def measured(one: str, other: str, network: NetworkMeasurement = NETWORK) -> MeasuredNetwork:
    return MeasuredNetwork(kinds=(one, other), selectors=({KIND: one}, {KIND: other}), network=network)


def nodes(*kinds: str) -> dict[str, dict[str, str]]:
    """Returns the labels of nodes by name; a name is the kind of the node and a number."""
    return {f"{kind}{number}": {KIND: kind, "zone": str(number)} for number, kind in enumerate(kinds)}


def network_wait_s(planned: Planned) -> float:
    """Returns the seconds of a step that the first remote rank needs more than without a network."""
    rates = planned.rates[1].network
    assert planned.remote is not None
    assert rates is not None
    row_bytes = 2 * planned.request.profile.hidden_size * 2
    return len(planned.remote.layers) * rates.exchange_s(row_bytes)


def test_the_step_takes_the_measured_time_of_the_network() -> None:
    default = plan(SPEC, in_units(32))
    known = plan(SPEC, in_units(32), Inventory(network={"cpu": NETWORK}))
    times = [planned.plan.ranks[1].predicted_step_s - network_wait_s(planned) for planned in (default, known)]
    assert times[0] == pytest.approx(times[1]), "only the time of the network differs"
    assert known.remote is not None
    layers = len(known.remote.layers)
    assert network_wait_s(default) == pytest.approx(layers * NETWORK_S, rel=0.1)
    assert network_wait_s(known) == pytest.approx(
        layers * NETWORK.exchange_s(4 * known.request.profile.hidden_size)
    )
    assert predict(known.plan, known.rates).step_s > predict(default.plan, default.rates).step_s


def test_ranks_in_the_pod_of_the_gpu_need_no_network() -> None:
    near = pods(own=OWN)
    known = plan(near, in_units(32), Inventory(network={"gpu": SLOW, "cpu": SLOW}))
    assert known.plan == plan(near, in_units(32)).plan
    assert all(rates.network is None for rates in known.rates)


def test_a_slow_network_makes_the_plan_slow_but_does_not_refuse_it() -> None:
    worst = NetworkMeasurement(
        version="1", time=0.0, round_trip_s=10.0, to_listener_bytes_per_s=1e3, to_client_bytes_per_s=1e3
    )
    worst.check()
    planned = plan(SPEC, in_units(32), Inventory(network={"cpu": worst}))
    assert 10 < predict(planned.plan, planned.rates).step_s < math.inf


def test_any_number_in_a_measurement_is_refused_or_predicts_a_time() -> None:
    fields = ("time", "round_trip_s", "to_listener_bytes_per_s", "to_client_bytes_per_s")
    accepted = 0
    for field, extreme in product(fields, (1e-300, 1e-6, 1, 10, 1e12, 1e18, 2**53)):
        try:
            network = NetworkMeasurement.from_json(
                json.dumps({**json.loads(NETWORK.to_json()), field: extreme})
            )
        except ContractError:
            continue
        accepted += 1
        assert describe_network(network)
        planned = plan(SPEC, in_units(32), Inventory(network={"cpu": network}))
        assert math.isfinite(predict(planned.plan, planned.rates).step_s)
    assert accepted > 5


def test_a_running_plan_is_predicted_with_the_network_and_names_it() -> None:
    planned = plan(SPEC, in_units(32))
    known = Inventory(network={"cpu": NETWORK})
    again = predict_again(planned.plan, planned.request.spec, in_units(32), known)
    assert again is not None
    new = plan(SPEC, in_units(32), known)
    assert [rank.predicted_step_s for rank in again.plan.ranks] == [
        rank.predicted_step_s for rank in new.plan.ranks
    ]
    assert f"; network to role cpu: measurement {NETWORK.hash} of 2026-11-22 (round trip 300 us" in str(again)
    without = predict_again(planned.plan, planned.request.spec, in_units(32), Inventory())
    assert without is not None
    assert str(without).endswith("; network to role cpu: not measured, default rates (100 us, 3 GB/s)")


@pytest.mark.parametrize(
    ("inventory", "source"),
    [
        (Inventory(), DEFAULT_NETWORK.source),
        (Inventory(network={"cpu": NETWORK}), describe_network(NETWORK)),
    ],
)
def test_the_explanation_names_the_network(inventory: Inventory, source: str) -> None:
    planned = plan(SPEC, in_units(32), inventory)
    lines = describe_details(planned, Figures.of(planned), "")
    assert [line.strip() for line in lines if "network" in line] == [f"network to role cpu: {source}"]


def test_the_explanation_has_the_number_of_cpu_nodes_that_pay() -> None:
    (fast,) = describe_pod_counts(plan(SPEC, in_units(32)))
    slow_network = Inventory(network={"cpu": replace(NETWORK, round_trip_s=50e-3)})
    (slow,) = describe_pod_counts(plan(SPEC, in_units(32), slow_network))
    assert fast.startswith("a step with pods of role cpu: 1 pod ")
    assert ", 2 pods (now) " in fast

    def shown(text: str) -> list[int]:
        return [int(number) for number in re.findall(r"(\d+) pods?(?: \(now\))? [\d.]+ ms", text)]

    # 24 units are divided among the pods, so 7 pods are as fast as 6.
    assert shown(fast)[:6] == [1, 2, 3, 4, 5, 6]
    assert 7 not in shown(fast)
    assert shown(slow) == [1, 2], "only the present number is shown although it does not pay"
    assert slow.endswith("All other numbers up to 16 gain less than 3 % over fewer pods")
    (scarce,) = describe_pod_counts(plan(pods(cpu(memory="4Gi", pods=8)), in_units(32)))
    assert min(shown(scarce)) > 1
    assert scarce.endswith(" over fewer pods, or have no plan")
    assert list(describe_pod_counts(plan(pods(own=OWN), in_units(32)))) == []


@pytest.mark.parametrize(
    ("own", "network", "chosen"),
    [
        (None, None, "FeedForward, CPU pods"),
        (None, NETWORK, "FeedForward, CPU pods"),
        (None, SLOW, "Pipeline"),
        (OWN, NETWORK, "FeedForward, CPU pods"),
        (OWN, SLOW, "FeedForward"),
    ],
)
def test_the_plan_chooses_the_mode_by_the_network(
    own: dict[str, str] | None, network: NetworkMeasurement | None, chosen: str
) -> None:
    asking = gpu(deviceMemory="24Gi", **({"feedForward": own} if own else {}))
    spec = parse_spec(
        {
            "model": {"uri": "hf://org/model"},
            "roles": [asking, cpu(memory="64Gi", pods=2)],
            "engine": {"maxModelLen": 4096},
        }
    )
    request = GroupRequest(spec=spec, profile=in_units(32), served_name="m", model_path="/model")
    planned = make_plan(request, Inventory(network={} if network is None else {"cpu": network}))
    assert planned.choice is not None
    assert planned.choice.options[0].title == chosen
    assert len(planned.choice.options) > 1, "the slow modes are compared, too"


def test_a_group_is_planned_with_the_network_of_the_nodes_that_it_gets() -> None:
    resources = {"requests": {"cpu": "8", "memory": "64Gi"}}
    spec = pods(cpu(resources=resources, pods=2))
    request = GroupRequest(spec=spec, profile=in_units(32), served_name="m", model_path="/model")
    gpu_node = NodeView(
        name="gpu",
        allocatable={"cpu": 64.0, "memory": 512.0 * 2**30, "pods": 110.0, "nvidia.com/gpu": 1.0},
        labels={**IMAGE_PLATFORM, KIND: "gpu"},
    )
    cpu_nodes = [
        NodeView(
            name=f"cpu{number}",
            allocatable={"cpu": 8.0, "memory": 64.0 * 2**30, "pods": 110.0},
            labels={**IMAGE_PLATFORM, KIND: kind},
        )
        for number, kind in enumerate(("near", "far"))
    ]
    # The CPU pods do not fit the node with the GPU.
    small_gpu_node = replace(gpu_node, allocatable={**gpu_node.allocatable, "cpu": 7.0})

    def source(*networks: MeasuredNetwork) -> str:
        capacity = Capacity(
            free_nodes=build_free_nodes([small_gpu_node, *cpu_nodes]),
            calibrations=Calibrations(networks=networks),
        )
        rates = plan_group(request, capacity).rates[-1].network
        assert rates is not None
        return rates.source

    near, far = measured("gpu", "near"), measured("gpu", "far", SLOW)
    assert source(near, far) == describe_network(SLOW)
    assert source(near) == source() == DEFAULT_NETWORK.source


def test_the_slowest_network_of_all_pairs_of_nodes_counts() -> None:
    near, far = measured("gpu", "near"), measured("gpu", "far", SLOW)
    both = Calibrations(networks=(near, far))
    assert both.network_between(nodes("gpu"), nodes("near", "near")) == NETWORK
    assert both.network_between(nodes("gpu"), nodes("near", "far")) == SLOW
    assert both.network_between(nodes("gpu", "other"), nodes("near")) is None
    assert both.network_between(nodes("gpu"), nodes("near", "new")) is None
    assert both.network_between(nodes("gpu"), {}) is both.network_between({}, nodes("near")) is None
    assert both.network_between(nodes("near"), nodes("gpu")) == NETWORK, "in the other direction"
    assert both.network_between(nodes("near"), nodes("near")) is None
    same = Calibrations(networks=(measured("near", "near"),))
    assert same.network_between(nodes("near"), nodes("near")) is None, "one node needs no network"
    assert same.network_between(nodes("near"), nodes("near", "near")) == NETWORK
    one_node = nodes("gpu")
    assert both.network_between(one_node, {**one_node, **nodes("near")}) == NETWORK
    assert both.network_between(nodes("gpu", "gpu"), {**one_node, **nodes("near")}) is None
    assert Calibrations().network_between(nodes("gpu"), nodes("near")) is None
    everywhere = Calibrations(this_network=NETWORK)
    assert everywhere.network_between(nodes("gpu"), nodes("new")) == NETWORK


def test_a_network_with_a_low_rate_is_slower_than_one_with_a_longer_round_trip() -> None:
    thin = replace(NETWORK, to_listener_bytes_per_s=1e6)
    both = Calibrations(networks=(measured("gpu", "near"), measured("gpu", "far", thin)))
    assert both.network_between(nodes("gpu"), nodes("near", "far")) == thin


def test_reads_stored_networks_and_reports_damaged_entries() -> None:
    kind = MeasuredKind(name="gpu", selector={KIND: "gpu"}, calibration=CALIBRATION)
    network = measured("gpu", "m7i-metal")
    entry = network.to_entry()
    assert list(entry) == ["gpu.m7i-metal.network.json"]
    entries, version = {**kind.to_entry(), **entry}, NETWORK.version
    assert read_stored_calibrations(entries, version) == (
        Calibrations(kinds=(kind,), networks=(network,)),
        (),
    )
    found, (problem,) = read_stored_calibrations(entry, "9.9.9")
    assert found == Calibrations()
    assert problem.startswith(
        "gpu.m7i-metal.network.json: ignored, because HeteroInfer 0.1.0 measured these rates and the "
        "operator has version 9.9.9"
    )
    (text,) = entry.values()
    bad = {
        "a.b.network.json": "{",
        "a.c.network.json": "[]",
        "a.d.network.json": text.replace("0.0003", "0.0"),
        "a.e.network.json": text.replace("0.0003", "NaN"),
        "a.f.network.json": text.replace('[{"kind": "gpu"}, ', "["),
        "a.network.json": text,
        "a.b.c.network.json": text,
        "A.b.network.json": text,
    }
    found, problems = read_stored_calibrations({**entries, **bad}, version)
    assert found == Calibrations(kinds=(kind,), networks=(network,))
    assert [problem.partition(":")[0] for problem in problems] == sorted(bad)
    assert all(
        "Plans use default rates for this network. Remove this entry from the ConfigMap" in problem
        for problem in problems
    )
    # A kind may have the name network.
    named_so = MeasuredKind(name="network", selector={KIND: "x"}, calibration=CALIBRATION)
    assert read_stored_calibrations(named_so.to_entry(), version) == (Calibrations(kinds=(named_so,)), ())
    many = {f"a.b{number}.network.json": text for number in range(70)}
    found, problems = read_stored_calibrations(many, version)
    assert (len(found.networks), len(problems)) == (64, 6)
    assert "ignored, because the ConfigMap has more than 64 networks" in problems[0]
