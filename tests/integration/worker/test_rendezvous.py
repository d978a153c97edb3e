"""The world's rendezvous: who can reach it, shown by the kernel's table of listening sockets."""

import json
import os
import subprocess

import pytest

from heteroinfer_contract import names
from tests.integration.worker.groups import REPOSITORY, WORKER_PYTHON
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
def test_ranks_of_one_machine_connect_over_loopback_only(host: str) -> None:
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


STORE = """
import os, sys
from heteroinfer_contract.errors import ContractError
from heteroinfer_contract.pod_launch import PodAddress, PodLaunch
from vllm_heteroinfer.group.rendezvous import Deadline, GroupStore

launch = PodLaunch(
    group="ns/x/0", group_uid="u", epoch=3, pod_index=0,
    addresses=(PodAddress(host="127.0.0.1", executor_port=int(sys.argv[1])),),
)
own = GroupStore.host(launch, Deadline.after(20))
key = os.environ.pop("HETEROINFER_GROUP_KEY")
stranger = GroupStore.connect(launch, Deadline.after(20))
os.environ["HETEROINFER_GROUP_KEY"] = key
rank = GroupStore.connect(launch, Deadline.after(20))
own.put("executor", "tcp://10.0.0.1:5")
said = []
rank.set_awaited_rank = said.append
assert rank.get("executor", Deadline.after(5), awaited="queue", rank=0) == "tcp://10.0.0.1:5"
assert said == [0, None]
signed = stranger.get("executor", Deadline.after(5), awaited="queue")
for name, value in (("executor", "tcp://10.6.6.6:5"), ("rank/1", signed)):
    stranger.put(name, value)
    try:
        rank.get(name, Deadline.after(5), awaited="queue")
    except ContractError as refusal:
        print(refusal)
"""


def test_a_strangers_queue_address_is_refused() -> None:
    """An address of the group itself under another name is refused, too."""
    done = subprocess.run(
        [str(WORKER_PYTHON), "-c", STORE, str(free_port())],
        stdout=subprocess.PIPE,
        text=True,
        timeout=120,
        check=True,
        env={**os.environ, names.ENV_GROUP_KEY: "ab" * 32},
    )
    assert [line.partition(":")[0] for line in done.stdout.splitlines()] == ["executor", "rank/1"]
    assert done.stdout.count("without a valid signature of this epoch") == 2


REACH = """
import json, os, socket, sys, threading
from pathlib import Path
from heteroinfer_contract.pod_launch import PodAddress, PodLaunch
from tests.integration.worker.groups import build_plan
from vllm_heteroinfer.group import reach
from vllm_heteroinfer.group.rendezvous import Deadline, GroupStore

plan, port, closed = build_plan(Path("m"), layers=[4, 4], pods=[1, 1]), *map(int, sys.argv[1:])
hosts = ("127.0.0.1", "tiny-0-1-1.tiny-0-ranks.ns.svc")
addresses = tuple(PodAddress(host=host, executor_port=port) for host in hosts)
launches = [
    PodLaunch(group="ns/x/0", group_uid="u", epoch=3, pod_index=pod, addresses=addresses) for pod in (0, 1)
]
end = Deadline.after(30)
stores = [GroupStore.host(launches[0], end), GroupStore.connect(launches[1], end)]
other = threading.Thread(target=reach.check_pods, args=(plan, launches[1], plan.ranks[1], stores[1], end))
other.start()
host, port_of_other = json.loads(stores[0].get("reach/1", end, awaited="address", rank=1))
strangers = [socket.create_connection((host, port_of_other), timeout=5) for _ in range(300)]
reach.REACH_TIMEOUT_S = 5.0
reach.check_pods(plan, launches[0], plan.ranks[0], stores[0], end)
other.join()
print("reached")
reach.REACH_TIMEOUT_S = 0.5
stores[1].put("reach/1", f'["127.0.0.1", {closed}]')
try:
    reach.check_pods(plan, launches[0], plan.ranks[0], stores[0], end)
except reach.UnreachableError as error:
    print(error)
"""


def test_a_pod_that_cannot_be_reached_is_reported() -> None:
    closed = free_port()
    done = subprocess.run(
        [str(WORKER_PYTHON), "-c", REACH, str(free_port()), str(closed)],
        stdout=subprocess.PIPE,
        text=True,
        timeout=120,
        check=True,
        cwd=REPOSITORY,
        env={**os.environ, names.ENV_OWN_ADDRESS: "127.0.0.1"},
    )
    reached, words = done.stdout.splitlines()
    assert reached == "reached", "though 300 connections of a stranger came before"
    assert words.startswith(
        "pod 1 (tiny-0-1-1.tiny-0-ranks.ns.svc, 127.0.0.1): pod 0 cannot connect to "
        f"port {closed} of this pod ([Errno 111] Connection refused)."
    )
