"""The choice of the address of an interface."""

import ipaddress

import pytest

from vllm_heteroinfer.launch.host import first_not_link_local


@pytest.mark.parametrize(
    ("found", "told"),
    [
        (["10.0.0.7", "fe80::1", "fd00::7"], "10.0.0.7"),
        (["fe80::1", "fd00::7"], "fd00::7"),  # the kernel may list a link-local address first
        (["fe80::1"], None),
        ([], None),
    ],
)
def test_finds_the_first_address_that_other_hosts_can_reach(found: list[str], told: str | None) -> None:
    expected = None if told is None else ipaddress.ip_address(told)
    assert first_not_link_local(map(ipaddress.ip_address, found)) == expected
