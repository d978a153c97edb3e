"""Checks the experts of one format: what feed-forward ranks read from a file, and what they compute.

Runs in the worker's Python; `main` prints JSON as its last line. vLLM's own loader of the experts is the
reference for the weights. Sums in float64 are the reference for the results.
"""

import collections
import contextlib
import importlib
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from safetensors.torch import save_file

from heteroinfer_contract.column_shares import Span, share_columns, share_experts
from tests.integration.feed_forward.expert_files import FORMATS, Published
from vllm_heteroinfer.feed_forward import held_experts
from vllm_heteroinfer.feed_forward.expert_reader import ExpertReader, LayerReader
from vllm_heteroinfer.feed_forward.file_tensors import MappedFiles
from vllm_heteroinfer.feed_forward.recipe import Recipe
from vllm_heteroinfer.feed_forward.recording import record_load
from vllm_heteroinfer.feed_forward.remote import replace_remote_parts
from vllm_heteroinfer.kernels import linear

EXPERTS, TOPK, HIDDEN = 4, 2, 256
PREFIX = "model.layers.0.mlp.experts"
_LAYERS = "vllm.model_executor.layers"
_COMPRESSED = "quantization.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_"
_CHOICES = (
    (
        "fused_moe.unquantized_fused_moe_method",
        "select_unquantized_moe_backend",
        "unquantized.UnquantizedMoeBackend.TRITON",
    ),
    ("quantization.fp8", "select_fp8_moe_backend", "fp8.Fp8MoeBackend.MARLIN"),
    (f"{_COMPRESSED}w8a8_fp8", "select_fp8_moe_backend", "fp8.Fp8MoeBackend.MARLIN"),
    (f"{_COMPRESSED}w8a8_mxfp8", "select_mxfp8_moe_backend", "fp8.Fp8MoeBackend.MARLIN"),
    (f"{_COMPRESSED}w8a8_int8", "select_int8_moe_backend", "int8.Int8MoeBackend.TRITON"),
    (f"{_COMPRESSED}wna16", "select_wna16_moe_backend", "int_wna16.WNA16MoEBackend.MARLIN"),
    (f"{_COMPRESSED}w4a4_nvfp4", "select_nvfp4_moe_backend", "nvfp4.NvFp4MoeBackend.MARLIN"),
    ("quantization.auto_awq", "select_wna16_moe_backend", "int_wna16.WNA16MoEBackend.MARLIN"),
    ("quantization.auto_gptq", "select_wna16_moe_backend", "int_wna16.WNA16MoEBackend.MARLIN"),
    ("quantization.mxfp4", "select_mxfp4_moe_backend", "mxfp4.Mxfp4MoeBackend.MARLIN"),
    ("quantization.mxfp4", "select_deepseek_v4_mxfp4_moe_backend", "mxfp4.Mxfp4MoeBackend.MARLIN"),
    ("quantization.modelopt", "select_mxfp8_moe_backend", "fp8.Fp8MoeBackend.MARLIN"),
    ("quantization.modelopt", "select_nvfp4_moe_backend", "nvfp4.NvFp4MoeBackend.MARLIN"),
)
"""The functions in which vLLM's methods choose a kernel: module, name, and the kernel to return instead."""


@contextlib.contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Replaces vLLM's choices of a kernel by those of a GPU rank with attention. No kernel runs."""
    from vllm.platforms import current_platform

    with contextlib.ExitStack() as stack:
        for module, name, kernels in _CHOICES:
            of, kind, which = kernels.split(".")
            kernel = getattr(importlib.import_module(f"{_LAYERS}.fused_moe.oracle.{of}"), kind)[which]
            found = importlib.import_module(f"{_LAYERS}.{module}")
            stack.enter_context(mock.patch.object(found, name, return_value=(kernel, None)))
        # vLLM supports experts without gates only on GPUs.
        stack.enter_context(mock.patch.object(current_platform, "is_cuda_alike", return_value=True))
        yield


TWO_GPUS = ", two GPUs"
"""Suffix of a layout's name. Two ranks with attention share the columns of such a layout."""


@contextlib.contextmanager
def as_rank_of_stage(rank: int, size: int) -> Iterator[None]:
    """Lets vLLM build and load the part of one rank in a stage of this size. No collective runs."""
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    with mock.patch.multiple(group, rank_in_group=rank, world_size=size):
        yield


