"""What is recorded of vLLM and transformers is what they say now, in the worker's own environment."""

import json
import subprocess

import pytest

from heteroinfer_contract.model import Routing, SchemeName
from heteroinfer_operator.planning.support import CPU_EXPERTS
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


def test_kernels_for_experts_take_the_routing_methods_of_the_table() -> None:
    done = _run("tests.shapes.kernels")
    assert done.returncode == 0, done.stderr[-2000:]
    known = {routing.value for routing in Routing}
    for scheme, methods in json.loads(done.stdout.splitlines()[-1]).items():
        ours = CPU_EXPERTS[SchemeName(scheme)].routing
        assert ours is not None
        assert {routing.value for routing in ours} == known & set(methods), scheme
