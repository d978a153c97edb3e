"""Checks the MLPs of dense layers: what feed-forward ranks read from a file, and what they compute.

Runs in the worker's Python; `main` prints JSON as its last line. vLLM's linear layers write the recipe. Sums
in float64 are the reference.
"""

import itertools
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from torch.nn import functional

from heteroinfer_contract.column_shares import Span, share_columns
from heteroinfer_contract.errors import ContractError
from tests.integration.feed_forward.expert_files import FORMATS, Published
from tests.integration.feed_forward.experts_probe import as_rank_of_stage, config
from vllm_heteroinfer.feed_forward import held_experts
from vllm_heteroinfer.feed_forward.expert_reader import ExpertReader
from vllm_heteroinfer.feed_forward.file_tensors import MappedFiles
from vllm_heteroinfer.feed_forward.mlps import RecordedMlp, RemoteMlp
from vllm_heteroinfer.feed_forward.recipe import Recipe
from vllm_heteroinfer.feed_forward.recording import record_load
from vllm_heteroinfer.kernels import linear
from vllm_heteroinfer.patches import cpu_coded

HIDDEN, INNER = 256, 512
PREFIX = "model.layers.0.mlp"
FUNCTIONS = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda gate: functional.gelu(gate, approximate="tanh"),
    "relu2": lambda gate: functional.relu(gate).square(),
}


