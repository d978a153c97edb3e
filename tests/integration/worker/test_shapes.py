"""Tests groups of other shapes than two equal stages: their tokens, and a killed rank.

The killed rank, and whether it decodes or is idle, differ by group. tests/integration/kernels/test_serving.py
kills an idle rank of the first stage.
"""

import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.integration.worker.answers import ONE_THREAD, answer_all
from tests.integration.worker.conftest import Reference
from tests.integration.worker.deaths import check_death, start_clients
from tests.integration.worker.groups import build_addresses, build_plan, fetch, start_group

pytestmark = pytest.mark.timeout(600)


def test_three_uneven_stages_serve_chat_and_long_prompts(
    model: Path, reference: Reference, tmp_path: Path
) -> None:
    """One pod has two ranks, the other has one.

    Prompts longer than a step are computed in chunks, which overlap.
    """
    plan = build_plan(model, layers=[2, 5, 1], pods=[2, 1], max_num_batched_tokens=32)
    addresses = build_addresses(plan)
    with (
        socket.create_server(("127.0.0.1", addresses[0].metrics_port + 1)) as taken,
        start_group(plan, tmp_path, addresses=addresses, env=ONE_THREAD) as group,
    ):
        group.wait_ready()
        answer_all(group, reference)
        # Rank 1 found its metrics port in use, reported this, and serves.
        assert f"metrics port {taken.getsockname()[1]}" in group.children[0].log.read_text()
        assert fetch(group.metrics_url(0) + "/metrics") is not None
        assert fetch(group.metrics_url(2) + "/metrics") is not None
        body = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
        assert group.post("/v1/chat/completions", body)["usage"]["completion_tokens"] > 0
        check_death(group, 2, [])


def test_two_stages_of_two_tensor_ranks_serve(model: Path, reference: Reference, tmp_path: Path) -> None:
    plan = build_plan(model, layers=[3, 5], pods=[2, 2], tensor=2)
    with start_group(plan, tmp_path, env=ONE_THREAD) as group, ThreadPoolExecutor(4) as pool:
        group.wait_ready()
        answer_all(group, reference)
        check_death(group, 0, start_clients(group, reference, pool))
