"""This machine as a node: what is free, which GPUs, whose cores, and which Python has vLLM."""

import os
import sys
from pathlib import Path

import pytest

from heteroinfer_contract import names
from heteroinfer_contract.plan import Device
from heteroinfer_operator.errors import HeteroInferError
from heteroinfer_operator.local.pod_process import PodProcess, share_cores, threads_per_rank
from heteroinfer_operator.local.this_node import check_platform, observe_gpus, observe_node
from heteroinfer_operator.local.worker_python import ENV_WORKER_PYTHON, WorkerPythonError, find_worker_python
from heteroinfer_operator.nodes.node_platform import ARCH_LABEL, IMAGE_PLATFORM
from heteroinfer_operator.nodes.node_view import NodeView
from tests.unit.local.plans import plan
from tests.unit.planning.planned_models import cpu, gpu, spec

GIB = 2**30
CPU_PAIR = plan(("a", Device.CPU, 1), ("b", Device.CPU, 1))


def _machine(root: Path, *, gpus: int = 0) -> tuple[Path, Path]:
    """Returns a procfs with 8 GiB available and a cgroup folder, below `root`."""
    proc, cgroup = root / "proc", root / "cgroup"
    (proc / "self").mkdir(parents=True)
    (cgroup / "a" / "b").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable: {8 * GIB // 1024} kB\n")
    (proc / "self" / "cgroup").write_text("1:name=systemd:/x\n0::/a/b\n")
    for index in range(gpus):
        (proc / "driver" / "nvidia" / "gpus" / f"0000:0{index}:00.0").mkdir(parents=True)
    return proc, cgroup


def test_a_node_without_limits_has_the_kernels_available_memory(tmp_path: Path) -> None:
    proc, cgroup = _machine(tmp_path)
    (cgroup / "a" / "memory.max").write_text("max\n")
    node = observe_node(proc, cgroup, {})
    assert node.allocatable == {"memory": 8 * GIB, "cpu": len(os.sched_getaffinity(0))}
    assert node.schedulable


def test_the_smallest_limit_of_all_parent_cgroups_counts(tmp_path: Path) -> None:
    proc, cgroup = _machine(tmp_path)
    (cgroup / "a" / "memory.max").write_text(f"{3 * GIB}\n")
    (cgroup / "a" / "memory.current").write_text(f"{2 * GIB}\n")
    (cgroup / "a" / "memory.stat").write_text(f"inactive_file {GIB}\nactive_file {GIB // 2}\nshmem {GIB}\n")
    (cgroup / "a" / "b" / "cpu.max").write_text("50000 100000\n")
    assert observe_node(proc, cgroup).allocatable == {"memory": 2.5 * GIB, "cpu": 0.5}


def test_another_architecture_runs_only_roles_that_select_it() -> None:
    arm = NodeView(name="here", allocatable={}, labels={**IMAGE_PLATFORM, ARCH_LABEL: "arm64"})
    own, other = ({"template": {"nodeSelector": {ARCH_LABEL: arch}}} for arch in ("arm64", "amd64"))
    check_platform(spec(gpu(), cpu()), NodeView(name="here", allocatable={}, labels=IMAGE_PLATFORM))
    check_platform(spec(gpu(**own), cpu(**own)), arm)
    for roles in ((gpu(**own), cpu()), (gpu(**own), cpu(**other))):
        with pytest.raises(
            HeteroInferError,
            match=r"role cpu: this machine is of architecture arm64, and the pod needs amd64\. Use an x86-64",
        ):
            check_platform(spec(*roles), arm)


def test_gpus_are_those_that_the_driver_lists(tmp_path: Path) -> None:
    proc, cgroup = _machine(tmp_path, gpus=3)
    assert observe_gpus(proc, env={}) == ("0", "1", "2")
    assert observe_node(proc, cgroup, {}).allocatable["nvidia.com/gpu"] == 3


@pytest.mark.parametrize(
    ("visible", "expected"),
    [("2,0", ("2", "0")), ("-1", ()), ("", ()), ("1,7,0", ("1",)), ("GPU-ab, 1", ("GPU-ab", "1"))],
)
def test_hidden_gpus_are_not_counted(tmp_path: Path, visible: str, expected: tuple[str, ...]) -> None:
    proc, _ = _machine(tmp_path, gpus=3)
    assert observe_gpus(proc, env={"CUDA_VISIBLE_DEVICES": visible}) == expected


def test_without_a_driver_no_gpus_are_counted(tmp_path: Path) -> None:
    proc, _ = _machine(tmp_path)
    assert observe_gpus(proc, env={"CUDA_VISIBLE_DEVICES": "0"}) == ()


@pytest.mark.parametrize(
    ("count", "groups", "expected"), [(2, 1, 1), (7, 1, 3), (16, 1, 7), (16, 2, 3), (1, 1, 1)]
)
def test_cores_are_divided_evenly_without_those_of_the_engine(
    count: float, groups: int, expected: int
) -> None:
    assert threads_per_rank(CPU_PAIR, cores=count, groups=groups) == expected


def test_each_gpu_rank_keeps_a_core() -> None:
    hybrid = plan(("a", Device.CPU, 1), ("b", Device.GPU, 2))
    assert threads_per_rank(hybrid, cores=16, groups=1) == 12


def test_threads_that_the_user_chose_stay() -> None:
    process = PodProcess(
        name="p",
        arguments=("run",),
        env=CPU_PAIR.to_env(),
        num_gpus=0,
        grace_s=30,
        health_port=None,
        readiness_path="",
    )
    shared = share_cores(process, cores=16, groups=2, env={})
    assert shared.env[names.ENV_OMP_THREADS] == "3"
    assert shared.env[names.ENV_CPU_BINDING] == "Never"  # both groups would take the same cores
    kept = share_cores(process, cores=16, groups=2, env={names.ENV_OMP_THREADS: "3"})
    assert names.ENV_OMP_THREADS not in kept.env
    assert share_cores(process, cores=16, groups=1, env={}) is process  # its supervisor knows


def test_named_worker_python_wins_and_must_be_a_program(tmp_path: Path) -> None:
    named, text = Path(sys.executable), tmp_path / "text"
    text.write_text("")
    assert find_worker_python(named, {ENV_WORKER_PYTHON: str(text)}) == named
    assert find_worker_python(None, {ENV_WORKER_PYTHON: str(named)}) == named
    with pytest.raises(WorkerPythonError, match=rf"got {text}, which is not a program\)\. `make setup`"):
        find_worker_python(text, {})


def test_worker_python_is_found_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "elsewhere" / ".venv"))
    monkeypatch.chdir(tmp_path)
    python = tmp_path / ".venv-worker" / "bin" / "python"
    with pytest.raises(WorkerPythonError, match="make setup"):
        find_worker_python(None, {})
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    assert find_worker_python(None, {}) == python
