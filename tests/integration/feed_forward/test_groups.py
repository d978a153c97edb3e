"""A rank with attention and its feed-forward ranks serve as one: tokens, sleep, metrics, deaths; CPU only."""

import json
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from heteroinfer_contract import metric_names as names
from heteroinfer_contract.failure import FailureReason
from heteroinfer_contract.group_report import RankPhase
from heteroinfer_contract.names import EXIT_RANK_FAILED
from tests.gpu.scrape import scrape
from tests.integration.feed_forward import tiny_models
from tests.integration.feed_forward.feed_forward_plans import feed_forward_plan
from tests.integration.feed_forward.groups import (
    answers,
    answers_over_freeze,
    check_end,
    check_signal,
    make_model,
    reference,
    serving,
)
from tests.integration.worker.answers import ONE_THREAD
from tests.integration.worker.groups import Group, start_group

pytestmark = pytest.mark.timeout(600)

ALL = tuple(tiny_models.ARCHITECTURES)
ONE, TWO = (1,), (1, 1)
BY_EXPERTS = (3, 1)
"""In the matrix: ranks that have whole experts."""
MIXTURES = tuple(name for name in ALL if tiny_models.has_experts(name))
_NO_PART = "because vLLM builds them neither with its class RoutedExperts nor as an MLP of its linear layers"
REFUSED = {
    # vLLM 0.32.0 has no class of its own for it: its layers are transformers', without vLLM's MLPs.
    ("olmo2", ONE): _NO_PART,
    ("olmo2", TWO): _NO_PART,
}
"""What cannot be served, and words of the refusal at the rank."""


def test_a_mixture_on_two_ranks_serves_sleeps_and_reports_a_killed_rank(tmp_path: Path) -> None:
    model = make_model("qwen3_moe", tmp_path)
    expected = reference(model)
    env = {"VLLM_SERVER_DEV_MODE": "1"}
    args = ("--enable-sleep-mode", "--load-format", "fastsafetensors")  # which CPU ranks have not
    with serving("qwen3_moe", model, tmp_path, shares=(1, 1), env=env, extra_args=args) as group:
        assert answers(group) == expected
        check_lanes(group)
        group.post("/sleep?level=1", {})
        wait_until(lambda: group.status().ranks[0].phase is RankPhase.SLEEPING, group)
        assert not group.status().ready
        group.post("/wake_up", {})
        wait_until(lambda: group.status().ready, group)
        assert answers(group) == expected
        failure = check_signal(group, 2, signal.SIGKILL)
        assert failure.reason is FailureReason.RANK_EXITED
        assert failure.exit_code == -signal.SIGKILL


def test_layers_that_are_spread_over_the_model_give_the_same_tokens(tmp_path: Path) -> None:
    model = make_model("qwen3_moe", tmp_path)
    with serving("qwen3_moe", model, tmp_path, remote=(0, 2)) as group:
        time.sleep(1.0)  # feed-forward ranks publish their counters four times a second
        assert not scrape(group, 1).total(names.FEED_FORWARD_ROWS_TOTAL), "the warm-up does not count"
        assert answers(group) == reference(model)
        check_lanes(group, layers=2)


@pytest.mark.unhurried
def test_experts_in_fp8_are_served_on_any_cpu(tmp_path: Path) -> None:
    model = make_model("qwen3_moe", tmp_path)
    file = model / "config.json"
    sizes = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256, "head_dim": 64}
    fp8 = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        # As published: no format has routers, and vLLM's kernel for AMX takes no 8 columns.
        "modules_to_not_convert": [f"model.layers.{layer}.mlp.gate" for layer in range(tiny_models.LAYERS)],
    }
    file.write_text(json.dumps({**json.loads(file.read_text()), **sizes, "quantization_config": fp8}))
    plan = feed_forward_plan(
        model,
        num_layers=tiny_models.LAYERS,
        remote=range(tiny_models.LAYERS),
        shares=[1],
        dtype="bfloat16",
        extra_args=("--load-format", "dummy"),
    )
    with start_group(plan, tmp_path, env=ONE_THREAD) as group:
        group.wait_ready()
        assert group.complete(tiny_models.PROMPTS[0], 4)


