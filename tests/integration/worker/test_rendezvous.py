"""The world's rendezvous: who can reach it, shown by the kernel's table of listening sockets."""

import json
import os
import subprocess

import pytest

from tests.integration.worker.groups import WORKER_PYTHON
from tests.ports import free_port

SCRIPT = """
import json, sys, types
import torch.distributed as dist
from vllm_heteroinfer.group.rendezvous import world_init_method

host, port, rank, world_size = sys.argv[1], *map(int, sys.argv[2:])
leader = types.SimpleNamespace(host=host, rendezvous_port=port)
for _ in range(2):
    url = world_init_method(types.SimpleNamespace(leader=leader))
dist.init_process_group("gloo", init_method=url, rank=rank, world_size=world_size)
listening = []
for family, table in (("ipv4", "tcp"), ("ipv6", "tcp6")):
    for line in open(f"/proc/net/{table}").readlines()[1:]:
        address, _, number = line.split()[1].rpartition(":")
        if line.split()[3] == "0A" and int(number, 16) == port:
            listening.append([family, address])
dist.barrier()
dist.destroy_process_group()
print(json.dumps(listening))
"""
LOOPBACK = {"127.0.0.1": "0100007F", "127.0.1.1": "0101007F"}
"""As the kernel prints them."""


@pytest.mark.parametrize("host", LOOPBACK)
def test_ranks_of_one_machine_meet_on_loopback_and_nowhere_else(host: str) -> None:
    port = free_port()
    ranks = [
        subprocess.Popen(
            [str(WORKER_PYTHON), "-c", SCRIPT, host, str(port), str(rank), "2"],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
        )
        for rank in range(2)
    ]
    try:
        reported = [rank.communicate(timeout=120)[0].splitlines()[-1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [json.loads(line) for line in reported] == [[["ipv4", LOOPBACK[host]]]] * 2