class Mlp(torch.nn.Module):
    """An MLP of vLLM's layers.

    Args:
        kind: "merged" (gate and up are one layer), "apart", or "ungated".
        changes: an additional computation of the MLP: "", or the name of a fault.
    """

    def __init__(
        self,
        published: Published,
        kind: str,
        activation: str,
        *,
        bias: bool,
        changes: str = "",
        prefix: str = PREFIX,
    ) -> None:
        super().__init__()
        from vllm.model_executor.layers.activation import get_act_and_mul_fn, get_act_fn
        from vllm.model_executor.layers.linear import (
            ColumnParallelLinear,
            MergedColumnParallelLinear,
            RowParallelLinear,
        )

        given = {"bias": bias, "quant_config": published.config()}
        names = {"gelu_tanh": "gelu_pytorch_tanh"}
        if kind == "merged":
            self.up = MergedColumnParallelLinear(HIDDEN, [INNER] * 2, prefix=f"{prefix}.up", **given)
            self.act = get_act_and_mul_fn(names.get(activation, activation))
        else:
            self.up = ColumnParallelLinear(HIDDEN, INNER, prefix=f"{prefix}.up", **given)
            self.act = get_act_fn(names.get(activation, activation))
        if kind == "apart":
            self.gate = ColumnParallelLinear(HIDDEN, INNER, prefix=f"{prefix}.gate", **given)
        if changes == "norm":
            self.scale = torch.nn.Parameter(torch.ones(HIDDEN))
        self.down = RowParallelLinear(INNER, HIDDEN, prefix=f"{prefix}.down", **given)
        self.kind, self.changes = kind, changes

    def forward(self, x: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        """Computes the MLP, with the additional computation that `changes` names."""
        if self.changes == "norm":
            x = x * self.scale
        up, _ = self.up(2 * x if self.changes == "input" else x)
        if self.changes == "limit":
            up = up.clamp(max=7.0)
        if self.changes == "activation":
            inner = torch.tanh(up[:, :INNER]) * up[:, INNER:]
        elif self.kind == "apart":
            inner = self.act(self.gate(x)[0]) * up
        else:
            inner = self.act(up)
        y, _ = self.down(inner)
        return y / 2 if self.changes == "output" else y


def write(path: Path, form: str, kind: str, *, bias: bool) -> dict[str, torch.Tensor]:
    """Writes the file. Returns the weights and biases in float64."""
    published = FORMATS[form]
    draw = torch.Generator().manual_seed(1)
    stored: dict[str, torch.Tensor] = {}
    exact: dict[str, torch.Tensor] = {}
    for name in ("up", "down") if kind == "ungated" else ("gate", "up", "down"):
        columns, inputs = (HIDDEN, INNER) if name == "down" else (INNER, HIDDEN)
        tensors, exact[name] = published.draw(draw, columns, inputs)
        if "qweight" in tensors and "GPTQ" in form:
            tensors["g_idx"] = torch.arange(inputs, dtype=torch.int32) // 128  # as in published files
        if bias:
            tensors["bias"] = torch.randn(columns, generator=draw).to(published.dtype)
            exact[f"{name}.bias"] = tensors["bias"].double()
        stored |= {f"{PREFIX}.{name}.{end}": each.contiguous() for end, each in tensors.items()}
    save_file(stored, path)
    return exact


def load(mlp: Any, path: Path, files: MappedFiles) -> None:
    """Loads the file as vLLM's Llama does: gate and up of a merged layer are its shards 0 and 1."""
    for name, tensor in files.add(path).tensors():
        part, end = name.removeprefix(f"{PREFIX}.").split(".")
        merged = mlp.kind == "merged" and part != "down"
        parameter = getattr(getattr(mlp, "up" if merged else part), end, None)
        if parameter is not None:
            shard = ({"gate": 0, "up": 1}[part],) if merged else ()
            parameter.weight_loader(parameter, tensor, *shard)


def exact_of(exact: dict[str, torch.Tensor], activation: str, x: torch.Tensor) -> torch.Tensor:
    """Returns the exact output of an MLP, in float64."""

    def product(name: str, given: torch.Tensor) -> torch.Tensor:
        return functional.linear(given, exact[name], exact.get(f"{name}.bias"))

    up = product("up", x.double())
    act = FUNCTIONS[activation]
    return product("down", act(product("gate", x.double())) * up if "gate" in exact else act(up))


def record(published: Published, kind: str, activation: str, path: Path, *, bias: bool) -> tuple[Recipe, Any]:
    """Records the recipe of a rank with attention.

    Returns the recipe as read from the store, and the layer.
    """
    from vllm.utils.torch_utils import set_default_torch_dtype

    layer = torch.nn.Module()
    with set_default_torch_dtype(published.dtype):
        mlp = layer.mlp = Mlp(published, kind, activation, bias=bias)
    found = RecordedMlp.find(0, layer)
    assert found is not None
    files = MappedFiles()
    recipe, _ = record_load(config(published, path.parent), files, {0: found}, lambda: load(mlp, path, files))
    return Recipe.from_text(recipe.to_text()), layer


def ranks(inner: int, unit: int) -> dict[str, list[held_experts.OwnPart]]:
    """Returns the parts of the ranks of each case."""
    whole = Span(total=1, first=0, end=1)
    return {
        "one rank": [held_experts.OwnPart(columns=Span(total=inner, first=0, end=inner), experts=whole)],
        "by columns": [
            held_experts.OwnPart(columns=own, experts=whole) for own in share_columns(inner, (1, 3), unit)
        ],
    }


def case(name: str, kind: str, activation: str, *, bias: bool, tensor: int) -> dict[str, Any]:
    """Returns the error of the sums, as a share of the largest sum.

    Args:
        tensor: number of ranks with attention, which share the columns.
    """
    published = FORMATS[name]
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "model.safetensors"
        exact = write(path, name, kind, bias=bias)
        readers, layers = [], []
        for rank in range(tensor):
            with as_rank_of_stage(rank, tensor):
                recipe, layer = record(published, kind, activation, path, bias=bias)
            layers.append(layer)
            readers.append(ExpertReader(recipe, path.parent).layer(recipe.layers[0]))
        replaced = all(isinstance(layer.mlp, RemoteMlp) for layer in layers)
        answer: dict[str, Any] = {"gaps": {}, "replaced": replaced}
        for rows in (1, 9):
            x = torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(rows)).to(published.dtype)
            wanted = exact_of(exact, activation, x)
            for case_name, parts in ranks(INNER // tensor, published.unit).items():
                total = torch.zeros(wanted.shape, dtype=torch.float64)
                for reader, part in itertools.product(readers, parts):
                    held, y = (
                        held_experts.load_experts(reader, part, published.dtype),
                        torch.full_like(x, torch.nan),
                    )
                    held.compute(y, x, torch.ones(rows, 1), torch.zeros(rows, 1, dtype=torch.int32))
                    total += y.double()
                answer["gaps"][f"{case_name}, {rows} rows"] = float(
                    (total - wanted).abs().max() / wanted.abs().max()
                )
                answer["held"] = held.method
        return answer


def refusals() -> dict[str, str]:
    """Returns the reason for which each changed MLP is refused, and "none" for the MLP of an encoder."""
    found = {}
    for prefix in ("audio_tower.layers.0.mlp", "whisper_encoder.layers.0.mlp"):
        layer = torch.nn.Module()
        layer.mlp = Mlp(FORMATS["float32"], "merged", "silu", bias=False, prefix=prefix)
        found[prefix] = "none" if RecordedMlp.find(3, layer) is None else "found"
    for changes in ("", "input", "output", "norm", "limit", "activation"):
        layer = torch.nn.Module()
        layer.mlp = Mlp(FORMATS["float32"], "merged", "silu", bias=False, changes=changes)
        try:
            found[changes] = "none" if RecordedMlp.find(3, layer) is None else "found"
        except ContractError as error:
            found[changes] = str(error)
    return found


def cases(names: list[str]) -> Iterator[tuple[str, Any]]:
    """Yields the results of cases such as "format, kind, activation, bias" by their names, and of "refusals".

    A name may end with "two GPUs".
    """
    for name in names:
        if name == "refusals":
            yield name, refusals()
        else:
            form, kind, activation, bias, *gpus = name.split("; ")
            yield name, case(form, kind, activation, bias=bias == "bias", tensor=1 + len(gpus))


def main(arguments: str) -> None:
    """Runs cases in a process that is a rank of its own. `arguments` are a library, or "", and cases."""
    library, *names = json.loads(arguments)
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.platforms import current_platform

    if library:
        linear.prepare(Path(library))
    current_platform.import_kernels()
    cpu_coded.install()  # as in a CPU rank; otherwise vLLM's methods choose no kernel for some formats
    given = VllmConfig()
    given.model_config = SimpleNamespace(dtype=torch.bfloat16, is_moe=False)  # methods of FP8 need this
    with tempfile.TemporaryDirectory() as scratch, set_current_vllm_config(given):
        init_distributed_environment(1, 0, f"file://{scratch}/store", 0, "gloo")
        initialize_model_parallel(1)
        print(json.dumps(dict(cases(names))))
        torch.distributed.destroy_process_group()
