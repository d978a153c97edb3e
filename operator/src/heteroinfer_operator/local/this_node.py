"""This machine as the only node of a cluster."""

import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from heteroinfer_contract import names
from heteroinfer_contract.cgroups import available_memory, cpu_quota
from heteroinfer_operator.api import DEFAULT_GPU_RESOURCE, HeteroInferenceSpec
from heteroinfer_operator.errors import HeteroInferError
from heteroinfer_operator.nodes.node_platform import (
    ARCH_LABEL,
    OS_LABEL,
    describe_other_platform,
    select_platform,
)
from heteroinfer_operator.nodes.node_view import NodeView
from heteroinfer_operator.nodes.other_groups import HOSTNAME

NODE_NAME: Final = "localhost"
_PROC: Final = Path("/proc")
_CGROUP: Final = Path("/sys/fs/cgroup")


def observe_node(proc: Path = _PROC, cgroup: Path = _CGROUP, env: Mapping[str, str] = os.environ) -> NodeView:
    """Returns this machine as a node with its cores, free memory in bytes, and GPUs.

    The cores are those that this process may use, at most its CPU quota. The free memory is the kernel's
    MemAvailable, at most the free part of the memory limit of this process's cgroup. Without mounted cgroups
    (v1 or v2), there are no limits.
    """
    own_cgroups = (proc / "self" / "cgroup").read_text()
    memory_bytes = available_memory(cgroup, own_cgroups, (proc / "meminfo").read_text())
    quota = cpu_quota(cgroup, own_cgroups)
    cpus = float(len(os.sched_getaffinity(0)))
    cores = cpus if quota is None else min(cpus, quota)
    gpus = len(observe_gpus(proc, env))
    devices = {DEFAULT_GPU_RESOURCE: float(gpus)} if gpus else {}
    return NodeView(
        name=NODE_NAME,
        allocatable={"cpu": cores, "memory": float(memory_bytes), **devices},
        labels=_platform_labels(),
    )


def _platform_labels() -> dict[str, str]:
    """Returns the labels that a kubelet would set on this machine.

    These are the operating system and the architecture, with their names in Go, and the host name.
    """
    machine = platform.machine().lower()
    return {
        OS_LABEL: platform.system().lower(),
        ARCH_LABEL: {"x86_64": "amd64", "aarch64": "arm64"}.get(machine, machine),
        HOSTNAME: NODE_NAME,
    }


def check_platform(spec: HeteroInferenceSpec, node: NodeView) -> None:
    """Raises an error unless this machine has the platform that the pods of each role need.

    Other platforms are untested, so the user must select them explicitly, as in a cluster.

    Raises:
        HeteroInferError: the platform differs.
    """
    for role in spec.roles:
        # A selector of the user overrides the platform of the images.
        fields = select_platform(role.template.dump() if role.template else {})
        other_platform = describe_other_platform(fields.get("nodeSelector") or {}, node.labels)
        if other_platform:
            raise HeteroInferError(
                f"role {role.name}: this machine is {other_platform}. Use an x86-64 machine. If the worker's "
                "Python has a vLLM built for this platform, set roles[].template.nodeSelector: "
                f"{{{ARCH_LABEL}: {node.labels[ARCH_LABEL]}}}",
                reason="OtherPlatform",
            )


def observe_gpus(proc: Path = _PROC, env: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Returns the GPUs that CUDA programs of this process may use, with their names in CUDA_VISIBLE_DEVICES.

    Reads the driver's own list, and loads no CUDA library.
    """
    folder = proc / "driver" / "nvidia" / "gpus"
    count = len(list(folder.iterdir())) if folder.is_dir() else 0
    visible = env.get(names.ENV_VISIBLE_GPUS)
    if visible is None or not count:
        return tuple(str(index) for index in range(count))
    # CUDA ignores the first name that does not exist, such as -1, and all names after it.
    chosen = []
    for name in (item.strip() for item in visible.split(",")):
        if not name or (name.lstrip("-").isdigit() and not 0 <= int(name) < count):
            break
        chosen.append(name)
    return tuple(chosen)
