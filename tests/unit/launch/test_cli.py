"""The termination messages of the worker's commands."""

from dataclasses import replace
from pathlib import Path

import pytest

from heteroinfer_contract import names
from heteroinfer_contract.failure import MAX_TERMINATION_MESSAGE_BYTES, Failure, FailureReason
from tests.unit.reconcile.world import PROFILE
from vllm_heteroinfer.launch import cli


def test_a_profile_that_kubernetes_would_cut_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = replace(PROFILE, num_layers=1000, layer_bytes=tuple(range(1000)), kind_of_layer=(0,) * 1000)
    assert len(long.to_json()) > MAX_TERMINATION_MESSAGE_BYTES
    monkeypatch.setattr(cli, "_read_profile", lambda *_: long)
    assert cli.inspect_model("/model", tmp_path / "message") == names.EXIT_USAGE
    failure = Failure.from_json((tmp_path / "message").read_text())
    assert failure is not None
    assert failure.reason is FailureReason.MODEL_NOT_READABLE
    assert "the model's profile must have at most 4096 bytes" in failure.message
    assert cli.inspect_model("/model", None) == names.EXIT_OK
