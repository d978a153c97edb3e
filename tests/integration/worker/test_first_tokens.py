"""Tests that a group is Ready only after a token of its own request passed every rank with a KV cache."""

import time
from pathlib import Path

from heteroinfer_contract import metric_names, names
from heteroinfer_contract.failure import FailureReason
from tests.integration.worker.answers import ONE_THREAD
from tests.integration.worker.conftest import make
from tests.integration.worker.groups import READY_TIMEOUT_S, build_plan, fetch, start_group


def test_a_model_that_fails_with_a_kv_cache_never_turns_ready(tmp_path: Path) -> None:
    """CPU attention of vLLM has no kernel for heads of 40 elements, which only the first real step shows.

    The planner refuses such a model, so the test writes the plan itself.
    """
    sizes = ("--layers", "2", "--hidden-size", "240", "--heads", "6", "--kv-heads", "3")
    model = make(tmp_path / "model", *sizes)
    plan = build_plan(model, layers=[1, 1], pods=[1, 1])
    with start_group(plan, tmp_path / "group", env=ONE_THREAD) as group:
        deadline = time.monotonic() + READY_TIMEOUT_S
        while not all(child.ended() for child in group.children):
            assert fetch(group.health_url(names.PATH_READYZ)) is None, (
                "the group is Ready, but cannot serve a request"
            )
            assert time.monotonic() < deadline, group.logs()
            time.sleep(0.05)
        for pod in (0, 1):
            failure = group.failure(pod)
            assert failure is not None, group.logs()
            assert failure.reason is FailureReason.RANK_RAISED, failure
            assert "head" in failure.message, failure


def test_no_metric_counts_the_groups_first_request(model: Path, tmp_path: Path) -> None:
    plan = build_plan(model, layers=[4, 4], pods=[1, 1])
    with start_group(plan, tmp_path, env=ONE_THREAD) as group:
        group.wait_ready()
        assert [rank.steps for rank in group.status().ranks] == [0, 0]
        for rank in (0, 1):
            text = fetch(group.metrics_url(rank) + "/metrics")
            assert text is not None
            assert not [
                line for line in text.splitlines() if line.startswith(metric_names.TOKENS_TOTAL + "{")
            ]
        served = fetch(group.url + "/metrics")
        assert served is not None
        counted = (
            "vllm:request_success_total{",
            "vllm:prompt_tokens_total{",
            "vllm:generation_tokens_total{",
        )
        values = [float(line.rpartition(" ")[2]) for line in served.splitlines() if line.startswith(counted)]
        assert len(values) >= len(counted)
        assert not any(values)
        assert len(group.complete([3, 1, 4], max_tokens=4)) == 4
        served = fetch(group.url + "/metrics")
        assert served is not None
        (generated,) = [line for line in served.splitlines() if line.startswith(counted[2])]
        assert float(generated.rpartition(" ")[2]) == 4
