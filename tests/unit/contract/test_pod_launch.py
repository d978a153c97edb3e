"""A launch with invalid durations or ports is refused before a process starts."""

import dataclasses
from typing import Any

import pytest

from heteroinfer_contract.errors import ContractError
from heteroinfer_contract.pod_launch import PodAddress, PodLaunch


@pytest.mark.parametrize(
    "changed",
    [
        {"heartbeat_timeout_s": -1.0},
        {"heartbeat_timeout_s": 1e9},
        {"startup_timeout_s": 0.0},
        {"drain_timeout_s": -1.0},
        {"epoch": -1},
        {"addresses": (PodAddress(host="127.0.0.1", control_port=70000),)},
        {"addresses": (PodAddress(host="", health_port=1),)},
    ],
)
def test_refuses_an_invalid_launch(changed: dict[str, Any]) -> None:
    launch = PodLaunch(
        group="g", group_uid="u", epoch=1, pod_index=0, addresses=(PodAddress(host="127.0.0.1"),)
    )
    launch.check()
    with pytest.raises(ContractError, match=f"{next(iter(changed))}|HETEROINFER_ADDRESSES"):
        dataclasses.replace(launch, **changed).check()
