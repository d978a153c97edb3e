"""Tests tensor mode on CPU ranks: the same bridge, sampling and warm-up as between GPU and CPU ranks."""

import json
import math
import os
import re
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from heteroinfer_contract import metric_names, names
from heteroinfer_contract.failure import FailureReason
from heteroinfer_contract.plan import Mode, Plan
from tests.integration.worker.answers import ONE_THREAD, samples
from tests.integration.worker.conftest import Reference, make, refer
from tests.integration.worker.deaths import (
    ENDED_WITHIN_S,
    NAMED_WITHIN_S,
    check_cut_off,
    check_death,
    start_clients,
)
from tests.integration.worker.engine_stops import check_stopped_api_server
from tests.integration.worker.groups import Group, build_plan, fetch, start_group

pytestmark = pytest.mark.timeout(600)

SMALL_STEPS = {"max_num_batched_tokens": 32, "max_num_seqs": 8}
"""Longer prompts are computed in chunks, whose samples are dropped."""


def tensor_plan(model: Path, *, layers: list[int], pods: list[int], **engine: Any) -> Plan:
    return build_plan(model, layers=layers, pods=pods, tensor=2, mode=Mode.TENSOR, **engine)


def test_two_ranks_of_one_pod_split_every_layer(model: Path, reference: Reference, tmp_path: Path) -> None:
    """At the end, the test stops vLLM's API server, and the group must name it."""
    plan = tensor_plan(model, layers=[8], pods=[2], **SMALL_STEPS)
    with start_group(plan, tmp_path, env=ONE_THREAD) as group:
        group.wait_ready()
        check_all(group, reference, "shared_memory")
        check_stopped_api_server(group)


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipping:
    """A group whose second rank skips one collective once a file exists, and the transport of its bridge.

    That rank has another random stream than the first one, as on another device.
    """

    group: Group
    way: str
    trigger: Path


@pytest.fixture(scope="module", params=["shared_memory", "gloo"])
def skipping(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Skipping]:
    """Two pods with one rank each. On one machine, the bridge chooses shared memory by default."""
    folder = tmp_path_factory.mktemp("skipping")
    way, trigger = request.param, folder / "skip"
    plan = tensor_plan(model, layers=[8], pods=[1, 1], **SMALL_STEPS)
    env = {**ONE_THREAD, **({names.ENV_BRIDGE: way} if way == "gloo" else {})}
    plugin = plugin_env(folder / "plugin", trigger)
    with start_group(plan, folder / "group", env=env, pod_env={1: plugin}) as group:
        group.wait_ready()
        yield Skipping(group=group, way=way, trigger=trigger)


def test_two_pods_split_every_layer(skipping: Skipping, reference: Reference) -> None:
    check_all(skipping.group, reference, skipping.way)
    check_one_samples(skipping.group, reference)


def test_both_ranks_report_a_skipped_collective(skipping: Skipping, reference: Reference) -> None:
    """Without headers, the ranks would add rows of different layers, or wait for each other.

    This is the last test of the group.
    """
    group, trigger = skipping.group, skipping.trigger
    with ThreadPoolExecutor(4) as pool:
        requests = start_clients(group, reference, pool)
        skipped_at = time.time()
        trigger.touch()
        for pod, child in enumerate(group.children):
            code = child.process.wait(ENDED_WITHIN_S)
            failure = group.failure(pod)
            assert failure is not None, group.logs()
            assert failure.reason is FailureReason.RANK_RAISED
            assert "CollectiveMismatchError: process group tp:0" in failure.message
            assert "rank 0" in failure.message
            assert "rank 1" in failure.message
            assert 0 <= failure.time - skipped_at < NAMED_WITHIN_S
            assert code == (names.EXIT_RANK_FAILED if pod == failure.pod else names.EXIT_PEER_FAILED)
        assert not trigger.exists(), "one collective was skipped"
        check_cut_off(requests)


def test_two_stages_of_two_ranks_serve(model: Path, reference: Reference, tmp_path: Path) -> None:
    """The last of four ranks is killed while decoding, and all pods name it."""
    plan = tensor_plan(model, layers=[3, 5], pods=[2, 2], **SMALL_STEPS)
    with start_group(plan, tmp_path, env=ONE_THREAD) as group, ThreadPoolExecutor(4) as pool:
        group.wait_ready()
        check_greedy(group, reference)
        check_seeds(group, reference)
        check_warm_up(group)
        check_death(group, 3, start_clients(group, reference, pool))


