"""VLLM_HETEROGENEOUS_DEVICE chooses the platform, independent of the hardware."""

import pytest

import vllm_heteroinfer
from heteroinfer_contract import names


@pytest.mark.parametrize(
    ("device", "platform"),
    [
        ("cpu", "vllm_heteroinfer.platform.cpu.HeteroCpuPlatform"),
        ("cuda", "vllm_heteroinfer.platform.cuda.HeteroCudaPlatform"),
    ],
)
def test_the_variable_decides_the_device_of_a_rank(
    device: str, platform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(names.ENV_PLAN, "{}")
    monkeypatch.setenv(names.ENV_HETEROGENEOUS_DEVICE, device)
    assert vllm_heteroinfer.platform_plugin() == platform


@pytest.mark.parametrize("device", ["", "gpu", "CPU"])
def test_a_wrong_heterogeneous_device_is_an_error(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(names.ENV_PLAN, "{}")
    monkeypatch.setenv(names.ENV_HETEROGENEOUS_DEVICE, device)
    with pytest.raises(
        SystemExit, match=rf"VLLM_HETEROGENEOUS_DEVICE: must be one of cpu, cuda \(got '{device}'"
    ):
        vllm_heteroinfer.platform_plugin()


def test_vllm_without_a_plan_stays_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(names.ENV_PLAN, raising=False)
    monkeypatch.setenv(names.ENV_HETEROGENEOUS_DEVICE, "cpu")
    assert vllm_heteroinfer.platform_plugin() is None