def wait_until(condition: Callable[[], bool], group: Group) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, group.logs()
        time.sleep(0.02)


def check_lanes(group: Group, layers: int = tiny_models.LAYERS) -> None:
    """Each feed-forward rank has computed every row of its layers, and read as many bytes as experts."""
    rows = scrape(group, 0).total(names.TOKENS_TOTAL)
    assert rows > 0

    def counted() -> dict[int, float]:
        ranks = (each.rank for each in group.plan.ranks[1:])
        return {rank: scrape(group, rank).total(names.FEED_FORWARD_ROWS_TOTAL) for rank in ranks}

    wait_until(lambda: min(counted().values()) >= layers * rows, group)  # ranks publish four times a second
    assert set(counted().values()) == {layers * rows}
    lanes = {rank.rank: scrape(group, rank.rank).total for rank in group.plan.ranks[1:]}
    for rank, total in lanes.items():
        assert total(names.FEED_FORWARD_COMPUTE_SECONDS_TOTAL) > 0
        experts = total(names.FEED_FORWARD_EXPERTS_TOTAL)
        assert experts > 0
        each = total(names.WEIGHT_BYTES) / (layers * tiny_models.EXPERTS)
        assert total(names.FEED_FORWARD_BYTES_TOTAL) == pytest.approx(experts * each)
        assert mappable_bytes(group.rank_pid(rank)) >= total(names.WEIGHT_BYTES)
    assert len({total(names.WEIGHT_BYTES) for total in lanes.values()}) == 1


def mappable_bytes(pid: int) -> int:
    """Returns how much a process has in memory of weights that others can map."""
    found, inside = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if re.match("[0-9a-f]+-[0-9a-f]+ ", line):
            inside = "/memfd:heteroinfer-weights" in line
        elif inside and line.startswith("Rss:"):
            found += int(line.split()[1]) * 1024
    return found


def test_shared_experts_stay_on_the_asking_rank_a_frozen_pod_continues_and_a_stopped_rank_is_reported(
    tmp_path: Path,
) -> None:
    model = make_model("qwen2_moe", tmp_path)
    with serving("qwen2_moe", model, tmp_path) as group:
        expected = reference(model)
        assert answers(group) == expected
        assert answers_over_freeze(group, 3.0) == expected
        assert group.status().ready
        failure = check_signal(group, 1, signal.SIGSTOP)
        # Its supervisor sees it stopped, and the rank that asks misses its answer; both name it.
        assert failure.reason in {FailureReason.RANK_STOPPED, FailureReason.STEP_TIMEOUT}


def test_two_ranks_of_a_stage_ask_their_own_ranks_and_a_killed_rank_is_reported(tmp_path: Path) -> None:
    """The shared experts of the mixture stay on the stage's ranks. Feed-forward ranks have whole experts."""
    model = make_model("qwen2_moe", tmp_path)
    with serving("qwen2_moe", model, tmp_path, shares=(1, 1, 1, 1), tensor=2, by_experts=True) as group:
        assert answers(group) == reference(model)
        rows = scrape(group, 0).total(names.TOKENS_TOTAL)
        wait_until(lambda: min(rows_computed(group, rank) for rank in range(2, 6)) >= rows, group)
        assert len({scrape(group, rank).total(names.WEIGHT_BYTES) for rank in range(2, 6)}) == 1
        failure = check_signal(group, 5, signal.SIGKILL)  # serves rank 1
        assert failure.reason is FailureReason.RANK_EXITED


def test_biases_of_a_shared_stage_are_added_once_and_a_stopped_rank_is_reported(tmp_path: Path) -> None:
    """The checkpoint has all experts' matrices in one tensor. Feed-forward ranks have whole experts."""
    model = make_model("gpt_oss", tmp_path)
    shares = (*BY_EXPERTS, *BY_EXPERTS)
    with serving("gpt_oss", model, tmp_path, shares=shares, tensor=2, by_experts=True) as group:
        assert answers(group) == reference(model)
        failure = check_signal(group, 4, signal.SIGSTOP)
        assert failure.reason in {FailureReason.RANK_STOPPED, FailureReason.STEP_TIMEOUT}


