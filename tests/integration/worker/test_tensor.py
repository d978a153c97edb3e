"""Tensor mode on CPU ranks: the same bridge, sampling and warm-up as between GPU and CPU ranks."""

import json
import math
import os
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from heteroinfer_contract import metric_names, names
from heteroinfer_contract.failure import FailureReason
from heteroinfer_contract.plan import Mode, Plan
from tests.integration.worker.conftest import Reference, make, refer
from tests.integration.worker.groups import Group, build_plan, fetch, start_group
from tests.integration.worker.test_death import ENDED_WITHIN_S, NAMED_WITHIN_S, ask, check_death
from tests.integration.worker.test_serving import ONE_THREAD, samples

pytestmark = pytest.mark.timeout(600)

CHUNK = 32
"""Most tokens of a step: longer prompts are read in chunks, whose samples are thrown away."""


def tensor_plan(model: Path, *, layers: list[int], pods: list[int], **engine: Any) -> Plan:
    return build_plan(model, layers=layers, pods=pods, tensor=2, mode=Mode.TENSOR, **engine)


@pytest.mark.parametrize(
    ("pods", "env", "way"),
    [([2], {}, "shared_memory"), ([1, 1], {}, "shared_memory"), ([1, 1], {names.ENV_BRIDGE: "gloo"}, "gloo")],
    ids=["one pod", "two pods", "gloo"],
)
def test_two_ranks_split_every_layer(
    model: Path, reference: Reference, tmp_path: Path, pods: list[int], env: Mapping[str, str], way: str
) -> None:
    plan = tensor_plan(model, layers=[8], pods=pods, max_num_batched_tokens=CHUNK, max_num_seqs=8)
    with start_group(plan, tmp_path, env={**ONE_THREAD, **env}) as group:
        group.wait_ready()
        check_greedy(group, reference)
        check_greedy(group, reference)  # now from the prefix cache, where it covers a block
        check_seeds(group, reference)
        check_schema(group)
        check_metrics(group)
        check_warm_up(group)
        logs = "".join(child.log.read_text() for child in group.children)
        assert way in logs, "which way the bridge takes is logged"


def test_two_stages_of_two_ranks(model: Path, reference: Reference, tmp_path: Path) -> None:
    plan = tensor_plan(model, layers=[3, 5], pods=[2, 2], max_num_batched_tokens=CHUNK, max_num_seqs=8)
    with start_group(plan, tmp_path, env=ONE_THREAD) as group:
        group.wait_ready()
        check_greedy(group, reference)
        check_seeds(group, reference)
        check_warm_up(group)


def test_compiled_ranks(tmp_path: Path) -> None:
    """A follower compiles while its leader waits in a collective; the compiler does not see the bridge."""
    small = make(tmp_path / "model", "--layers", "2")
    plan = tensor_plan(small, layers=[2], pods=[1, 1], eager_cpu=False)
    with start_group(plan, tmp_path / "group", env=ONE_THREAD) as group:
        group.wait_ready()
        check_greedy(group, refer(small))


def check_greedy(group: Group, reference: Reference) -> None:
    """Asks every prompt twice, all at once, and compares every token with transformers'."""
    answers = [*reference.values()] * 2
    with ThreadPoolExecutor(len(answers)) as pool:
        got = list(pool.map(group.complete, [answer["prompt_token_ids"] for answer in answers]))
    assert got == [answer["token_ids"] for answer in answers]


def check_seeds(group: Group, reference: Reference) -> None:
    """At temperature 1 all ranks go on with the same tokens, and a seed gives them again.

    Reading an answer as a prompt gives each of its tokens the logprob that it had when it was
    sampled: a rank that had gone on with another token would have spoilt all that follow.
    """
    prompts = [answer["prompt_token_ids"] for answer in reference.values()]

    def sample(number: int) -> Any:
        body = {"temperature": 1, "seed": 7 + number, "logprobs": 0, "ignore_eos": True}
        return complete(group, prompts[number], max_tokens=24, **body)

    with ThreadPoolExecutor(len(prompts)) as pool:
        first = list(pool.map(sample, range(len(prompts))))
        again = list(pool.map(sample, range(len(prompts))))
    assert [choice["token_ids"] for choice in first] == [choice["token_ids"] for choice in again]
    assert len({tuple(choice["token_ids"]) for choice in first}) == len(prompts)
    for prompt, choice in zip(prompts, first, strict=True):
        token_ids = choice["token_ids"]
        read = complete(group, [*prompt, *token_ids], max_tokens=1, prompt_logprobs=0)["prompt_logprobs"]
        expected = [read[len(prompt) + i][str(token)]["logprob"] for i, token in enumerate(token_ids)]
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(expected, abs=1e-3)


def complete(group: Group, prompt_token_ids: list[int], **options: Any) -> Any:
    body = {"model": "tiny", "prompt": prompt_token_ids, "return_token_ids": True, **options}
    return group.post("/v1/completions", body)["choices"][0]


