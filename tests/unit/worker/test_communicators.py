"""The choice of the transport for a group's collectives."""

from pathlib import Path

import pytest

from heteroinfer_contract import names
from heteroinfer_contract.errors import ContractError
from heteroinfer_contract.plan import Mode
from heteroinfer_contract.pod_launch import PodAddress, PodLaunch
from tests.integration.worker.groups import build_plan
from vllm_heteroinfer.distributed.communicators import shares_host

PLAN = build_plan(Path("/model"), layers=[4, 4], pods=[2, 1, 1], tensor=2, mode=Mode.TENSOR)


def launch(*hosts: str) -> PodLaunch:
    addresses = tuple(PodAddress(host=host) for host in hosts)
    return PodLaunch(group="ns/x/0", group_uid="uid", epoch=1, pod_index=0, addresses=addresses)


@pytest.mark.parametrize(
    ("hosts", "shared"),
    [
        (("pod-0", "pod-1", "pod-2"), [True, False]),
        (("127.0.0.1", "127.0.0.1", "127.0.0.1"), [True, True]),
        (("127.0.0.1", "127.0.0.1", "pod-2"), [True, False]),
    ],
    ids=["cluster", "one machine", "both"],
)
def test_shared_memory_is_for_one_pod_or_one_address(hosts: tuple[str, ...], shared: list[bool]) -> None:
    assert [shares_host(PLAN, launch(*hosts), stage, {}) for stage in (0, 1)] == shared


@pytest.mark.parametrize(("asked", "shared"), [("shared_memory", True), ("gloo", False)])
def test_the_transport_that_the_user_sets_is_used(asked: str, *, shared: bool) -> None:
    for stage in (0, 1):
        found = shares_host(PLAN, launch("pod-0", "pod-1", "pod-2"), stage, {names.ENV_BRIDGE: asked})
        assert found == shared


def test_an_invalid_transport_is_refused() -> None:
    with pytest.raises(
        ContractError, match="HETEROINFER_BRIDGE must be one of auto, shared_memory, gloo \\(got 'nccl'\\)"
    ):
        shares_host(PLAN, launch("a", "b", "c"), 0, {names.ENV_BRIDGE: "nccl"})
