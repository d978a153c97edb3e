"""Tests `heteroinfer-worker calibrate` on a machine with a GPU.

It measures the GPU, its link and the exchange. No other test runs at the same time, so that it also measures
all CPU kernels.
"""

import subprocess
import sys

import pytest

from heteroinfer_contract.calibration import Calibration, Direction, HopPath, KernelPart
from heteroinfer_contract.model import SchemeName
from tests.gpu.machine import visible_gpus

pytestmark = [pytest.mark.skipif(not visible_gpus(), reason="needs a GPU"), pytest.mark.timeout(300)]


def test_calibrate_measures_the_gpu_its_link_and_the_exchange() -> None:
    command = [sys.executable, "-m", "vllm_heteroinfer.launch.cli", "calibrate"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    found = Calibration.from_json(done.stdout)
    missing = "; ".join(f"{each.what}: {each.why}" for each in found.skipped)
    assert found.duration_s < 60
    assert found.hardware.gpu
    assert found.gpu is not None, missing
    # The slowest card in use has 300 GB/s, and the fastest link 64 GB/s.
    assert found.gpu.bytes_per_s > 100e9
    rates = {(each.direction, each.contended): each.bytes_per_s for each in found.transfers}
    assert set(rates) == {(way, busy) for way in Direction for busy in (False, True)}, missing
    assert all(1e9 < rate < 500e9 for rate in rates.values())
    exchange_s = found.hop_s(HopPath.EXCHANGE)
    assert exchange_s is not None, missing
    assert 1e-6 < exchange_s < 1e-3
    for part, scheme in (
        (KernelPart.LINEAR, SchemeName.NONE),
        (KernelPart.LINEAR, SchemeName.AWQ),
        (KernelPart.LINEAR, SchemeName.INT8),
        (KernelPart.EXPERTS, SchemeName.NONE),
        *([(KernelPart.EXPERTS, SchemeName.FP8_BLOCK)] if found.has_amx else []),
    ):
        assert found.fastest_kernel(part, scheme, "bfloat16") is not None, missing