def check_schema(group: Group) -> None:
    """Random weights answer in the schema: the mask acts where the samples are taken."""
    schema = {
        "type": "object",
        "properties": {"rank": {"enum": [0, 1]}, "device": {"enum": ["CPU", "GPU"]}},
        "required": ["rank", "device"],
        "additionalProperties": False,
    }
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Which rank?"}],
        "max_tokens": 64,
        "temperature": 1,
        "seed": 3,
        "response_format": {"type": "json_schema", "json_schema": {"name": "place", "schema": schema}},
    }
    text = group.post("/v1/chat/completions", body)["choices"][0]["message"]["content"]
    answer = json.loads(text)
    assert answer["rank"] in {0, 1}
    assert answer["device"] in {"CPU", "GPU"}


def check_metrics(group: Group) -> None:
    """Collectives are kept apart from compute, and the warm-up's are in no step."""
    for rank in (0, 1):
        text = fetch(group.metrics_url(rank) + "/metrics")
        assert text is not None
        step, wait, transfer, compute = (
            sum(samples(text, name + "_sum").values())
            for name in (
                metric_names.STEP_SECONDS,
                metric_names.WAIT_SECONDS,
                metric_names.TRANSFER_SECONDS,
                metric_names.COMPUTE_SECONDS,
            )
        )
        assert compute > 0
        assert wait > 0
        # What the warm-up's last collective cost is reported with the first step's first one.
        assert math.isclose(compute + wait + transfer, step, rel_tol=0.02)


def check_warm_up(group: Group) -> None:
    """Followers ran what the leaders announced: the logs agree, by rank and phase."""
    logs = "".join(child.log.read_text() for child in group.children)
    assert logs.count("memory profile: announced 2") + logs.count("memory profile: announced 1") >= 1
    assert logs.count("announced") == logs.count("followed")


SKIPPING = '''
"""Skips one collective of this rank once a file is there; loaded by vLLM as any general plugin."""
import os
from pathlib import Path


def load():
    from vllm_heteroinfer.distributed.bridge_communicator import BridgeCommunicator

    whole, trigger = BridgeCommunicator.all_reduce, Path(os.environ["SKIP_ONE_WHEN"])

    def all_reduce(self, input_):
        if trigger.exists():
            trigger.unlink()
            return input_
        return whole(self, input_)

    BridgeCommunicator.all_reduce = all_reduce
'''


def plugin_env(directory: Path, trigger: Path) -> dict[str, str]:
    """Returns the environment of a pod whose ranks have the plugin installed."""
    info = directory / "skipping-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: skipping\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nskipping = skipping:load\n")
    (directory / "skipping.py").write_text(SKIPPING)
    path = os.pathsep.join(filter(None, [str(directory), os.environ.get("PYTHONPATH")]))
    return {"PYTHONPATH": path, "SKIP_ONE_WHEN": str(trigger)}


@pytest.mark.parametrize("way", ["shared_memory", "gloo"])
def test_a_skipped_collective_is_named_by_both_sides(
    model: Path, reference: Reference, tmp_path: Path, way: str
) -> None:
    """Without headers the ranks would add up rows of different layers, or wait for each other."""
    plan = tensor_plan(model, layers=[8], pods=[1, 1])
    trigger = tmp_path / "skip"
    with (
        start_group(
            plan,
            tmp_path,
            env={**ONE_THREAD, names.ENV_BRIDGE: way},
            pod_env={1: plugin_env(tmp_path / "plugin", trigger)},
        ) as group,
        ThreadPoolExecutor(4) as pool,
    ):
        group.wait_ready()
        requests = ask(group, reference, pool)
        skipped_at = time.time()
        trigger.touch()
        for pod, child in enumerate(group.children):
            code = child.process.wait(ENDED_WITHIN_S)
            failure = group.failure(pod)
            assert failure is not None, group.logs()
            assert failure.reason is FailureReason.RANK_RAISED
            assert "CollectiveMismatchError: group tp:0" in failure.message
            assert "rank 0" in failure.message
            assert "rank 1" in failure.message
            assert 0 <= failure.time - skipped_at < NAMED_WITHIN_S
            assert code == (names.EXIT_RANK_FAILED if pod == failure.pod else names.EXIT_PEER_FAILED)
        assert not trigger.exists(), "one collective was skipped"
        for request in requests:
            assert request.exception(30) is not None, "a request was answered by a group that has ended"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_is_named_while_decoding(
    model: Path, reference: Reference, tmp_path: Path, *, rank: int
) -> None:
    plan = tensor_plan(model, layers=[8], pods=[1, 1])
    with start_group(plan, tmp_path, env=ONE_THREAD) as group, ThreadPoolExecutor(4) as pool:
        group.wait_ready()
        check_death(group, rank, ask(group, reference, pool))
