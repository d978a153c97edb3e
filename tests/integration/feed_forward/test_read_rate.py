"""Tests that feed-forward ranks measure their read rates together, and share layers by these rates."""

import json
import os
import re
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from heteroinfer_contract import metric_names as names
from heteroinfer_contract.names import PATH_GROUP
from heteroinfer_contract.plan import BY_RATE
from tests.gpu.scrape import scrape
from tests.integration.feed_forward import tiny_models
from tests.integration.feed_forward.feed_forward_plans import feed_forward_plan
from tests.integration.feed_forward.groups import ONE_THREAD, answers, make_model, reference, serving
from tests.integration.kernels.instructions import of_this_cpu
from tests.integration.worker.groups import WORKER_PYTHON, fetch
from tests.ports import free_port
from tests.spinning import spinning

RANK = """
import json, os, sys
from heteroinfer_contract.plan import Plan
from heteroinfer_contract.pod_launch import PodAddress, PodLaunch
from vllm_heteroinfer.feed_forward import read_rate
from vllm_heteroinfer.group.deadline import Deadline
from vllm_heteroinfer.group.rendezvous import GroupStore

number, port, cpu = map(int, sys.argv[1:])
plan = Plan.from_env(os.environ)
os.sched_setaffinity(0, {cpu})
launch = PodLaunch(
    group="ns/x/0", group_uid="u", epoch=1, pod_index=0,
    addresses=(PodAddress(host="127.0.0.1", executor_port=port),),
)
store = (GroupStore.connect if number else GroupStore.host)(launch, Deadline.after(60))
print("connected", flush=True)
sys.stdin.readline()
rank, deadline = plan.ranks[number], Deadline.after(120)
if number:
    read_rate.publish_read_rate(plan, rank, store, deadline)
print(json.dumps(read_rate.agreed_shares(plan, rank, store, deadline)), flush=True)
sys.stdin.readline()
"""


def test_reports_a_rank_that_hangs_before_its_first_work(tmp_path: Path) -> None:
    model = make_model("qwen3_moe", tmp_path)
    env = {"PYTHONPATH": str(Path(__file__).parent / "hanging"), "HANGS": "2"}
    with serving("qwen3_moe", model, tmp_path, shares=[BY_RATE, BY_RATE], env=env, ready=False) as group:
        awaited = ", ".join(
            [
                "rank 0 (pod 0) is Connecting and waits for rank 1",
                "rank 1 (pod 0) is Connecting and waits for rank 2",
                "rank 2 (pod 0) is Connecting",
            ]
        )
        deadline = time.monotonic() + 120
        while awaited not in (found := fetch(group.health_url(PATH_GROUP)) or ""):
            assert time.monotonic() < deadline, f"{found}\n{group.logs()}"
            time.sleep(0.1)


def test_a_rank_on_busy_cores_gets_a_smaller_share(tmp_path: Path) -> None:
    first, *_, last = sorted(os.sched_getaffinity(0))
    plan = feed_forward_plan(tmp_path, num_layers=1, remote=[0], shares=[BY_RATE, BY_RATE])
    env = {**os.environ, **plan.to_env(), **ONE_THREAD}
    port = str(free_port())
    ranks = [
        subprocess.Popen(
            ["nice", "-n", nice, str(WORKER_PYTHON), "-c", RANK, str(number), port, str(cpu)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
        )
        for number, (cpu, nice) in enumerate([(last, "0"), (first, "10"), (last, "0")])
    ]
    try:
        assert [_line(rank) for rank in ranks] == ["connected"] * 3
        with spinning([{first}]):
            _go_on(ranks)
            slow, fast = json.loads(_line(ranks[0]))
            assert slow < 0.8 * fast, (slow, fast)
            assert [json.loads(_line(rank)) for rank in ranks[1:]] == [[slow, fast]] * 2
            _go_on(ranks)
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


def _line(rank: "subprocess.Popen[str]") -> str:
    assert rank.stdout is not None
    return rank.stdout.readline().strip()


def _go_on(ranks: Sequence["subprocess.Popen[str]"]) -> None:
    for rank in ranks:
        assert rank.stdin is not None
        rank.stdin.write("\n")
        rank.stdin.flush()


ONE_RANK = """
import json, os
from dataclasses import replace
from heteroinfer_contract.plan import Plan
from vllm_heteroinfer.feed_forward import read_rate
from vllm_heteroinfer.group.deadline import Deadline
from vllm_heteroinfer.kernels import linear, memory_stream

class Store:
    put = staticmethod(lambda key, value: kept.update({key: value}))
    get = staticmethod(lambda key, deadline, awaited, rank: kept.get(key, ""))

def reads(products, **limits):
    counts.append(len(products))
    return read(products, **limits)

kept, counts, plan = {}, [], Plan.from_env(os.environ)
memory_stream.bytes_beyond_caches = lambda: 768 << 20
read_rate.median_s, read = reads, read_rate.median_s
for weight_bytes in (1 << 20, 400 << 20):
    rank = replace(plan.ranks[1], weight_bytes=weight_bytes)
    read_rate.publish_read_rate(plan, rank, Store(), Deadline.after(60))
assert int(kept["feed-forward/rate/1"]) > 1e8, kept
print(json.dumps([bool(linear._prepared), sorted(set(counts))]))
"""


def test_measuring_uses_no_disabled_kernel_and_no_more_memory_than_weights(tmp_path: Path) -> None:
    plan = feed_forward_plan(tmp_path, num_layers=1, remote=[0], shares=[BY_RATE, BY_RATE])
    found = {}
    for kernels in ("auto", "onednn"):
        env = {**os.environ, **plan.to_env(), **ONE_THREAD, "HETEROINFER_CPU_LINEAR": kernels}
        command = [str(WORKER_PYTHON), "-c", ONE_RANK]
        done = subprocess.run(command, env=env, check=True, timeout=120, stdout=subprocess.PIPE, text=True)
        found[kernels] = json.loads(done.stdout)
    assert found == {"auto": [bool(of_this_cpu()), [6, 13]], "onednn": [False, [6, 13]]}


def test_a_group_that_shares_by_rate_has_the_whole_model_and_its_tokens(tmp_path: Path) -> None:
    model = make_model("llama", tmp_path)
    with serving("llama", model, tmp_path, shares=(BY_RATE, BY_RATE)) as group:
        log = group.children[0].log.read_text()
        found = re.search(r"in GB/s: rank 1 [\d.]+, rank 2 [\d.]+. Shares of layers: (\d+):(\d+)", log)
        assert found is not None, log
        assert answers(group) == reference(model)
        sizes = [scrape(group, rank).total(names.WEIGHT_BYTES) for rank in (1, 2)]
    config = json.loads((model / "config.json").read_text())
    matrices, float32 = 3, 4
    size = matrices * config["hidden_size"] * config["intermediate_size"] * float32
    assert sum(sizes) == tiny_models.LAYERS * size
    one, two = map(int, found.groups())
    assert (sizes[0] > sizes[1]) <= (one > two)
    assert (sizes[0] < sizes[1]) <= (one < two)
