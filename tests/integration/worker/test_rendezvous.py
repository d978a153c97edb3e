"""The world's rendezvous: who can reach it, shown by the kernel's table of listening sockets."""

import json
import subprocess

import pytest

from tests.integration.worker.groups import WORKER_PYTHON

SCRIPT = """
import json, socket, sys, types
import torch.distributed as dist
from vllm_heteroinfer.rendezvous import world_init_method

host = sys.argv[1]
with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]
leader = types.SimpleNamespace(host=host, rendezvous_port=port)
for _ in range(2):
    url = world_init_method(types.SimpleNamespace(leader=leader))
dist.init_process_group("gloo", init_method=url, rank=0, world_size=1)
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
def test_a_group_of_one_machine_listens_on_loopback_only(host: str) -> None:
    command = [str(WORKER_PYTHON), "-c", SCRIPT, host]
    done = subprocess.run(command, check=True, timeout=120, capture_output=True, text=True)
    assert json.loads(done.stdout.splitlines()[-1]) == [["ipv4", LOOPBACK[host]]]
