"""Tests that each rank's process gets the platform of its own device, on a machine with a GPU.

The tests cover issues 000 and 001. tests/integration/worker/test_platform.py has those that need CPU ranks
only.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from heteroinfer_contract import names
from heteroinfer_contract.plan import Device, Mode, Plan
from tests.gpu.machine import visible_gpus
from tests.integration.worker.conftest import make
from tests.integration.worker.groups import build_plan
from tests.integration.worker.inside_ranks import CONFIG, ON_CPU, SEEN, environment, see

pytestmark = pytest.mark.gpu

ON_GPU = {"class": "HeteroCudaPlatform", "cpu": False, "cuda_alike": True, "device": "cuda"}
DEVICES = [Device.GPU, Device.CPU]
GPU_ENV = {"VLLM_USE_FLASHINFER_SAMPLER": "0"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("platform-model"))


@pytest.fixture
def pipeline(model: Path) -> Plan:
    return build_plan(model, layers=[4, 4], pods=[1, 1], devices=DEVICES, eager_cpu=False)


@pytest.fixture
def tensor(model: Path) -> Plan:
    return build_plan(
        model, layers=[8], pods=[1, 1], devices=DEVICES, tensor=2, mode=Mode.TENSOR, eager_cpu=False
    )


def env_of(plan: Plan, rank: int) -> dict[str, str]:
    """Returns the environment of a rank on this machine. GPU ranks use the machine's first GPUs."""
    env = environment(plan, rank, **GPU_ENV)
    if plan.ranks[rank].device is Device.GPU:
        env["CUDA_VISIBLE_DEVICES"] = visible_gpus()[0]
    return env


@pytest.mark.parametrize(
    "modules",
    [
        ["vllm.platforms", "vllm.config"],
        ["vllm.model_executor.layers.attention", "vllm.platforms"],
        ["vllm.v1.worker.gpu_worker", "vllm.v1.attention.selector"],
    ],
    ids=lambda modules: modules[0],
)
def test_each_rank_gets_its_platform_in_any_import_order(
    modules: list[str], pipeline: Plan, tmp_path: Path
) -> None:
    """Both kinds of rank run on one machine, in any order of imports."""
    script = "".join(f"import {module}\n" for module in modules) + SEEN
    assert see(script, env_of(pipeline, 0), tmp_path) == ON_GPU
    assert see(script, env_of(pipeline, 1), tmp_path) == ON_CPU


def test_a_cpu_rank_stays_on_the_cpu_if_a_driver_answers(pipeline: Plan, tmp_path: Path) -> None:
    """The GPU driver answers in the process of a CPU rank, but the rank still uses the CPU."""
    script = """
import json, torch
from vllm.utils.import_utils import import_pynvml
nvml = import_pynvml()
nvml.nvmlInit()
from vllm.platforms import current_platform
print(json.dumps([nvml.nvmlDeviceGetCount() > 0, current_platform.is_cpu(), torch.cuda.is_available()]))
"""
    assert see(script, env_of(pipeline, 1), tmp_path) == [True, True, False]


def test_each_device_compiles_at_its_own_level(pipeline: Plan, tensor: Plan, tmp_path: Path) -> None:
    """GPU stages of a pipeline use CUDA graphs. GPU ranks that share layers with CPUs are eager."""
    script = CONFIG + (
        "c = config.compilation_config\n"
        "print(json.dumps([c.mode.name, c.cudagraph_mode.name != 'NONE', config.model_config.enforce_eager]))"
    )
    assert see(script, env_of(pipeline, 0), tmp_path) == ["VLLM_COMPILE", True, False]
    assert see(script, env_of(pipeline, 1), tmp_path) == ["DYNAMO_TRACE_ONCE", False, False]
    assert see(script, env_of(tensor, 0), tmp_path) == ["NONE", False, True]
    assert see(script, env_of(tensor, 1), tmp_path) == ["DYNAMO_TRACE_ONCE", False, False]


def test_each_rank_uses_the_attention_backend_of_its_device(pipeline: Plan, tmp_path: Path) -> None:
    """With one plan, GPU ranks use an attention backend for GPUs, and CPU ranks a backend for CPUs."""
    script = (
        "from vllm.model_executor.layers.attention import Attention\n"
        + CONFIG
        + """
from vllm.config import set_current_vllm_config
with set_current_vllm_config(config):
    layer = Attention(8, 32, 0.2, num_kv_heads=4, cache_config=config.cache_config, prefix="model.layers.0")
print(json.dumps(layer.attn_backend.get_name()))
"""
    )
    eager = replace(pipeline, engine=replace(pipeline.engine, dtype="bfloat16"))
    assert see(script, env_of(eager, 1), tmp_path) == "CPU_ATTN"
    assert see(script, env_of(eager, 0), tmp_path) != "CPU_ATTN"


def test_vllm_sees_as_many_devices_as_the_plan_has(model: Path, tmp_path: Path) -> None:
    """A group has N GPU and M CPU ranks. A GPU rank sees only its own GPU, and N + M ranks."""
    plan = build_plan(model, layers=[2, 2, 1, 3], pods=[1, 3], devices=DEVICES)
    script = CONFIG + (
        "from vllm.platforms import current_platform\n"
        "print(json.dumps([current_platform.device_count(), config.parallel_config.world_size]))"
    )
    assert see(script, env_of(plan, 0), tmp_path) == [1, 4]
    assert see(script, env_of(plan, 2), tmp_path)[1] == 4


def test_the_variable_decides_the_device_of_a_rank(pipeline: Plan, tmp_path: Path) -> None:
    """The environment variable decides, even if the machine has other hardware."""
    as_cpu = {**env_of(pipeline, 0), names.ENV_HETEROGENEOUS_DEVICE: "cpu"}
    assert see(SEEN, as_cpu, tmp_path) == ON_CPU
