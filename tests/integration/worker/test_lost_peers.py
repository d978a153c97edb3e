"""Tests which errors of torch.distributed count as a lost peer. The text of an error must not decide."""

from pathlib import Path

import pytest

from tests.integration.forked_script import run_script
from tests.integration.worker.groups import WORKER_PYTHON

pytestmark = [pytest.mark.unhurried, pytest.mark.timeout(300)]

LOSSES = """
import json, os, sys, time
from datetime import timedelta
from types import SimpleNamespace
import torch
import torch.distributed as dist
from vllm_heteroinfer.distributed.transport import HopSchema, PipelineTransport
from vllm_heteroinfer.pod.lost_peer import find_lost_process

class Uncounted:
    def __getattr__(self, name):
        return lambda *_: None

os.environ["GLOO_SOCKET_IFNAME"] = "lo"
child = os.fork()
rank = 0 if child else 1
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=2,
                        timeout=timedelta(seconds=60))
dist.all_reduce(torch.ones(1))
if rank == 1:
    time.sleep(0.2)
    os._exit(0)
os.waitpid(child, 0)
stage = SimpleNamespace(is_first_rank=False, is_last_rank=False, next_rank=1, prev_rank=1,
                        cpu_group=dist.group.WORLD)
hops = PipelineTransport(group=stage, schema=HopSchema.of_tensors({"hidden": torch.zeros(1, 4)}), max_rows=4,
                         device=torch.device("cpu"), timeout_s=20, meter=Uncounted(), on_error=print)
hops.expect_rows(2)

def receive():
    for handle in hops.irecv_tensor_dict()[1]:
        handle.wait()

def send():
    for _ in range(4):  # what fits the kernel's buffers is sent to nobody
        hops.isend_tensor_dict({"hidden": torch.zeros(2, 4)})

def missing_store():
    listening = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = dist.TCPStore("127.0.0.1", listening.port, is_master=False, timeout=timedelta(seconds=1))
    store.get("a key that nobody puts")

def own():
    raise RuntimeError("shape [4, 4], but gloo-7b has [8, 4]: Connection reset by peer")

def own_of_torch():
    torch.ones(2, 3) @ torch.ones(2, 3)

def nfs():
    raise ConnectionResetError(104, "Connection reset by peer")

found = {}
for act in (lambda: dist.all_reduce(torch.ones(1)), lambda: dist.barrier(), receive, send, missing_store, own,
            own_of_torch, nfs):
    try:
        act()
        found[act.__name__ + str(len(found))] = "nothing raised"
    except Exception as error:
        found[act.__name__ + str(len(found))] = [find_lost_process(error), type(error).__name__]
print(json.dumps(found), flush=True)
os._exit(0)
"""


def test_only_errors_of_torch_distributed_count_as_a_lost_peer(tmp_path: Path) -> None:
    found = run_script(WORKER_PYTHON, LOSSES, str(tmp_path / "store")).answer()
    lost = {name: value[0] for name, value in found.items()}
    assert lost == {
        "<lambda>0": "rank",
        "<lambda>1": "rank",
        "receive2": "rank",
        "send3": "rank",
        "missing_store4": "rank",
        "own5": None,
        "own_of_torch6": None,
        "nfs7": None,
    }, found
