"""Tests the patch `engine_pause` in the pinned vLLM: still needed, effective, refused for other versions."""

import pytest

from tests.integration.forked_script import run_script
from tests.integration.worker.groups import WORKER_PYTHON

SCRIPT = """
import time
from types import SimpleNamespace
from vllm.v1.engine import core
from tests.integration.kernels.reverting import revert
from vllm_heteroinfer.patches import engine_pause
from vllm_heteroinfer.patches.registry import PatchError

engine_class = core.EngineCoreProc
original = engine_class._process_engine_step

def pauses(outputs):
    slept, put = [], []
    engine = SimpleNamespace(
        step_fn=lambda: (outputs, False),
        output_queue=SimpleNamespace(put_nowait=put.append),
        post_step=lambda executed: None,
        scheduler=SimpleNamespace(has_requests=lambda: True),
    )
    core.time = SimpleNamespace(sleep=slept.append)
    engine_class._process_engine_step(engine)
    core.time = time
    assert put == list(outputs.items())
    return len(slept)

def refusal():
    try:
        engine_pause.install()
    except PatchError as error:
        return str(error)
    raise AssertionError("a function that the patch was not written for was replaced")

assert pauses({0: "answer"}) == 1, "vLLM alone no longer sleeps after an answer: remove the patch"
engine_pause.install()
patched = engine_class._process_engine_step
assert pauses({0: "answer"}) == 0
assert pauses({}) == 1, "nothing happened: others may run"
engine_pause.install()
assert engine_class._process_engine_step is patched is not original
revert("engine_pause")
assert engine_class._process_engine_step is original
engine_class._process_engine_step = lambda self, other: None
assert "got parameters (self, other) in vLLM 0.32.0" in refusal()
del engine_class._process_engine_step
assert "got nothing" in refusal()
print('"done"')
"""


@pytest.mark.timeout(200)
def test_a_paused_engine_computes_nothing_until_it_resumes() -> None:
    assert run_script(WORKER_PYTHON, SCRIPT).answer() == "done"
