"""Tests that vLLM's own scheduler decodes requests that arrive separately as one batch."""

from pathlib import Path

import pytest

from tests.integration.forked_script import run_script
from tests.integration.worker.groups import WORKER_PYTHON, build_plan
from tests.integration.worker.inside_ranks import environment

pytestmark = [pytest.mark.unhurried, pytest.mark.timeout(1200)]

SCRIPT = """
import json, os
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm_heteroinfer.engine import arguments
from vllm_heteroinfer.engine.scheduler import PipelineScheduler
from vllm_heteroinfer.rank import entry

config = arguments.build_config(*entry.read_assignment(os.environ))
size = config.cache_config.block_size
spec = FullAttentionSpec(block_size=size, num_kv_heads=1, head_size=32, dtype=torch.float32)
config.cache_config.num_gpu_blocks = 64
cache = KVCacheConfig(num_blocks=64, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
scheduler = PipelineScheduler(config, cache, StructuredOutputManager(config), size)

def arrive(name):
    sampling = SamplingParams(max_tokens=16, ignore_eos=True)
    scheduler.add_request(Request(name, [1, 2, 3], sampling, None))

def schedule():
    batch = scheduler.schedule()
    return batch, batch.num_scheduled_tokens

def end(batch):
    names = list(batch.num_scheduled_tokens)
    answers = ModelRunnerOutput(names, {name: i for i, name in enumerate(names)}, [[7] for _ in names])
    scheduler.update_from_output(batch, answers)

seen = []
arrive("first")
prefill, tokens = schedule(); seen.append(tokens); end(prefill)
decode, tokens = schedule(); seen.append(tokens)
arrive("second")
prefill, tokens = schedule(); seen.append(tokens); end(prefill)
held, tokens = schedule(); seen.append(tokens); end(held)
end(decode)
both, tokens = schedule(); seen.append(tokens)
print(json.dumps(seen))
"""


def test_a_later_request_joins_the_running_batch_after_its_prefill(model: Path, tmp_path: Path) -> None:
    plan = build_plan(model, layers=[4, 4], pods=[1, 1])
    env = environment(plan, 0)
    alone, decodes, arrived, held, together = run_script(
        WORKER_PYTHON, SCRIPT, env=env, folder=tmp_path
    ).answer()
    assert (alone, decodes) == ({"first": 3}, {"first": 1})
    assert arrived == {"second": 3}, "a prompt does not wait for decoding requests"
    assert held == {}, "the request would stay in a batch of its own forever"
    assert together == {"first": 1, "second": 1}
