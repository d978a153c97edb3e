"""Loopback addresses: stable for an epoch, never shared, and refused when there is none."""

import random
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from heteroinfer_contract.plan import Device
from heteroinfer_contract.pod_launch import PodAddress
from heteroinfer_operator.api import HeteroInferenceSpec, parse_spec
from heteroinfer_operator.cluster import ResourceKey
from heteroinfer_operator.errors import PlanError
from heteroinfer_operator.local.loopback_addressing import LOOPBACK, LocalAddressing, PortsTakenError
from heteroinfer_operator.manifests.identity import EpochRef, Owner
from tests.ports import contiguous_ports
from tests.unit.local.plans import plan

OWNER = Owner(key=ResourceKey(namespace="default", name="x"), uid="u")
PLAN = plan(("a", Device.CPU, 1), ("b", Device.GPU, 3))


def _spec(uri: str = "file:///m") -> HeteroInferenceSpec:
    return parse_spec({"model": {"uri": uri}, "roles": [{"name": "cpu", "device": "CPU", "pods": 2}]})


def _addressing(api_port: int = 8000, rng: random.Random | None = None) -> LocalAddressing:
    return LocalAddressing(api_port=api_port, model_cache=Path("/cache"), rng=rng)


def _group(index: int = 0, epoch: int = 1) -> EpochRef:
    return EpochRef(owner=OWNER, index=index, epoch=epoch)


def _ports(address: PodAddress, ranks: int) -> Iterator[int]:
    yield from (address.health_port, address.control_port, address.rendezvous_port, address.executor_port)
    yield from range(address.metrics_port, address.metrics_port + ranks)


def test_each_epoch_has_its_own_addresses() -> None:
    addressing = _addressing(rng=random.Random(1))
    first = addressing.pods(_spec(), _group(), PLAN)
    assert addressing.pods(_spec(), _group(), PLAN) == first
    second = addressing.pods(_spec(), _group(epoch=2), PLAN)
    other_group = addressing.pods(_spec(), _group(index=1), PLAN)
    ports = [
        port
        for addresses in (first, second, other_group)
        for address, pod in zip(addresses, PLAN.pods, strict=True)
        for port in _ports(address, len(pod.ranks))
    ]
    assert len(set(ports)) == len(ports)
    assert addressing.current_addresses() == {0: second, 1: other_group}


def test_the_first_group_gets_the_users_api_port() -> None:
    addressing = _addressing()
    assert [a.api_port for a in addressing.pods(_spec(), _group(index=2), PLAN)] == [8002, 8002]
    assert addressing.endpoint(_spec(), OWNER) == "http://127.0.0.1:8000/v1"


def test_an_api_port_in_use_is_reported() -> None:
    port = contiguous_ports(2) + 1  # the one before it is free, too
    with socket.socket() as other:
        other.bind((LOOPBACK, port))
        other.listen()
        with pytest.raises(
            PortsTakenError, match=f"port {port} on 127.0.0.1: another program uses the port.*--port"
        ):
            _addressing(port - 1).check_api_ports(2)
    _addressing(port).check_api_ports(1)


def test_model_is_a_folder_of_this_machine() -> None:
    source = _addressing().find_model_source(_spec("file:///models/m"), OWNER)
    assert (source.path, source.volume) == ("/models/m", None)


def test_a_claim_is_refused_with_the_remedy() -> None:
    with pytest.raises(PlanError, match="--model-dir DIR"):
        _addressing().find_model_source(_spec("pvc://claim/path"), OWNER)


def test_a_hub_model_is_downloaded_into_the_local_cache() -> None:
    addressing = _addressing()
    source = addressing.find_model_source(_spec("hf://org/model"), OWNER)
    assert source.volume is None
    assert source.fetch is not None
    assert (source.fetch.cache, source.fetch.revision, source.fetch.token) == ("/cache", "main", None)
    assert source.at_commit("abc").path == "/cache/org--model/abc"
    assert addressing.find_model_source(_spec("hf://org/model"), OWNER) == source, "its port stays"