def test_stages_of_two_ranks_ask_for_their_own_layers_and_end_with_an_asking_rank(tmp_path: Path) -> None:
    """The model is dense.

    The ranks of a stage add the parts of their feed-forward ranks, which share columns.
    """
    model = make_model("llama", tmp_path)
    with serving("llama", model, tmp_path, shares=(1, 1, 1, 1), tensor=2, stages=(1, 2)) as group:
        assert answers(group) == reference(model)
        assert check_signal(group, 3, signal.SIGKILL).reason is FailureReason.RANK_EXITED


def test_a_dense_model_in_shares_serves_and_ends_with_a_killed_gpu_rank(tmp_path: Path) -> None:
    model = make_model("llama", tmp_path)
    with serving("llama", model, tmp_path, shares=(1, 3)) as group:
        assert answers(group) == reference(model)
        sizes = [scrape(group, rank).total(names.WEIGHT_BYTES) for rank in (1, 2)]
        assert sizes[1] == 3 * sizes[0]
        assert check_signal(group, 0, signal.SIGKILL).reason is FailureReason.RANK_EXITED


def test_ranks_of_another_pod_serve_and_a_stopped_rank_is_reported(tmp_path: Path) -> None:
    model = make_model("qwen3_moe", tmp_path)
    with serving("qwen3_moe", model, tmp_path, shares=(1, 1), pods=(1, 1)) as group:
        assert answers(group) == reference(model)
        failure = check_signal(group, 2, signal.SIGSTOP)
        assert failure.pod == 1
        # Its supervisor sees it stopped, and the pod's first rank misses its answer; both name it.
        assert failure.reason in {FailureReason.RANK_STOPPED, FailureReason.STEP_TIMEOUT}


def test_ranks_of_two_pods_and_of_the_asking_pod_serve_and_a_killed_rank_is_reported(
    tmp_path: Path,
) -> None:
    model = make_model("qwen3_moe", tmp_path)
    shares, pods = (2, 1, 1), (0, 1, 2)
    with serving("qwen3_moe", model, tmp_path, shares=shares, pods=pods, by_experts=True) as group:
        assert answers(group) == reference(model)
        failure = check_signal(group, 3, signal.SIGKILL)
        assert (failure.reason, failure.pod) == (FailureReason.RANK_EXITED, 2)


def test_another_pod_serves_the_mlps_of_a_dense_model_and_ends_with_the_asking_rank(tmp_path: Path) -> None:
    model = make_model("llama", tmp_path)
    with serving("llama", model, tmp_path, shares=(1,), pods=(1,)) as group:
        assert answers(group) == reference(model)
        assert check_signal(group, 0, signal.SIGKILL).reason is FailureReason.RANK_EXITED


def test_ranks_with_whole_experts_count_them_and_report_their_errors(tmp_path: Path) -> None:
    """The mixture has its gate and up columns in one tensor."""
    model, trigger = make_model("gpt_oss", tmp_path), tmp_path / "trigger"
    env = {
        "PYTHONPATH": str(Path(__file__).parent / "raising"),
        "RAISES": "2",
        "RAISES_FROM": str(trigger),
    }
    with serving("gpt_oss", model, tmp_path, shares=BY_EXPERTS, by_experts=True, env=env) as group:
        assert answers(group) == reference(model)
        wait_until(lambda: has_counted_each_layer(group), group)
        rows = rows_computed(group, 1)
        seen = [scrape(group, rank).total for rank in (1, 2)]
        experts = [total(names.FEED_FORWARD_EXPERTS_TOTAL) for total in seen]
        assert rows > 0
        assert experts[0] > experts[1] > 0
        for total, own in zip(seen, (6, 2), strict=True):
            each = total(names.WEIGHT_BYTES) / (tiny_models.LAYERS * own)
            read = total(names.FEED_FORWARD_EXPERTS_TOTAL) * each
            assert total(names.FEED_FORWARD_BYTES_TOTAL) == pytest.approx(read)
        failure = check_end(group, 2, lambda: trigger.write_text("expert weights: Input/output error"))
        assert failure.reason is FailureReason.RANK_RAISED
        assert "OSError: expert weights: Input/output error" in failure.message
        assert failure.exit_code == EXIT_RANK_FAILED


