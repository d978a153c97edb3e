"""What is recorded of vLLM and transformers is what they say now, in the worker's own environment."""

import json
import subprocess
from typing import Any

import pytest

from heteroinfer_contract.model import Routing, SchemeName
from heteroinfer_operator.planning.support import CPU_EXPERTS, CPU_FP8_HEAD_MULTIPLE, CPU_LINEAR, LinearKernel
from tests.integration.worker.groups import REPOSITORY, WORKER_PYTHON
from tests.shapes.comparison import recorded

pytestmark = [pytest.mark.unhurried, pytest.mark.timeout(1200)]

SHAPES = ("gemma-3-27b-it", "DeepSeek-V2-Lite-Chat", "Nemotron-H-8B-Base-8K")
"""Windows, latents, states. Of latents, a CPU with AMX is asked; others have blocks of 16 tokens."""


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(WORKER_PYTHON), "-m", *arguments]
    return subprocess.run(command, cwd=REPOSITORY, timeout=900, capture_output=True, text=True, check=False)


def test_weights_and_kv_caches_as_recorded() -> None:
    done = _run("tests.shapes.oracle", *SHAPES)
    assert done.returncode == 0, done.stderr[-2000:]
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert {name: answer for each in answers for name, answer in each.items()} == {
        name: recorded("cpu")[name] for name in SHAPES
    }


def test_defaults_of_configs_are_those_of_transformers() -> None:
    done = _run("tests.shapes.defaults", "--check")
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.fixture(scope="module")
def kernels() -> dict[str, Any]:
    """What vLLM's own choosers say of kernels on CPUs."""
    done = _run("tests.shapes.kernels")
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_kernels_for_experts_take_the_routing_methods_of_the_table(kernels: dict[str, Any]) -> None:
    known = {routing.value for routing in Routing}
    for scheme, methods in kernels["routing"].items():
        ours = CPU_EXPERTS[SchemeName(scheme)].routing
        assert ours is not None
        assert {routing.value for routing in ours} == known & set(methods), scheme


def test_kernels_for_experts_need_amx_where_the_table_says_so(kernels: dict[str, Any]) -> None:
    with_amx, without = kernels["experts"]
    assert set(with_amx.values()) == {True}
    needs = {SchemeName(scheme): not runs for scheme, runs in without.items()}
    assert needs == {scheme: CPU_EXPERTS[scheme].needs_amx for scheme in needs}
    # What vLLM packs as int4 for its kernel.
    packed = {CPU_EXPERTS[scheme] for scheme in (SchemeName.AWQ, SchemeName.GPTQ, SchemeName.INT4)}
    assert len(packed) == 1


def test_linear_layers_have_the_kernels_of_the_table(kernels: dict[str, Any]) -> None:
    with_amx, without = kernels["linear"]
    said, of_table = {}, {}
    for key, by_dtype in with_amx.items():
        name, _, bits = key.rpartition(" ")
        ours = CPU_LINEAR.get(SchemeName(name))
        for dtype, kernel in by_dtype.items():
            said[key, dtype] = (bool(kernel), bool(without[key][dtype]))
            takes = ours is not None and _takes(ours, int(bits), dtype)
            of_table[key, dtype] = (takes, takes and ours is not None and not ours.needs_amx)
    stricter = {which for which in said if which[0] == f"{SchemeName.FP8_TENSOR} 8"}
    assert {of_table.pop(which) for which in stricter} == {(False, False)}
    assert of_table == {which: runs for which, runs in said.items() if which not in stricter}
    asked = {SchemeName(key.rpartition(" ")[0]) for key in with_amx}
    assert asked >= set(CPU_LINEAR) - {SchemeName.NONE}


def test_kv_caches_are_of_the_type_and_for_the_heads_that_the_table_says(kernels: dict[str, Any]) -> None:
    plain, fp8 = kernels["head_sizes"]["auto"], kernels["head_sizes"]["fp8"]
    assert {64, 80, 128} <= set(plain)
    assert fp8 == [size for size in plain if size % CPU_FP8_HEAD_MULTIPLE == 0]
    assert kernels["overflows"], "a cache of another type may be planned on CPUs now"


def _takes(kernel: LinearKernel, bits: int, dtype: str) -> bool:
    return (not kernel.bits or bits in kernel.bits) and (not kernel.dtypes or dtype in kernel.dtypes)
