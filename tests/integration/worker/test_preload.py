"""Tests what the processes of a pod import before they are forked, in the worker's own Python."""

from pathlib import Path

import pytest

from tests.integration.worker.groups import build_plan
from tests.integration.worker.inside_ranks import environment, see

pytestmark = [pytest.mark.unhurried, pytest.mark.timeout(1200)]

LOADED = """
import json, os, resource, sys
from vllm_heteroinfer.rank import entry, imports
threads = lambda: len(os.listdir("/proc/self/task"))
plan, launch, rank = entry.read_assignment(os.environ)
problem = imports.import_before_fork(plan, rank)
import torch
seen = {
    "problem": repr(problem),
    "cuda": torch.cuda.is_initialized() or torch.cuda._is_in_bad_fork(),
    "workers": sorted({"vllm.v1.worker.cpu_worker", "vllm.v1.worker.gpu_worker"} & set(sys.modules)),
}
from vllm_heteroinfer.engine import arguments
seen["architecture"] = arguments.build_config(plan, launch, rank).model_config.architecture
seen["others_s"] = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
torch.set_num_threads(2)
before = threads()
torch.ones(512, 512) @ torch.ones(512, 512)
seen["threads_of_openmp"] = threads() - before
print(json.dumps(seen))
"""


def test_imports_start_no_threads_that_compute_and_no_process(model: Path, tmp_path: Path) -> None:
    """A forked process would lack the threads.

    Another process would import everything again (13 s of CPU time).
    """
    env = environment(build_plan(model, layers=[8], pods=[1]), 0, OMP_NUM_THREADS="2")
    seen = see(LOADED, {**env, "VLLM_CACHE_ROOT": str(tmp_path / "empty")}, tmp_path)
    assert seen.pop("others_s") < 1.0
    assert seen == {
        "problem": "None",
        "cuda": False,
        "workers": [],
        "architecture": "LlamaForCausalLM",
        "threads_of_openmp": 1,
    }
