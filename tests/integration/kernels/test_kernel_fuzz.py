"""Tests a short, seeded part of `tests.bench.kernel_fuzz`: random layers between guard pages."""

import re
import subprocess

import pytest

from tests.integration.kernels.instructions import CODED_SETS, emulated_library, of_this_cpu
from tests.integration.worker.groups import REPOSITORY, WORKER_PYTHON
from vllm_heteroinfer.kernels import build

pytestmark = [pytest.mark.unhurried, pytest.mark.timeout(900)]

LAYERS = 600
ENOUGH = ("bf16", "float16", "fp8 block", "fp8 channel", "int4 128 zeros", "int8 channel", "mxfp4", "nvfp4")


def test_random_layers_match_the_reference() -> None:
    build.build()
    command = [str(WORKER_PYTHON), "-m", "tests.bench.kernel_fuzz", "--layers", str(LAYERS), "--jobs", "2"]
    if not of_this_cpu(CODED_SETS):
        command += ["--library", str(emulated_library())]
    done = subprocess.run(
        [*command, "--seconds", "800", "--seed", "7"],
        check=False,
        capture_output=True,
        text=True,
        timeout=880,
        cwd=REPOSITORY,
    )
    assert done.returncode == 0, (done.stdout[-2000:], done.stderr[-2000:])
    summary = done.stdout[done.stdout.index(f"{LAYERS} layers") :]
    linear = next(line for line in summary.splitlines() if line.startswith("linear: "))
    errors = {name: float(error) for name, error in re.findall(r"([a-z0-9 ]+?) (\d\.\d\d)", linear[8:])}
    assert set(ENOUGH) <= {name.strip() for name in errors}, linear
    assert max(errors.values()) <= 1.0, linear
