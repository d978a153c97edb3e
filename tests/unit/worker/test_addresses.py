"""Where a process of a pod listens, and which address it gives to others."""

import pytest

from heteroinfer_contract.errors import ContractError
from vllm_heteroinfer.pod.addresses import bind_host, bind_host_ipv4, own_address


@pytest.mark.parametrize(
    ("host", "listens"),
    [
        ("127.0.0.7", "127.0.0.7"),
        ("localhost", "127.0.0.1"),
        ("10.0.0.7", "0.0.0.0"),
        ("llama-0-1-0.llama-0-ranks.ns.svc", "0.0.0.0"),  # need not resolve yet
    ],
)
def test_loopback_stays_on_loopback_and_a_pod_listens_everywhere(host: str, listens: str) -> None:
    assert bind_host_ipv4(host) == listens
    assert bind_host(host) == (None if listens == "0.0.0.0" else listens)


def test_own_address_is_the_supervisors_finding() -> None:
    assert own_address({"VLLM_HOST_IP": "10.0.0.7"}) == "10.0.0.7"
    with pytest.raises(ContractError, match="VLLM_HOST_IP is not set; ranks are started by"):
        own_address({})
