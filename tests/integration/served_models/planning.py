"""Makes plans of two CPU pods on nodes like this machine, as `heteroinfer plan` does from a model's files."""

from pathlib import Path
from typing import Final

from heteroinfer_contract.model_files import read_profile
from heteroinfer_operator.api import parse_spec
from heteroinfer_operator.nodes.node_platform import IMAGE_PLATFORM
from heteroinfer_operator.nodes.node_view import NodeView
from heteroinfer_operator.planning import Capacity, GroupRequest, Planned, build_free_nodes, plan_group
from tests.integration.served_models.cases import AMX, LONGEST

_CPUID: Final = {"SSE42": "sse4_2", "AVX512F": "avx512f", "AMXTILE": "amx_tile", "AMXBF16": "amx_bf16"}
"""Flags in /proc/cpuinfo by the labels of node-feature-discovery."""
_FLAGS: Final = {AMX: {"amx_tile", "amx_bf16"}}
_ROLE: Final = {
    "name": "cpu",
    "device": "CPU",
    "pods": 2,
    "resources": {"requests": {"cpu": "1"}, "limits": {"memory": "4Gi"}},
}


def _flags() -> frozenset[str]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return frozenset(next(line for line in lines if line.startswith("flags")).split())


def this_cpu() -> frozenset[str]:
    """Returns this machine's instruction sets, in the words of a case's `needs`."""
    return frozenset(name for name, needed in _FLAGS.items() if needed <= _flags())


def this_node() -> NodeView:
    """Returns a node with this machine's CPU, the labels of node-feature-discovery, and enough memory."""
    labels = {name: "true" for name, flag in _CPUID.items() if flag in _flags()}
    return NodeView(
        name="this-machine",
        allocatable={"cpu": 64.0, "memory": float(2**40)},
        labels={
            **IMAGE_PLATFORM,
            **{f"feature.node.kubernetes.io/cpu-cpuid.{name}": value for name, value in labels.items()},
        },
    )


def plan(model: Path, dtype: str = "auto") -> Planned:
    """Plans a folder's model for two pods of one CPU rank. Raises PlanError."""
    spec = parse_spec(
        {
            "model": {"uri": f"file://{model}"},
            "engine": {"maxModelLen": LONGEST, "dtype": dtype},
            "parallelism": {"mode": "Pipeline"},
            "roles": [_ROLE],
        }
    )
    request = GroupRequest(spec=spec, profile=read_profile(model), served_name="tiny", model_path=str(model))
    return plan_group(request, Capacity(free_nodes=build_free_nodes([this_node()])))
