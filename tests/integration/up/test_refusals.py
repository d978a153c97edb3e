"""Tests what `heteroinfer up` refuses: each refusal has a fix and a non-zero exit code."""

import re
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.integration.up.resources import CPU_ROLE, GPU_ROLE, resource, write
from tests.running_up import RunningUp

NO_GPU = {"CUDA_VISIBLE_DEVICES": "-1"}
"""Also on a machine with GPUs, CUDA shows none, and `heteroinfer up` sees none."""
TIMEOUT_S = 60.0


def _refused(folder: Path, arguments: list[str | Path]) -> str:
    """Runs `heteroinfer up`, which must end by itself.

    Returns its error lines. `folder` gets its temporary files.
    """
    with RunningUp(arguments, env={"TMPDIR": str(folder)}) as up:
        assert up.wait_exit(TIMEOUT_S) == 1
        errors = [line for line in up.lines if line.startswith("error: ")]
        assert errors, up.tail()
        assert "Traceback" not in "\n".join(up.lines)
        return "\n".join(errors)


SPECS: dict[str, tuple[dict[str, Any], str]] = {
    "world size does not match roles": (
        {"parallelism": {"pipeline": 3}},
        r"spec\.parallelism\.pipeline: must divide the number of ranks.*got pipeline 3 and .*2 ranks",
    ),
    "layers do not sum up": (
        {"roles": [{**CPU_ROLE, "layers": [4, 3]}]},
        r"layers must add up to the model's 8 layers \(got 7\). Add 1 layer",
    ),
    "unknown field": (
        {"replica": 1},
        r"spec\.replica: unknown field",
    ),
    "engine argument of the plan": (
        {"engine": {"args": ["--pipeline-parallel-size=2"]}},
        r"--pipeline-parallel-size.*only HeteroInfer may set",
    ),
    "a role without pods": (
        {"roles": [{**CPU_ROLE, "pods": 0}]},
        r"spec\.roles\[0\]\.pods: must be greater than or equal to 1",
    ),
    "memory below a worker's own": (
        {"roles": [{**CPU_ROLE, "resources": {"limits": {"memory": "1Gi"}}}]},
        r"role cpu: a pod must have more memory than the .* \(got 1\.00 GiB\)",
    ),
    "a field of pods that no process can have": (
        {"roles": [{**CPU_ROLE, "template": {"nodeSelector": {"disk": "ssd"}}}]},
        r"spec\.nodeSelector: `heteroinfer up` does not support this field\. Remove it from the role",
    ),
    "a model on a cluster's volume": (
        {"model": {"uri": "pvc://models/small"}},
        r"pvc://models/small is not on this machine.*--model-dir DIR",
    ),
}


@pytest.mark.parametrize("case", SPECS)
def test_up_refuses_an_invalid_spec(case: str, tmp_path: Path, model_dir: Path, port: str) -> None:
    spec, words = SPECS[case]
    file = write(tmp_path, resource(model_dir, **spec))
    errors = _refused(tmp_path, ["-f", file, "--port", port])
    assert re.search(words, errors), errors


def test_up_refuses_a_name_that_is_too_long(tmp_path: Path, model_dir: Path, port: str) -> None:
    document = resource(model_dir)
    document["metadata"]["name"] = "n" * 41
    errors = _refused(tmp_path, ["-f", write(tmp_path, document), "--port", port])
    assert re.search(r"metadata: name must have at most 40 characters.*got 41", errors), errors


def test_up_refuses_a_missing_model(tmp_path: Path, port: str) -> None:
    missing = tmp_path / "no-model"
    errors = _refused(tmp_path, ["-f", write(tmp_path, resource(missing)), "--port", port])
    assert str(missing) in errors
    assert re.search(r"no such|not a directory|does not exist|missing", errors, re.IGNORECASE), errors


def test_up_refuses_a_folder_without_a_model(tmp_path: Path, port: str) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    file = write(tmp_path, resource(tmp_path / "elsewhere"))
    errors = _refused(tmp_path, ["-f", file, "--model-dir", folder, "--port", port])
    assert re.search(rf"{folder}.*config\.json", errors), errors


def test_up_refuses_a_port_in_use(tmp_path: Path, model_dir: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = str(other.getsockname()[1])
        errors = _refused(tmp_path, ["-f", write(tmp_path, resource(model_dir)), "--port", taken])
    assert f"port {taken} on 127.0.0.1: another program uses the port" in errors


def test_up_refuses_a_path_without_a_python(tmp_path: Path, model_dir: Path) -> None:
    file = write(tmp_path, resource(model_dir))
    errors = _refused(tmp_path, ["-f", file, "--worker-python", tmp_path / "python"])
    assert "is not a program). `make setup` creates" in errors


def test_up_refuses_a_missing_file(tmp_path: Path) -> None:
    errors = _refused(tmp_path, ["-f", tmp_path / "none.yaml"])
    assert "none.yaml: No such file or directory" in errors


def test_a_gpu_role_without_a_gpu_reports_the_missing_gpu(tmp_path: Path, model_dir: Path, port: str) -> None:
    """The group waits, as the user chose. Then a stop by a signal counts as success."""
    shortage = {"onGPUShortage": {"action": "Wait"}}
    file = write(tmp_path, resource(model_dir, roles=[CPU_ROLE, GPU_ROLE], planning=shortage))
    with RunningUp(["-f", file, "--port", port], env={**NO_GPU, "TMPDIR": str(tmp_path)}) as up:
        reported = up.wait_line(re.compile(r"CapacityAvailable=False InsufficientGPU: (.*)"), TIMEOUT_S)[1]
        assert (
            "needs 1 pod (role gpu) with 1 nvidia.com/gpu; node localhost has no nvidia.com/gpu" in reported
        )
        assert "set planning.onGPUShortage.action: CPUOnly" in reported
        assert up.process.poll() is None
        assert up.stop(signal.SIGTERM) == 0


def test_reports_a_gpu_role_that_runs_on_the_cpu(tmp_path: Path, model_dir: Path, port: str) -> None:
    """With CPUOnly after 0 s, all ranks of the group run on the CPU immediately."""
    shortage = {"onGPUShortage": {"action": "CPUOnly", "after": "0s"}}
    role = {**CPU_ROLE, "pods": 1}
    file = write(tmp_path, resource(model_dir, roles=[role, GPU_ROLE], planning=shortage))
    with RunningUp(["-f", file, "--port", port], env={**NO_GPU, "TMPDIR": str(tmp_path)}) as up:
        up.wait_line(
            re.compile(r"role gpu runs on CPUs, because planning\.onGPUShortage\.action is CPUOnly"),
            TIMEOUT_S,
        )
        up.wait_line(re.compile(r"rank 1 \(gpu, CPU, layers \S+\): "), TIMEOUT_S)
        assert up.stop() == 0
