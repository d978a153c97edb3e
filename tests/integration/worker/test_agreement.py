"""Tests that all ranks refuse a start with a follower that has another model, dtype or block size."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from heteroinfer_contract import names
from heteroinfer_contract.failure import FailureReason
from tests.integration.worker.conftest import make
from tests.integration.worker.groups import build_plan, start_group, start_ranks

pytestmark = pytest.mark.timeout(300)

EXIT_TIMEOUT_S = 240.0


def test_names_settings_that_differ_between_ranks(model: Path, tmp_path: Path) -> None:
    plan = build_plan(model, layers=[4, 4], pods=[1, 1])
    other = replace(plan, engine=replace(plan.engine, dtype="bfloat16", block_size=64))
    with start_ranks({0: plan, 1: other}, tmp_path, startup_timeout_s=EXIT_TIMEOUT_S) as group:
        for child in group.children:
            assert child.process.wait(EXIT_TIMEOUT_S) == names.EXIT_RANK_FAILED, group.logs()
            text = child.log.read_text()
            for field, got, expected in (("dtype", "bfloat16", "float32"), ("block_size", "64", "32")):
                words = f"{field} must be {expected}, as on rank 0 (got {got})"
                assert f"rank 1 (pod 1, role role-1): {words}" in text
            assert "Start all pods from one plan and one image" in text


def test_ranks_with_another_model_at_the_same_path_are_reported(model: Path, tmp_path: Path) -> None:
    """The pods have the same plan, but their volumes contain different models."""
    plan = build_plan(Path("weights"), layers=[4, 4], pods=[1, 1])
    volumes = {0: tmp_path / "volume-0", 1: tmp_path / "volume-1"}
    shutil.copytree(model, volumes[0] / "weights")
    make(volumes[1] / "weights", "--seed", "1")
    with start_group(plan, tmp_path / "logs", directories=volumes) as group:
        for child in group.children:
            assert child.process.wait(EXIT_TIMEOUT_S) == names.EXIT_REFUSED, group.logs()
        for pod in (0, 1):
            failure = group.failure(pod)
            assert failure is not None
            assert failure.reason is FailureReason.CONFIG_MISMATCH
            assert failure.rank == 1
            assert "rank 1 (pod 1, role role-1): model must be" in failure.message
            assert "Mount the same files at spec.model in all pods" in failure.message
