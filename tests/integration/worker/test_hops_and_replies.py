"""Tests tensors between stages, and the engine's reads of replies, in unusual steps."""

from pathlib import Path

import pytest

from tests.integration.forked_script import run_script
from tests.integration.worker.groups import WORKER_PYTHON

pytestmark = [pytest.mark.unhurried, pytest.mark.timeout(600)]

HOPS = """
import json, os, sys
from datetime import timedelta
from types import SimpleNamespace
import torch
import torch.distributed as dist
from vllm_heteroinfer.distributed.transport import HopSchema, PipelineTransport

class Uncounted:
    def __getattr__(self, name):
        return lambda *_: None

child = os.fork()
rank = 0 if child else 1
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=2,
                        timeout=timedelta(seconds=120))
stage = SimpleNamespace(is_first_rank=rank == 0, is_last_rank=rank == 1, next_rank=1, prev_rank=0,
                        cpu_group=dist.group.WORLD)
columns = {"features": torch.zeros(1, 3), "hidden": torch.zeros(1, 4)}
hops = PipelineTransport(group=stage, schema=HopSchema.of_tensors(columns), max_rows=4,
                         device=torch.device("cpu"), timeout_s=120, meter=Uncounted(), on_error=print)
hops.expect_rows(2)
steps = [{"hidden": torch.full((2, 4), float(step)), "features": torch.full((2, 3), 7.0)} for step in (1, 2)]
steps += [{"hidden": torch.full((2, 4), 3.0)}]
if rank == 1:
    received = []
    for _ in steps:
        tensors, handles, after = hops.irecv_tensor_dict()
        for handle in handles:
            handle.wait()
        received.append([tensors[name][:2].unique().tolist() for name in ("hidden", "features")])
    print(json.dumps(received), flush=True)
    os._exit(0)
for step in steps:
    hops.isend_tensor_dict(step)
os.waitpid(child, 0)
try:
    hops.isend_tensor_dict({**steps[0], "deltas": torch.zeros(2, 4)})
except RuntimeError as error:
    print(json.dumps(str(error)), flush=True)
os._exit(0)
"""

REPLIES = """
import json, os
from collections import Counter
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
from vllm.v1.executor.multiproc_executor import WorkerProc
from vllm_heteroinfer.engine.executor import GroupExecutor
from vllm_heteroinfer.group.deadline import Deadline

ranks = [MessageQueue(1, 1) for _ in range(3)]
engine = object.__new__(GroupExecutor)
engine._unread_replies = Counter()
engine.response_mqs = [MessageQueue.create_from_handle(queue.export_handle(), 0) for queue in ranks]
for sends, reads in zip(ranks, engine.response_mqs):
    sends.wait_until_ready()
    reads.wait_until_ready()
said = []
for status, words in (("FAILURE", "no such file"), ("SUCCESS", "done")):
    for rank, queue in enumerate(ranks):
        queue.enqueue((WorkerProc.ResponseStatus[status], f"{words} {rank}"))
    try:
        said.append(engine._read_replies("load", range(3), Deadline.after(60)))
    except RuntimeError as error:
        said.append(str(error))
print(json.dumps(said), flush=True)
os._exit(0)
"""

STOPPED = """
import json, os, signal, time
from collections import Counter
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
from vllm.v1.executor.multiproc_executor import WorkerProc
from vllm_heteroinfer.engine.executor import GroupExecutor
from vllm_heteroinfer.group.deadline import Deadline

rank = MessageQueue(1, 1)
engine = object.__new__(GroupExecutor)
engine._unread_replies = Counter()
engine.response_mqs = [MessageQueue.create_from_handle(rank.export_handle(), 0)]
rank.wait_until_ready()
engine.response_mqs[0].wait_until_ready()
parent = os.getpid()
if os.fork() == 0:
    time.sleep(0.3)
    os.kill(parent, signal.SIGSTOP)
    time.sleep(4)
    os.kill(parent, signal.SIGCONT)
    time.sleep(0.5)
    rank.enqueue((WorkerProc.ResponseStatus.SUCCESS, "done"))
    time.sleep(2)
    os._exit(0)
try:
    said = engine._read_replies("execute_model", range(1), Deadline.after(3))
except TimeoutError as error:
    said = str(error)
print(json.dumps(said), flush=True)
os._exit(0)
"""


STOPPED_BEFORE = """
import json, time
from collections import Counter
from vllm.v1.executor.multiproc_executor import WorkerProc
from vllm_heteroinfer.engine.executor import GroupExecutor
from vllm_heteroinfer.group.deadline import Deadline

class OfAnotherPod:
    answers_at = time.monotonic() + 0.5

    def dequeue(self, timeout):
        time.sleep(max(0.0, min(timeout, self.answers_at - time.monotonic())))
        if time.monotonic() < self.answers_at:
            raise TimeoutError
        return WorkerProc.ResponseStatus.SUCCESS, "done"

engine = object.__new__(GroupExecutor)
engine._unread_replies = Counter()
engine.response_mqs = [OfAnotherPod()]
try:
    said = engine._read_replies("execute_model", range(1), Deadline(at=time.monotonic() - 1, total_s=3))
except TimeoutError as error:
    said = str(error)
print(json.dumps(said), flush=True)
"""


def test_a_column_that_a_step_leaves_out_reads_as_zeros(tmp_path: Path) -> None:
    """Granite4Vision leaves out the features of images in a step without an image.

    Earlier, a KeyError ended the group in its first step.
    """
    ended = run_script(WORKER_PYTHON, HOPS, str(tmp_path / "store"))
    assert ended.lines[:1] == ["[[[1.0], [7.0]], [[2.0], [7.0]], [[3.0], [0.0]]]"], ended.errors
    assert "the next stage has no buffer for deltas, which this stage sends" in ended.answer()


def test_a_call_that_fails_on_several_ranks_leaves_no_reply_to_the_next() -> None:
    ended = run_script(WORKER_PYTHON, REPLIES)
    failed, done = ended.answer()
    assert failed == "rank 0 failed in load: no such file 0. Read the log of rank 0"
    assert done == ["done 0", "done 1", "done 2"]


def test_a_thawed_engine_continues_to_wait_for_its_ranks() -> None:
    """The ranks may have been frozen, too.

    So the engine does not count time in which it was not scheduled.
    """
    assert run_script(WORKER_PYTHON, STOPPED).answer() == ["done"]


def test_an_engine_frozen_in_the_previous_step_continues_to_wait_for_its_ranks() -> None:
    """Two steps are in flight.

    Earlier, the limit of the second step was over before the engine looked for its reply.
    """
    assert run_script(WORKER_PYTHON, STOPPED_BEFORE).answer() == ["done"]
