"""Tests the platform, compilation, attention and devices inside a CPU rank's process.

The tests cover issues 000 and 001. Each test runs a script in a process with the environment that a
supervisor makes for a rank. tests/gpu/test_platform.py has the tests of GPU ranks.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from heteroinfer_contract import names
from heteroinfer_contract.plan import Device
from heteroinfer_contract.pod_launch import CpuBinding, PodLaunch
from tests.integration.forked_script import run_script
from tests.integration.worker.answers import answer_all, rank_pids
from tests.integration.worker.conftest import Reference
from tests.integration.worker.engine_stops import check_stopped_engine
from tests.integration.worker.groups import WORKER_PYTHON, build_addresses, build_plan, start_group
from tests.integration.worker.inside_ranks import CONFIG, ON_CPU, SEEN, environment, see
from vllm_heteroinfer.launch.environment import rank_environment
from vllm_heteroinfer.launch.host import observe_host

pytestmark = pytest.mark.timeout(600)

FAKE_NVML = """
int nvmlInitWithFlags(unsigned flags) { return 0; }
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 1; return 0; }
"""
"""A driver library with one GPU."""


def see_alone(script: str, env: dict[str, str], directory: Path) -> Any:
    """Runs a script like `see`, in a process that begins with its environment."""
    command = [str(WORKER_PYTHON), "-c", script]
    done = subprocess.run(
        command, env=env, cwd=directory, timeout=500, check=False, text=True, capture_output=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


IMPORT_ORDERS = (
    ("vllm.platforms", "vllm.config", "vllm.inputs"),
    ("vllm.inputs", "vllm.platforms.interface", "vllm.config"),
    ("vllm.model_executor.layers.attention", "vllm.platforms"),
    ("vllm.v1.attention.selector", "vllm.platforms.cpu", "vllm.config"),
    ("vllm_heteroinfer.rank.worker.cpu_worker", "vllm.model_executor.layers.attention"),
)

IN_EACH_ORDER = """
import importlib, json, os, sys
orders, seen = json.loads(sys.argv[1]), []
for order in orders:
    read, write = os.pipe()
    if os.fork() == 0:
        for module in order:
            importlib.import_module(module)
        from vllm.platforms import current_platform as p
        answer = {"class": type(p).__name__, "cpu": p.is_cpu(), "cuda_alike": p.is_cuda_alike(),
            "device": p.device_type}
        os.write(write, json.dumps(answer).encode())
        os._exit(0)
    os.close(write)
    with open(read) as answer:
        seen.append(json.loads(answer.read() or "null"))
    os.wait()
print(json.dumps(seen))
"""


@pytest.mark.unhurried
def test_each_rank_gets_its_platform_in_any_import_order(model: Path, tmp_path: Path) -> None:
    """In any order of imports, there is no import cycle, and the rank gets the platform for CPUs."""
    plan = build_plan(model, layers=[4, 4], pods=[1, 1])
    seen = see(IN_EACH_ORDER, environment(plan, 1), tmp_path, json.dumps(IMPORT_ORDERS))
    assert dict(zip(IMPORT_ORDERS, seen, strict=True)) == dict.fromkeys(IMPORT_ORDERS, ON_CPU)


@pytest.mark.unhurried
def test_a_cpu_rank_stays_on_the_cpu_if_a_driver_answers(model: Path, tmp_path: Path) -> None:
    """A CPU rank stays on the CPU even if a GPU answers and vLLM's build supports it."""
    source, library = tmp_path / "nvml.c", tmp_path / "libnvidia-ml.so.1"
    source.write_text(FAKE_NVML)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True, timeout=60)
    plan = build_plan(model, layers=[4, 4], pods=[1, 1])
    env = environment(plan, 0, LD_LIBRARY_PATH=str(tmp_path))
    # As in the image of both builds, whose version does not contain `cpu`.
    script = """
import json, os
import vllm.platforms as platforms
platforms.vllm_version_matches_substr = lambda substr: False
print(json.dumps([platforms.cuda_platform_plugin(), platforms.resolve_current_platform_cls_qualname(),
    os.environ["CUDA_VISIBLE_DEVICES"]]))
"""
    stock = "vllm.platforms.cuda.CudaPlatform"
    ours = "vllm_heteroinfer.platform.cpu.HeteroCpuPlatform"
    assert see_alone(script, env, tmp_path) == [stock, ours, "-1"]
    alone = {name: value for name, value in env.items() if name != names.ENV_PLAN}
    assert see_alone(script, alone, tmp_path) == [stock, stock, "-1"]  # so the library does have an effect


def test_vllm_uses_the_device_that_the_variable_names(model: Path, tmp_path: Path) -> None:
    """The values `cpu` and `cuda` choose the device. With another value, the process ends with an error."""
    plan = build_plan(model, layers=[4, 4], pods=[1, 1])
    resolve = "import vllm.platforms as p; print('\\n\"' + p.resolve_current_platform_cls_qualname() + '\"')"
    cuda = environment(plan, 0, **{names.ENV_HETEROGENEOUS_DEVICE: "cuda"})
    assert see(resolve, cuda, tmp_path) == "vllm_heteroinfer.platform.cuda.HeteroCudaPlatform"
    env = environment(plan, 0, **{names.ENV_HETEROGENEOUS_DEVICE: "gpu"})
    wrong = run_script(WORKER_PYTHON, SEEN, env=env, folder=tmp_path)
    assert wrong.lines == []
    assert "VLLM_HETEROGENEOUS_DEVICE: must be one of cpu, cuda (got 'gpu')" in wrong.errors