class Layout:
    """How a case's experts compute the input of w2, and how the file stores their projections.

    Attributes:
        fused: whether each expert has one tensor of gates and ups, and biases.
        stacked: whether one tensor has all experts: "no", "yes", "transposed", or as "gpt-oss".
    """

    def __init__(
        self,
        name: str = "silu",
        *,
        fused: bool = False,
        limit: float | None = None,
        stacked: str = "no",
        inner: int = 256,
    ) -> None:
        self.name, self.fused, self.limit, self.stacked, self.inner = name, fused, limit, stacked, inner
        self.gated = not name.endswith("_no_mul")

    def compute(self, sums: torch.Tensor) -> torch.Tensor:
        """Returns the input of w2 for the columns of w13, in float64."""
        kind, gelu = self.name.removesuffix("_no_mul"), torch.nn.functional.gelu
        if self.name == "swigluoai":
            gate, up = sums[0::2].clamp(max=7.0), sums[1::2].clamp(-7.0, 7.0)
            return gate * torch.sigmoid(1.702 * gate) * (up + 1)
        if self.name == "swiglustep":
            gate, up = sums.chunk(2)
            return (gate * torch.sigmoid(gate)).clamp(max=7.0) * up.clamp(-7.0, 7.0)
        gate, up = sums.chunk(2) if self.gated else (sums, torch.ones(()).double())
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        functions = {
            "silu": lambda: gate * torch.sigmoid(gate),
            "gelu": lambda: gelu(gate),
            "gelu_tanh": lambda: gelu(gate, approximate="tanh"),
            "relu2": lambda: torch.relu(gate).square(),
        }
        return functions[kind]() * up


LAYOUTS = {
    "silu": Layout(),
    "gelu": Layout("gelu"),
    "gelu_tanh": Layout("gelu_tanh"),
    "swigluoai": Layout("swigluoai", fused=True),
    "relu2": Layout("relu2_no_mul"),
    "swiglustep": Layout("swiglustep"),
    "limit": Layout(limit=0.5),
    "one group": Layout(inner=128),
    "stacked": Layout(stacked="yes"),
    "stacked and transposed": Layout(stacked="transposed"),
    "odd": Layout("swigluoai", fused=True, inner=80),
    "gpt-oss": Layout("swigluoai", fused=True, stacked="gpt-oss"),
}


def build(published: Published, how: Layout) -> Any:
    """Builds vLLM's RoutedExperts of a layer."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.fused_moe import FusedMoEFactory
    from vllm.utils.torch_utils import set_default_torch_dtype

    with set_current_vllm_config(VllmConfig()), set_default_torch_dtype(published.dtype):
        runner = FusedMoEFactory(
            num_experts=EXPERTS,
            top_k=TOPK,
            hidden_size=HIDDEN,
            intermediate_size=how.inner,
            quant_config=published.config(),
            prefix=PREFIX,
            params_dtype=published.dtype,
            activation=how.name,
            has_bias=how.fused,
            swiglu_limit=how.limit,
            is_fused_checkpoint_transposed=how.stacked == "transposed",
            ckpt_names=("gate_proj", "down_proj", "up_proj") if how.gated else ("up_proj", "down_proj", None),
        )
    return next(module for module in runner.modules() if type(module).__name__ == "RoutedExperts")


def write(path: Path, published: Published, how: Layout) -> list[dict[str, torch.Tensor]]:
    """Writes the file. Returns w13, w2 and the biases of each expert in float64."""
    draw = torch.Generator().manual_seed(1)
    stored: dict[str, torch.Tensor] = {}
    exact = []
    drawn: dict[str, list[dict[str, torch.Tensor]]] = collections.defaultdict(list)
    for expert in range(EXPERTS):
        found: dict[str, torch.Tensor] = {}
        names = ["gate_up_proj"] if how.fused else ["gate_proj", "up_proj"] if how.gated else ["up_proj"]
        parts = []
        for name in (*names, "down_proj"):
            columns, inputs = (HIDDEN, how.inner) if name == "down_proj" else (how.inner, HIDDEN)
            tensors, weight = published.draw(
                draw, columns * (2 if how.fused and name != "down_proj" else 1), inputs
            )
            if how.fused:
                bias = torch.randn(len(weight), generator=draw).to(published.dtype)
                tensors["bias"] = bias
                found["bias2" if name == "down_proj" else "bias13"] = bias.double()
            drawn[name].append(tensors)
            stored |= {f"{PREFIX}.{expert}.{name}.{end}": each.contiguous() for end, each in tensors.items()}
            parts.append(weight)
        found |= {"w13": torch.cat(parts[:-1]), "w2": parts[-1]}
        exact.append(found)
    if how.stacked == "gpt-oss":
        stored = as_gpt_oss(drawn)
    elif how.stacked != "no":
        stored = {
            f"{PREFIX}.{name}": torch.stack([each[weight] for each in exact]).to(published.dtype)
            for name, weight in (("gate_up_proj", "w13"), ("down_proj", "w2"))
        }
        if how.stacked == "transposed":
            stored = {name: each.transpose(1, 2).contiguous() for name, each in stored.items()}
    save_file(stored, path)
    return exact


def as_gpt_oss(drawn: dict[str, list[dict[str, torch.Tensor]]]) -> dict[str, torch.Tensor]:
    """Returns the tensors of all experts with gpt-oss' names. Unquantized tensors are transposed."""
    stored = {}
    for name, experts in drawn.items():
        for end in experts[0]:
            each = torch.stack([tensors[end] for tensors in experts])
            if end == "weight":
                stored[f"{PREFIX}.{name}"] = each.transpose(1, 2).contiguous()
            else:
                stored[f"{PREFIX}.{name}_{end}"] = each.unflatten(2, (-1, 16)) if end == "blocks" else each
    return stored