def rows_computed(group: Group, rank: int) -> float:
    return scrape(group, rank).total(names.FEED_FORWARD_ROWS_TOTAL)


def has_counted_each_layer(group: Group) -> bool:
    """Whether both ranks have counted each row once in each layer, and no row of the probe at the start."""
    return all(rows_computed(group, rank) % tiny_models.LAYERS == 0 for rank in (1, 2))


@pytest.mark.parametrize(
    ("lost", "words"),
    [
        (r"6\.up_proj", "layer 2: the checkpoint lacks values for w13_weight of expert 6. Download"),
        (r"\d\.down_proj", "layer 2: the checkpoint lacks values for w2_weight of expert 0 and 7 others"),
        (r"\d", "layer 2: the checkpoint lacks values for w13_weight of expert 0 and 15 others"),
    ],
    ids=["tensor", "kind", "layer"],
)
def test_reports_weights_that_the_checkpoint_lacks(lost: str, words: str, tmp_path: Path) -> None:
    model = make_model("qwen3_moe", tmp_path)
    (file,) = model.glob("*.safetensors")
    size = int.from_bytes(file.read_bytes()[:8], "little")
    header, rest = file.read_bytes()[8 : 8 + size].decode(), file.read_bytes()[8 + size :]
    # Named as if they were another layer's, of experts that it has not.
    header = re.sub(rf"layers\.2\.mlp\.experts\.({lost})", r"layers.1.mlp.experts.10\1", header)
    file.write_bytes(len(header).to_bytes(8, "little") + header.encode() + rest)
    with serving("qwen3_moe", model, tmp_path, shares=BY_EXPERTS, by_experts=True, ready=False) as group:
        group.children[0].process.wait(300)
        assert words in group.logs(), group.logs()


@pytest.mark.feed_forward_matrix
@pytest.mark.parametrize("architecture", MIXTURES)
def test_tokens_of_whole_experts_equal_those_of_transformers(architecture: str, tmp_path: Path) -> None:
    model = make_model(architecture, tmp_path)
    engine = tiny_models.ENGINE.get(architecture, {})
    with serving(architecture, model, tmp_path, shares=BY_EXPERTS, by_experts=True, **engine) as group:
        assert answers(group) == reference(model)
        sizes = [scrape(group, rank).total(names.WEIGHT_BYTES) for rank in (1, 2)]
        assert sizes[0] == 3 * sizes[1]


@pytest.mark.feed_forward_matrix
@pytest.mark.parametrize("architecture", ALL)
def test_tokens_of_two_asking_ranks_are_those_of_transformers(architecture: str, tmp_path: Path) -> None:
    model = make_model(architecture, tmp_path)
    engine = tiny_models.ENGINE.get(architecture, {})
    if words := REFUSED.get((architecture, TWO)):
        with serving(architecture, model, tmp_path, shares=TWO, tensor=2, ready=False, **engine) as group:
            group.children[0].process.wait(300)
            assert words in group.logs(), group.logs()
        return
    with serving(architecture, model, tmp_path, shares=TWO, tensor=2, **engine) as group:
        assert answers(group) == reference(model)


@pytest.mark.feed_forward_matrix
@pytest.mark.parametrize("shares", [ONE, TWO], ids=["one", "two"])
@pytest.mark.parametrize("architecture", ALL)
def test_tokens_equal_those_of_transformers(
    architecture: str, shares: tuple[int, ...], tmp_path: Path
) -> None:
    model = make_model(architecture, tmp_path)
    engine = tiny_models.ENGINE.get(architecture, {})
    if words := REFUSED.get((architecture, shares)):
        with serving(architecture, model, tmp_path, shares=shares, ready=False, **engine) as group:
            group.children[0].process.wait(300)
            assert words in group.logs(), group.logs()
        return
    with serving(architecture, model, tmp_path, shares=shares, **engine) as group:
        assert answers(group) == reference(model)