@pytest.mark.unhurried
@pytest.mark.parametrize(("eager_cpu", "mode"), [(True, "NONE"), (False, "DYNAMO_TRACE_ONCE")])
def test_each_device_compiles_at_its_own_level(
    eager_cpu: bool, mode: str, model: Path, tmp_path: Path
) -> None:
    """On a CPU rank, a compilation level for GPUs becomes the CPU's own level, without CUDA graphs."""
    piecewise = ("-cc.cudagraph_mode", "PIECEWISE")
    plan = build_plan(model, layers=[4, 4], pods=[1, 1], eager_cpu=eager_cpu, extra_args=piecewise)
    script = CONFIG + (
        "c = config.compilation_config\n"
        "print(json.dumps([c.mode.name, c.cudagraph_mode.name, config.model_config.enforce_eager]))"
    )
    assert see(script, environment(plan, 0), tmp_path) == [mode, "NONE", eager_cpu]


def test_each_rank_uses_the_attention_backend_of_its_device(model: Path, tmp_path: Path) -> None:
    """A layer asks the platform when the layer is created, not when its module is imported."""
    plan = build_plan(model, layers=[4, 4], pods=[1, 1])
    script = (
        "from vllm.model_executor.layers.attention import Attention\n"
        + CONFIG
        + """
from vllm.config import set_current_vllm_config
from vllm.platforms import current_platform
def make(name):
    with set_current_vllm_config(config):
        return Attention(8, 32, 0.2, num_kv_heads=4, cache_config=config.cache_config, prefix=name)
first = make("model.layers.0")
type(current_platform).opaque_attention_op = classmethod(lambda cls: True)
second = make("model.layers.1")
print(json.dumps([first.attn_backend.get_name(), first.use_direct_call, second.use_direct_call]))
"""
    )
    # The rank is eager, so it calls attention without torch's dispatcher, unless the platform requires it.
    assert see(script, environment(plan, 0), tmp_path) == ["CPU_ATTN", True, False]


@pytest.mark.unhurried
def test_the_device_count_comes_from_the_plan(model: Path, tmp_path: Path) -> None:
    """N GPU and M CPU ranks form one group, whatever device_count() of the machine returns.

    The plan also decides if a pod has more CPU ranks than NUMA nodes, or fewer GPUs than ranks.
    """
    devices = [Device.CPU, Device.GPU]
    plan = build_plan(model, layers=[2, 2, 1, 1, 2], pods=[3, 2], devices=devices)
    script = CONFIG + (
        "from vllm.platforms import current_platform\n"
        "p = config.parallel_config\n"
        "sizes = [p.world_size, p.pipeline_parallel_size, p.nnodes]\n"
        "print(json.dumps([current_platform.device_count(), *sizes]))"
    )
    for rank in (0, 2):
        counted, world_size, stages, nodes = see(script, environment(plan, rank), tmp_path)
        assert (world_size, stages, nodes) == (5, 5, 1)
        assert counted < 5


def test_threads_of_a_rank_run_on_its_cores(model: Path, reference: Reference, tmp_path: Path) -> None:
    """With cpuBinding, every compute thread is bound to the rank's cores.

    The engine has cores of its own. At the end, the test stops the engine, and the group must name it.
    """
    cpus = sorted(os.sched_getaffinity(0))
    assert len(cpus) > 1, "needs two CPUs: one for the engine, one for the rank"
    plan = build_plan(model, layers=[8], pods=[1])
    env = {names.ENV_CPU_BINDING: CpuBinding.ALWAYS.value}
    launch = PodLaunch(
        group="g",
        group_uid="u",
        epoch=1,
        pod_index=0,
        addresses=build_addresses(plan),
        cpu_binding=CpuBinding.ALWAYS,
    )
    host = observe_host(launch, "127.0.0.1")
    expected = rank_environment(plan, launch, plan.ranks[0], {}, host)
    if host.usable_cpus < len(cpus):
        own = cpus  # CPU quota: ranks are not bound, so that threads can move to a free CPU
        assert "OMP_PLACES" not in expected
    else:
        own = [int(cpu) for cpu in expected["OMP_PLACES"].strip("{}").split(",")]
        assert own
        assert set(own) < set(cpus)
    with start_group(plan, tmp_path, env=env) as group:
        group.wait_ready()
        answer_all(group, reference)
        (pid,) = rank_pids(group)
        assert sorted(os.sched_getaffinity(pid)) == own  # of the main thread, which computes
        bound = [task for task in tasks(pid) if sorted(os.sched_getaffinity(task)) == own]
        assert len(bound) >= int(expected["OMP_NUM_THREADS"])
        assert sorted(os.sched_getaffinity(group.children[0].process.pid)) == cpus
        check_stopped_engine(group)


def tasks(pid: int) -> list[int]:
    return [int(task.name) for task in Path(f"/proc/{pid}/task").iterdir()]
