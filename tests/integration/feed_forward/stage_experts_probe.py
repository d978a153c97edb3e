"""Checks the experts of one format in a CPU stage, with vLLM's own methods, loader and choice of kernels.

Runs in the worker's Python; `main` prints JSON as its last line. Sums in float64 are the reference.
"""

import json
import tempfile
from pathlib import Path
from typing import Any, Final
from unittest import mock

import torch

from tests.integration.feed_forward.expert_files import FORMATS
from tests.integration.feed_forward.experts_probe import (
    EXPERTS,
    HIDDEN,
    LAYOUTS,
    TOPK,
    answer_as_rank,
    build,
    exact_sum,
    load,
    write,
)
from vllm_heteroinfer.feed_forward import loaded_experts
from vllm_heteroinfer.feed_forward.file_tensors import MappedFiles
from vllm_heteroinfer.patches import cpu_coded_experts, cpu_experts

_ORACLE: Final = "vllm.model_executor.layers.fused_moe.oracle.mxfp4"


def case(name: str, layout: str) -> dict[str, Any]:
    """Returns the error of a CPU stage's sums, as a share of the largest sum."""
    published, how = FORMATS[name], LAYOUTS[layout]
    cpu_experts.install()
    cpu_coded_experts.install(loaded_experts.pack_loaded_experts)
    # A rank has a configuration of its model, but this process has none.
    override = mock.patch(f"{_ORACLE}._user_moe_activation_override", return_value=None)
    with tempfile.TemporaryDirectory() as scratch, override:
        path = Path(scratch) / "model.safetensors"
        exact = write(path, published, how)
        module = build(published, how)
        method = module.quant_method
        with torch.no_grad():
            load(module, how, path, MappedFiles())
        in_file = sum(each.nbytes for each in module.parameters())
        method.process_weights_after_loading(module)
        packed = sum(each.nbytes for each in module.parameters())
        answer: dict[str, Any] = {
            "method": method.method_name,
            "held": method._experts.method,
            "bytes": packed / in_file,
            "gaps": {},
        }
        for rows in (1, 9):
            torch.manual_seed(rows)
            x, weights = torch.randn(rows, HIDDEN).to(published.dtype), torch.rand(rows, TOPK)
            ids = torch.rand(rows, EXPERTS).topk(TOPK, -1).indices
            wanted = exact_sum(exact, how, x, weights, ids)
            got = method.apply(module, x, weights, ids, None, None)
            assert got.dtype == x.dtype
            gap = (got.double() - wanted).abs().max() / wanted.abs().max()
            answer["gaps"][f"one rank, {rows} rows"] = float(gap)
        return answer


def main(arguments: str) -> None:
    """Runs one case in a process that is a rank of its own. `arguments` are format, layout and library."""
    name, layout, *libraries = json.loads(arguments)
    answer_as_rank(lambda: case(name, layout), *libraries)
