"""Finds this machine's GPUs by their driver, without torch, which would allocate memory on them."""

import os
import shutil
import subprocess

TIMEOUT_S = 30.0


def visible_gpus() -> tuple[str, ...]:
    """Returns possible values for CUDA_VISIBLE_DEVICES, one for each GPU, or nothing without a GPU."""
    if shutil.which("nvidia-smi") is None:
        return ()
    query = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    done = subprocess.run(query, check=False, capture_output=True, text=True, timeout=TIMEOUT_S)
    found = tuple(line.strip() for line in done.stdout.splitlines() if line.strip().isdigit())
    if done.returncode:
        return ()
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    return found if listed is None else tuple(gpu for gpu in map(str.strip, listed.split(",")) if gpu)


def describe_gpus() -> str:
    """Returns the names of the GPUs for reports, or "" without a GPU."""
    if not visible_gpus():
        return ""
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    done = subprocess.run(query, check=True, capture_output=True, text=True, timeout=TIMEOUT_S)
    listed = done.stdout.splitlines()
    return ", ".join(f"{listed.count(name)} x {name}" for name in dict.fromkeys(listed))


def describe_cpus() -> str:
    """Returns number and model of the CPUs that this process may use, for reports."""
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        models = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    return f"{len(os.sched_getaffinity(0))} cores of {models[0] if models else 'an unnamed CPU'}"