def load(module: Any, how: Layout, path: Path, files: MappedFiles) -> None:
    """Loads the file with the loader of vLLM's RoutedExperts, or with that of its gpt-oss."""
    tensors = list(files.add(path).tensors())
    if how.stacked != "gpt-oss":
        list(module.load_weights((name.removeprefix(f"{PREFIX}."), each) for name, each in tensors))
        return
    from vllm.model_executor.models.gpt_oss import GptOssForCausalLM, GptOssModel

    model = object.__new__(GptOssModel)  # only its loader is used, so without attention and embedding
    torch.nn.Module.__init__(model)
    layer = torch.nn.Module()
    layer.mlp, layer.mlp.experts = torch.nn.Module(), torch.nn.Module()
    layer.mlp.experts.routed_experts = module
    model.layers = torch.nn.ModuleList([layer])
    model.config = SimpleNamespace(num_local_experts=EXPERTS, intermediate_size=how.inner)
    model.parallel_config = SimpleNamespace(enable_expert_parallel=False)
    coded = any(name.endswith("_blocks") for name, _ in tensors)
    named = GptOssForCausalLM.hf_to_vllm_mapper.apply(
        (name.removeprefix("model."), each) for name, each in tensors
    )
    (model._load_weights_mxfp4 if coded else model._load_weights_other)(EXPERTS, 0, 0, 0, named, [])


def record(published: Published, how: Layout, path: Path) -> tuple[Recipe, str]:
    """Records the recipe of a rank with attention, and returns it as read from the group's store."""
    with replace_remote_parts(frozenset({0}), records=True) as remote:
        module = build(published, how)
    files = MappedFiles()
    given = config(published, path.parent)
    recipe, _ = record_load(given, files, remote, lambda: load(module, how, path, files))
    return Recipe.from_text(recipe.to_text()), recipe.layers[0].method


def config(published: Published, folder: Path) -> Any:
    """Builds the part of vLLM's configuration that a recording reads."""
    model = SimpleNamespace(
        model=str(folder),
        dtype=published.dtype,
        hf_config=SimpleNamespace(),
        hf_text_config=SimpleNamespace(),
    )
    return SimpleNamespace(model_config=model, scheduler_config=SimpleNamespace(max_num_batched_tokens=64))


def differing(reader: LayerReader, module: Any) -> list[str]:
    """Returns the parameters that differ from those that vLLM's own loader filled."""
    found = []
    for name, parameter in module.named_parameters(recurse=False):
        if name == "w2_bias" and name not in reader.recipe.parameters:
            assert not parameter.any(), "only the first rank of a stage has the biases"
            continue
        filled = reader.has(name)
        for expert in range(EXPERTS):
            got, wanted = reader.read(name, expert), parameter.data[expert]
            if got.shape != wanted.shape or got.dtype != wanted.dtype:
                found.append(f"{name}: {got.dtype} {list(got.shape)}, {wanted.dtype} {list(wanted.shape)}")
            elif (filled or "bias" in name) and not torch.equal(_bytes(got), _bytes(wanted)):
                found.append(f"{name} of expert {expert}")
    return found


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def exact_sum(
    exact: list[dict[str, torch.Tensor]],
    how: Layout,
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
) -> torch.Tensor:
    """Returns each row's weighted sum of its experts in float64."""
    none = torch.zeros(()).double()
    y = torch.zeros(x.shape, dtype=torch.float64)
    for row, choice in ((row, choice) for row in range(len(x)) for choice in range(TOPK)):
        one = exact[int(ids[row, choice])]
        inner = how.compute(one["w13"] @ x[row].double() + one.get("bias13", none))
        y[row] += weights[row, choice].double() * (one["w2"] @ inner + one.get("bias2", none))
    return y


