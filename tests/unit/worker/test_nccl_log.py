"""NCCL's transports are read from its log."""

import pytest

from heteroinfer_contract.errors import ContractError
from heteroinfer_contract.group_report import RankStatus
from vllm_heteroinfer.distributed.nccl_log import NcclLog, find_transports

LINE = "node-0:193:1176 [0] NCCL INFO "


@pytest.mark.parametrize(
    ("said", "used_transports"),
    [
        ("Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read", {"nccl_p2p"}),
        ("Channel 00/0 : 0[0] -> 1[1] via P2P/direct pointer", {"nccl_p2p"}),
        ("Channel 00 : 2[2] -> 3[3] via SHM/direct/direct", {"nccl_shm"}),
        ("Channel 01/0 : 1[0] -> 0[0] [send] via NET/Socket/0", {"nccl_net_socket"}),
        ("Channel 01/0 : 1[0] -> 0[0] [receive] via NET/IB/0(1)/GDRDMA", {"nccl_net_ib"}),
        ("Channel 01/0 : 1[0] -> 0[0] [send] via NET/AWS Libfabric/3/GDRDMA", {"nccl_net_aws_libfabric"}),
        ("Using network Socket", set()),
        ("Bootstrap: Using eth0:10.0.0.1<0>", set()),
        ("Channel 01/0 : 1[0] -> 0[0] via NETWORK", set()),
    ],
)
def test_finds_each_transport_in_the_log(said: str, used_transports: set[str]) -> None:
    assert find_transports(f"{LINE}{said}\n") == used_transports


def test_reads_the_log_file_that_the_environment_names() -> None:
    env: dict[str, str] = {}
    log = NcclLog.capture(env)
    assert log is not None
    assert log.used_transports() == frozenset()
    assert env["NCCL_DEBUG"] == "INFO"
    with open(env["NCCL_DEBUG_FILE"], "w") as file:  # NCCL opens the file once, too
        for way in ("P2P/CUMEM", "P2P/CUMEM", "NET/IB/0"):
            file.write(f"{LINE}Channel 00/0 : 0[0] -> 1[1] via {way}\n")
            file.flush()
        assert log.used_transports() == {"nccl_p2p", "nccl_net_ib"}
    assert log.used_transports() == {"nccl_p2p", "nccl_net_ib"}


def test_a_report_accepts_the_longest_name_of_a_transport() -> None:
    (transport,) = find_transports(f"{LINE}Channel 01/0 : 1[0] -> 0[0] [send] via NET/{'N' * 32}/0")
    RankStatus(rank=0, pod=0, transports=(f"ranks:{transport}",)).check()
    with pytest.raises(ContractError, match="transports"):
        RankStatus(rank=0, pod=0, transports=(f"ranks:{'n' * 58}",)).check()


@pytest.mark.parametrize("name", ["NCCL_DEBUG", "NCCL_DEBUG_FILE"])
def test_keeps_a_log_that_the_user_enabled(name: str) -> None:
    env = {name: "WARN"}
    assert NcclLog.capture(env) is None
    assert env == {name: "WARN"}
