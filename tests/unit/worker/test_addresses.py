"""The addresses at which a process of a pod listens, and the address that other pods use."""

import socket

import pytest

from heteroinfer_contract.errors import ContractError
from vllm_heteroinfer.pod.addresses import (
    bind_address,
    bind_host,
    host_in_url,
    open_listener,
    own_address,
    resolve,
)


@pytest.mark.parametrize(
    ("host", "listens"),
    [
        ("127.0.0.7", "127.0.0.7"),
        ("localhost", "127.0.0.1"),
        ("10.0.0.7", "::"),
        ("llama-0-1-0.llama-0-ranks.ns.svc", "::"),  # DNS may not have this name yet
    ],
)
def test_loopback_stays_on_loopback_and_a_pod_listens_everywhere(host: str, listens: str) -> None:
    assert bind_address(host) == listens
    assert bind_host(host) == (None if listens == "::" else listens)


def test_a_pod_listens_with_both_families_on_one_port() -> None:
    with open_listener("llama-0-1-0.llama-0-ranks.ns.svc", 0) as listener:
        listener.listen()
        port = listener.getsockname()[1]
        for address in ("127.0.0.1", "::1"):
            socket.create_connection((address, port), timeout=5).close()
        with pytest.raises(OSError, match="Address already in use"):
            open_listener("10.0.0.7", port)


def test_a_host_may_have_addresses_of_either_family() -> None:
    assert resolve("::1") == "::1"
    assert resolve("127.0.0.1") == "127.0.0.1"
    assert host_in_url("fd00::7") == "[fd00::7]"
    assert host_in_url("10.0.0.7") == "10.0.0.7"


def test_a_rank_uses_the_address_that_its_supervisor_found() -> None:
    assert own_address({"VLLM_HOST_IP": "10.0.0.7"}) == "10.0.0.7"
    with pytest.raises(ContractError, match=r"VLLM_HOST_IP: must be set .*Start the pod with"):
        own_address({})
