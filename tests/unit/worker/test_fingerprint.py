"""Differences between the settings of ranks are found, and described in messages."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from heteroinfer_contract.plan import Device, Plan
from tests.integration.feed_forward.feed_forward_plans import feed_forward_plan
from tests.integration.worker.groups import build_plan
from vllm_heteroinfer.group import fingerprint

SETTINGS: dict[str, Any] = {"dtype": "float32", "block_size": 32, "enforce_eager": True, "model": "abc"}


def plan() -> Plan:
    return build_plan(Path("/model"), layers=[1, 1, 1], pods=[2, 1])


def test_settings_are_equal_after_writing_and_reading() -> None:
    other = fingerprint.from_json(fingerprint.to_json(SETTINGS))
    fingerprint.compare(plan(), [SETTINGS, other, other])


def test_every_difference_is_reported_with_rank_pod_and_role() -> None:
    with pytest.raises(fingerprint.ConfigMismatchError) as caught:
        fingerprint.compare(plan(), [SETTINGS, SETTINGS, {**SETTINGS, "block_size": 64, "model": "xyz"}])
    assert caught.value.rank == 2
    text = str(caught.value)
    assert "rank 2 (pod 1, role role-1): block_size must be 32, as on rank 0 (got 64)" in text
    assert "model must be abc, as on rank 0 (got xyz). Mount the same files" in text


def test_a_setting_that_one_rank_lacks_is_a_difference() -> None:
    with pytest.raises(fingerprint.ConfigMismatchError, match="new_setting must be 1, as on rank 0"):
        fingerprint.compare(plan(), [{**SETTINGS, "new_setting": 1}, SETTINGS, SETTINGS])


@pytest.mark.parametrize(
    ("on_cpus", "on_gpus"),
    [
        ("awq", "auto_awq"),
        ("gptq", "auto_gptq"),
        ("gptq", "gptq_marlin"),
        ("mxfp4", "gpt_oss_mxfp4"),
        (None, None),
    ],
)
def test_a_format_may_have_different_names_on_different_devices(
    on_cpus: str | None, on_gpus: str | None
) -> None:
    assert fingerprint.quantized_format(on_cpus) == fingerprint.quantized_format(on_gpus)


def test_each_quantization_has_its_own_fingerprint() -> None:
    formats = [fingerprint.quantized_format(name) for name in ("awq", "gptq", "fp8", "mxfp4", None)]
    assert len(set(formats)) == len(formats)


def test_eager_may_differ_by_device_only() -> None:
    graphs = {**SETTINGS, "enforce_eager": False}
    base = plan()
    gpu_last = replace(base, ranks=(*base.ranks[:2], replace(base.ranks[2], device=Device.GPU)))
    fingerprint.compare(gpu_last, [SETTINGS, SETTINGS, graphs])
    with pytest.raises(fingerprint.ConfigMismatchError, match="enforce_eager"):
        fingerprint.compare(base, [SETTINGS, SETTINGS, graphs])


def test_feed_forward_ranks_compare_only_the_models_files() -> None:
    """Feed-forward ranks get their settings from the recipe, and have no configuration of vLLM."""
    both = feed_forward_plan(Path("/model"), num_layers=1, remote=[0])
    fingerprint.compare(both, [SETTINGS, {"model": SETTINGS["model"]}])
    with pytest.raises(fingerprint.ConfigMismatchError, match=r"block_size must be 32, .*got None"):
        fingerprint.compare(plan(), [SETTINGS, SETTINGS, {"model": SETTINGS["model"]}])
    with pytest.raises(fingerprint.ConfigMismatchError, match=r"model must be abc, as on rank 0 .got xyz."):
        fingerprint.compare(both, [SETTINGS, {"model": "xyz"}])


def test_equal_files_give_equal_fingerprints(tmp_path: Path) -> None:
    def write(name: str, config: str, weights: bytes) -> str:
        directory = tmp_path / name
        directory.mkdir()
        (directory / "config.json").write_text(config)
        (directory / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}" + weights)
        return fingerprint.of_model(directory)

    first = write("a", "{}", b"\0" * 3_000_000)
    assert write("b", "{}", b"\0" * 3_000_000) == first
    assert write("c", '{"x": 1}', b"\0" * 3_000_000) != first
    assert write("d", "{}", b"\0" * 2_999_999 + b"\1") != first


@pytest.mark.parametrize(
    ("fields", "fix"),
    [
        (["hidden", "topk"], "Mount the same files at spec.model in all pods"),
        (["epoch"], "Start all pods from one plan and one image"),
        (["hidden", "lanes"], "Start all pods from one plan and one image"),
    ],
)
def test_only_differing_sizes_of_the_model_lead_to_advice_about_its_files(
    fields: list[str], fix: str
) -> None:
    assert fingerprint.remedy_for_slab(fields) == fix