def compute(
    reader: LayerReader, parts: list[held_experts.OwnPart], dtype: torch.dtype, drawn: list[torch.Tensor]
) -> tuple[torch.Tensor, list[str]]:
    """Returns the sum of the results of ranks with these parts, and their methods."""
    x, weights, ids = drawn
    total, methods = torch.zeros(x.shape, dtype=torch.float64), []
    for part in parts:
        held = held_experts.load_experts(reader, part, dtype)
        local = ids - part.experts.first
        local = torch.where((local >= 0) & (local < part.experts.count), local, -1).to(torch.int32)
        y = torch.full_like(x, torch.nan)
        held.compute(y, x, weights, local.contiguous())
        total += y.double()
        methods.append(held.method)
    return total, methods


def ranks(inner: int, unit: int) -> dict[str, list[held_experts.OwnPart]]:
    """Returns the parts of the ranks of each case."""
    columns, experts = Span(total=inner, first=0, end=inner), Span(total=EXPERTS, first=0, end=EXPERTS)
    found = {
        "one rank": [held_experts.OwnPart(columns=columns, experts=experts)],
        "by experts": [
            held_experts.OwnPart(columns=columns, experts=own) for own in share_experts(EXPERTS, (1, 3))
        ],
    }
    if inner % unit == 0 and inner > unit:
        shares = share_columns(inner, (3, 5), unit)
        found["by columns"] = [held_experts.OwnPart(columns=own, experts=experts) for own in shares]
    return found


def case(name: str, layout: str) -> dict[str, Any]:
    """Returns the differing parameters, and the error of the sums as a share of the largest sum."""
    published, how = FORMATS[name], LAYOUTS[layout.removesuffix(TWO_GPUS)]
    tensor = 2 if layout.endswith(TWO_GPUS) else 1
    with tempfile.TemporaryDirectory() as scratch, as_on_a_gpu():
        path = Path(scratch) / "model.safetensors"
        exact = write(path, published, how)
        readers: list[LayerReader] = []
        answer: dict[str, Any] = {"differing": [], "gaps": {}}
        for rank in range(tensor):
            with as_rank_of_stage(rank, tensor), torch.no_grad():
                recipe, answer["method"] = record(published, how, path)
                readers.append(ExpertReader(recipe, path.parent).layer(recipe.layers[0]))
                module = build(published, how)
                load(module, how, path, MappedFiles())
            answer["differing"] += differing(readers[-1], module)
        for rows in (1, 9):
            torch.manual_seed(rows)
            drawn = [
                torch.randn(rows, HIDDEN).to(published.dtype),
                torch.rand(rows, TOPK),
                torch.rand(rows, EXPERTS).topk(TOPK, -1).indices,
            ]
            wanted = exact_sum(exact, how, *drawn)
            for kind, parts in ranks(how.inner // tensor, published.unit).items():
                got = torch.zeros(wanted.shape, dtype=torch.float64)
                for reader in readers:
                    of_reader, methods = compute(reader, parts, published.dtype, drawn)
                    got += of_reader
                    answer["held"] = methods[0]
                gap = (got - wanted).abs().max() / wanted.abs().max()
                answer["gaps"][f"{kind}, {rows} rows"] = float(gap)
        return answer


def main(arguments: str) -> None:
    """Runs one case in a process that is a rank of its own. `arguments` are format, layout and library."""
    name, layout, *libraries = json.loads(arguments)
    answer_as_rank(lambda: case(name, layout), *libraries)


def answer_as_rank(answer: Callable[[], dict[str, Any]], *libraries: str) -> None:
    """Prints the result of `answer`, which runs with vLLM's process groups."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.platforms import current_platform

    for library in libraries:
        linear.prepare(Path(library))
    current_platform.import_kernels()
    with tempfile.TemporaryDirectory() as scratch, set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{scratch}/store", 0, "gloo")
        initialize_model_parallel(1)
        print(json.dumps(answer()))
        torch.distributed.destroy_process_group()