def test_compiled_ranks_serve(tmp_path: Path) -> None:
    """A follower compiles while its leader waits in a collective.

    The compiler does not trace the bridge. The second rank is killed while decoding, and both pods name it.
    """
    small = make(tmp_path / "model", "--layers", "2")
    plan = tensor_plan(small, layers=[2], pods=[1, 1], eager_cpu=False)
    env = {**ONE_THREAD, names.ENV_BRIDGE: "shared_memory"}  # the default transport
    with start_group(plan, tmp_path / "group", env=env) as group, ThreadPoolExecutor(4) as pool:
        group.wait_ready()
        reference = refer(small)
        check_greedy(group, reference)
        check_death(group, 1, start_clients(group, reference, pool))


def check_all(group: Group, reference: Reference, way: str) -> None:
    """Checks a group that has answered nothing before. `way` is the transport of its bridge."""
    check_greedy(group, reference)
    check_greedy(group, reference)  # now from the prefix cache, if it covers a block
    check_seeds(group, reference)
    check_schema(group)
    check_metrics(group)
    check_warm_up(group)
    logs = "".join(child.log.read_text() for child in group.children)
    assert way in logs, "the log names the bridge's transport"


def check_greedy(group: Group, reference: Reference) -> None:
    """Sends every prompt twice, all at the same time, and compares every token with transformers'."""
    answers = [*reference.values()] * 2
    with ThreadPoolExecutor(len(answers)) as pool:
        got = list(pool.map(group.complete, [answer["prompt_token_ids"] for answer in answers]))
    assert got == [answer["token_ids"] for answer in answers]


def check_seeds(group: Group, reference: Reference) -> None:
    """Checks that at temperature 1 all ranks continue with the same tokens, and that a seed repeats them."""
    prompts = [answer["prompt_token_ids"] for answer in reference.values()]

    def sample(number: int) -> Any:
        body = {"temperature": 1, "seed": 7 + number, "logprobs": 0, "ignore_eos": True}
        return complete(group, prompts[number], max_tokens=24, **body)

    with ThreadPoolExecutor(len(prompts)) as pool:
        first = list(pool.map(sample, range(len(prompts))))
        again = list(pool.map(sample, range(len(prompts))))
    assert [choice["token_ids"] for choice in first] == [choice["token_ids"] for choice in again]
    assert len({tuple(choice["token_ids"]) for choice in first}) == len(prompts)
    check_read(group, prompts, first)


def check_one_samples(group: Group, reference: Reference) -> None:
    """Checks that without a seed, all ranks continue with the first rank's samples."""
    prompts = [answer["prompt_token_ids"] for answer in reference.values()]
    body = {"temperature": 1, "logprobs": 0, "ignore_eos": True}
    check_read(group, prompts, [complete(group, prompt, max_tokens=24, **body) for prompt in prompts])


def check_read(group: Group, prompts: Sequence[list[int]], choices: Sequence[Any]) -> None:
    """Sends answers as prompts, and compares the logprob of each token with that of its sampling.

    If a rank had continued with another token, the logprobs of all later tokens would differ.
    """
    for prompt, choice in zip(prompts, choices, strict=True):
        token_ids = choice["token_ids"]
        read = complete(group, [*prompt, *token_ids], max_tokens=1, prompt_logprobs=0)["prompt_logprobs"]
        expected = [read[len(prompt) + i][str(token)]["logprob"] for i, token in enumerate(token_ids)]
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(expected, abs=1e-3)


def complete(group: Group, prompt_token_ids: list[int], **options: Any) -> Any:
    body = {"model": "tiny", "prompt": prompt_token_ids, "return_token_ids": True, **options}
    return group.post("/v1/completions", body)["choices"][0]


def check_schema(group: Group) -> None:
    """Checks that random weights answer in the schema, so that the mask works where samples are taken."""
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
    """Checks that the times of collectives are separate from compute, and that no step has the warm-up's."""
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
        # The first collective of the first step includes the time of the warm-up's last one.
        assert math.isclose(compute + wait + transfer, step, rel_tol=0.02)


def check_warm_up(group: Group) -> None:
    """Checks by the logs that followers ran the calls that the leaders announced, for each phase."""
    logs = "".join(child.log.read_text() for child in group.children)
    announced, followed = (
        sorted(re.findall(rf"([a-z -]+): {verb} (\d+) forward passes and logits computations", logs))
        for verb in ("announced", "ran the")
    )
    assert any(int(passes) >= 1 for phase, passes in announced if "memory profile" in phase)
    assert announced == followed


SKIPPING = '''
"""Skips one collective of this rank once a file is there; loaded by vLLM as any general plugin.

Draws from this rank's random stream, so that it is not the first one's.
"""
import os
import re
from pathlib import Path

import torch


def load():
    from vllm_heteroinfer.distributed.bridge_communicator import BridgeCommunicator

    whole, trigger = BridgeCommunicator.all_reduce, Path(os.environ["SKIP_ONE_WHEN"])

    def all_reduce(self, input_):
        torch.rand(1)
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
