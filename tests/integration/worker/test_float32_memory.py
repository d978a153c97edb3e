"""Tests that a float32 rank does not grow with each new number of rows: oneDNN caches few products."""

from pathlib import Path

import pytest

from heteroinfer_contract.cgroups import kernel_bytes
from tests.integration.worker.answers import ONE_THREAD
from tests.integration.worker.conftest import make
from tests.integration.worker.groups import build_plan, start_group

pytestmark = [pytest.mark.unhurried, pytest.mark.timeout(900)]

LENGTHS = 200
MAX_GROWTH_BYTES = 160 << 20
"""Measured: 76 MB. With oneDNN's own default of 1,024, it was 282 to 290 MB (2 cores, 2026-11-26)."""


def test_prompts_of_200_lengths_take_bounded_memory(tmp_path: Path) -> None:
    model = make(tmp_path / "model", "--layers", "32")
    with start_group(build_plan(model, layers=[32], pods=[1]), tmp_path, env=ONE_THREAD) as group:
        group.wait_ready()
        status = Path(f"/proc/{group.rank_pid(0)}/status")
        before = kernel_bytes(status.read_text(), "RssAnon")
        for length in range(1, LENGTHS + 1):
            group.complete([(7 * length + 13 * index) % 480 + 5 for index in range(length)], max_tokens=1)
        assert kernel_bytes(status.read_text(), "RssAnon") - before < MAX_GROWTH_BYTES
