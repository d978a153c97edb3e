"""How fast vLLM's and our CPU kernels read weights: `python -m vllm_heteroinfer.calibration.kernels ...`.

Layers are built and packed as vLLM builds them for a model in each format, with random weights. Imports vLLM.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, Final

import torch

from heteroinfer_contract.calibration import MORE_ROWS, KernelPart
from heteroinfer_contract.model import SchemeName
from vllm_heteroinfer.calibration.formats import FORMATS, WeightFormat
from vllm_heteroinfer.calibration.hardware import round_bytes
from vllm_heteroinfer.calibration.timing import median_s, report, report_begun, report_skipped, rounded
from vllm_heteroinfer.kernels import linear
from vllm_heteroinfer.launch.environment import CUDA_VISIBLE_DEVICES, HIDE_GPUS

BF16: Final = "bfloat16"
HIDDEN, WIDTH, EXPERTS, TOP_K = 2048, 768, 16, 8
"""Of Qwen3-30B-A3B's layers, with 16 of its 128 experts, since some formats are packed slowly."""
_MODEL: Final = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": HIDDEN,
    "intermediate_size": WIDTH,
    "moe_intermediate_size": WIDTH,
    "num_hidden_layers": 1,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "vocab_size": 1024,
    "max_position_embeddings": 4096,
    "torch_dtype": BF16,
}
_LINEAR_PREFIX, _EXPERTS_PREFIX = "model.layers.0.mlp.up_proj", "model.layers.0.mlp.experts"
_MANY_ROWS, _MANY_CALLS = 512, 4
"""From so many rows on a product computes longer than it reads, and so few of them tell its time."""
_MORE_S: Final = 0.25
"""After which no further round of more than one row begins."""
Call = Callable[[], Any]


class Input:
    """What the calls of one kernel compute with; each number of rows is one.

    Attributes:
        x: of the next call.
    """

    x: torch.Tensor


def main(argv: list[str]) -> None:
    """Reports a rate for each kernel, those that matter to most models first.

    Args:
        argv: number of threads; seconds in which to begin, if given; then names of what not to measure, since
            it ended another process.
    """
    os.environ |= {CUDA_VISIBLE_DEVICES: HIDE_GPUS, "VLLM_TARGET_DEVICE": "cpu"}
    threads = int(argv[0])
    turn = _Turn(deadline=time.monotonic() + float(argv[1] if argv[1:] else inf), left_out=argv[2:])
    torch.set_num_threads(threads)
    ours = "our linear kernel"
    # Where it was begun before, it was not what ended that process: the last one begun was.
    has_ours = turn.attempt(ours, lambda: measure_ours(threads)) or ours in argv[2:-1]
    report_begun("vLLM's kernels")
    bench = KernelBench(threads)
    turn.attempt("linear in float32", partial(bench.measure, KernelPart.LINEAR, SchemeName.NONE, "float32"))
    for part, scheme in _order():
        if has_ours and (part, scheme) == (KernelPart.LINEAR, SchemeName.NONE):
            continue  # no layer of a group goes to vLLM's own then
        what = f"{part} in {'bf16' if scheme is SchemeName.NONE else scheme}"
        turn.attempt(what, partial(bench.measure, part, scheme))
    bench.close()


def _order() -> list[tuple[KernelPart, SchemeName]]:
    """Returns what is measured, in the order of the formats."""
    return [
        (part, scheme)
        for scheme, each in FORMATS.items()
        for part, has in ((KernelPart.LINEAR, each.linear), (KernelPart.EXPERTS, each.experts))
        if has
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Turn:
    """What may still be measured.

    Attributes:
        deadline: by time.monotonic(), when no further one begins.
        left_out: what another process has begun.
    """

    deadline: float
    left_out: Collection[str]

    def attempt(self, what: str, measure: Callable[[], None]) -> bool:
        """Returns whether it was measured."""
        if what in self.left_out:
            return False
        if time.monotonic() > self.deadline:
            report_skipped(what, TimeoutError("no time left"))
            return False
        report_begun(what)
        try:
            with torch.inference_mode():
                measure()
        # A format that this CPU or this vLLM cannot run is a result, whatever it raises.
        except Exception as error:
            report_skipped(what, error)
            return False
        return True


def measure_ours(threads: int) -> None:
    """Reports the rate of our own linear kernel; raises KernelsUnavailableError where there is none."""
    library, size = linear.prepare(), WeightFormat().size
    dense = torch.randn((size, size)).to(torch.bfloat16)
    packed = [linear.pack(dense) for _ in range(-(-round_bytes() // dense.nbytes))]
    given = Input()

    def call(weight: torch.Tensor) -> Call:
        return lambda: linear.linear(given.x, weight, None, size)

    def prepare(rows: int) -> None:
        given.x = torch.randn((rows, size)).to(torch.bfloat16)

    rates = _rates([call(each) for each in packed], dense.nbytes, prepare)
    _report(KernelPart.LINEAR, SchemeName.NONE, BF16, f"heteroinfer {library.kernel(1)}", threads, rates)


def _rates(
    calls: Sequence[Call], num_bytes: int, prepare: Callable[[int], None], many_bytes: int | None = None
) -> list[float]:
    """Returns bytes a second for one row, and for each of MORE_ROWS.

    Args:
        calls: of a kernel, each with weights of its own.
        num_bytes: that a call reads for one row.
        prepare: makes the calls compute with so many rows.
        many_bytes: that a call reads for many rows, where it is more.
    """
    rates = []
    for rows in (1, *MORE_ROWS):
        prepare(rows)
        some = calls[:_MANY_CALLS] if rows >= _MANY_ROWS else calls
        seconds = median_s(some, **({} if rows == 1 else {"most_s": _MORE_S}))
        rates.append((num_bytes if rows == 1 else many_bytes or num_bytes) * len(some) / seconds)
    return rates


def _report(
    part: KernelPart, scheme: SchemeName, dtype: str, kernel: str, threads: int, rates: Sequence[float]
) -> None:
    first, *more = map(rounded, rates)
    report(
        "kernels", part=part, scheme=scheme, dtype=dtype, kernel=kernel, threads=threads, bytes_per_s=first,
        more_rows=more,
    )  # fmt: skip


class KernelBench:
    """vLLM, set up for one rank that computes on CPUs."""

    def __init__(self, threads: int) -> None:
        from vllm.config import ModelConfig, VllmConfig, set_current_vllm_config
        from vllm.distributed import init_distributed_environment, initialize_model_parallel

        from vllm_heteroinfer.patches import cpu_experts

        self._threads = threads
        self._folder = tempfile.TemporaryDirectory(prefix="heteroinfer-")
        (Path(self._folder.name) / "config.json").write_text(json.dumps(_MODEL))
        model = ModelConfig(model=self._folder.name, skip_tokenizer_init=True, dtype=BF16, max_model_len=2048)
        self._config = VllmConfig(model_config=model)
        torch.distributed.init_process_group(
            "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
        )
        with set_current_vllm_config(self._config):
            init_distributed_environment(1, 0, "unused://", 0, "gloo")
            initialize_model_parallel(1, 1)
        cpu_experts.install()  # as in a rank
        if torch.cpu._is_amx_tile_supported():
            torch.cpu._init_amx()  # without it vLLM's expert kernels end with SIGILL

    def close(self) -> None:
        """Removes what was written."""
        self._folder.cleanup()

    def measure(self, part: KernelPart, scheme: SchemeName, dtype: str = BF16) -> None:
        """Reports the rate of one kernel; raises whatever vLLM raises where it has none."""
        from vllm.config import set_current_vllm_config
        from vllm.utils.torch_utils import set_default_torch_dtype

        each = FORMATS[scheme]
        with set_current_vllm_config(self._config), set_default_torch_dtype(getattr(torch, dtype)):
            if part is KernelPart.LINEAR:
                rates, kernel = self._linear(each, getattr(torch, dtype))
            else:
                rates, kernel = self._experts(each)
        _report(part, scheme, dtype, kernel, self._threads, rates)

    def _linear(self, each: WeightFormat, dtype: torch.dtype) -> tuple[list[float], str]:
        from vllm.model_executor.layers.linear import ReplicatedLinear

        def build() -> Any:
            return ReplicatedLinear(
                each.size,
                each.size,
                bias=False,
                quant_config=_quantization(each),
                prefix=_LINEAR_PREFIX,
                params_dtype=dtype,
            )

        layer = build()
        num_bytes, given = _fill(layer), Input()
        layer.quant_method.process_weights_after_loading(layer)
        count = -(-round_bytes() // num_bytes) if each.size == WeightFormat().size else 1
        if each.copy:
            calls = _copies(layer, count, [lambda: layer(given.x)])
        else:
            calls = [lambda: layer(given.x), *(_built(build(), given) for _ in range(count - 1))]

        def prepare(rows: int) -> None:
            given.x = torch.randn((rows, each.size), dtype=dtype)

        return _rates(calls, num_bytes, prepare), _kernel(layer)

    def _experts(self, each: WeightFormat) -> tuple[list[float], str]:
        from vllm.model_executor.layers.fused_moe import FusedMoEFactory

        self._config.compilation_config.static_forward_context.clear()
        runner = FusedMoEFactory(
            num_experts=EXPERTS,
            top_k=TOP_K,
            hidden_size=HIDDEN,
            intermediate_size=WIDTH,
            quant_config=_quantization(each),
            prefix=_EXPERTS_PREFIX,
            params_dtype=torch.bfloat16,
            renormalize=True,
        )
        part = next(module for module in runner.modules() if type(module).__name__ == "RoutedExperts")
        whole, given = _fill(part), Input()
        num_bytes = whole * TOP_K // EXPERTS
        part.quant_method.process_weights_after_loading(part)
        chosen = [
            torch.arange(first, first + TOP_K, dtype=torch.int32).view(1, TOP_K)
            for first in range(0, EXPERTS, TOP_K)
        ]

        def apply(turn: int) -> Any:
            # One row takes another half of the experts each time; more rows take all of them, in turns.
            rows = given.x.shape[0]
            ids = chosen[turn] if rows == 1 else torch.cat(chosen).repeat(rows // len(chosen), 1)
            # Some kernels overwrite their input.
            return part.quant_method.apply(
                layer=part,
                x=given.x.clone(),
                topk_weights=torch.full((rows, TOP_K), 1 / TOP_K, dtype=torch.float32),
                topk_ids=ids,
                shared_experts=None,
                shared_experts_input=None,
            )

        def prepare(rows: int) -> None:
            tokens = 1 if rows == 1 else rows * EXPERTS // TOP_K
            given.x = torch.randn((tokens, HIDDEN), dtype=torch.bfloat16)

        rounds = -(-round_bytes() // (num_bytes * len(chosen)))
        calls = _copies(part, rounds, [partial(apply, turn) for turn in range(len(chosen))])
        return _rates(calls, num_bytes, prepare, many_bytes=whole), _kernel(part)


def _built(layer: Any, given: Input) -> Call:
    _fill(layer)
    layer.quant_method.process_weights_after_loading(layer)
    return lambda: layer(given.x)


def _copies(layer: Any, count: int, calls: Sequence[Call]) -> list[Call]:
    """Returns these calls once for each of so many copies of a packed layer's weights."""
    parameters = [parameter for parameter in layer.parameters() if parameter.numel()]
    own = [parameter.data for parameter in parameters]

    def with_weights(copy: Sequence[torch.Tensor], call: Call) -> Call:
        def run() -> Any:
            for parameter, tensor in zip(parameters, copy, strict=True):
                parameter.data = tensor
            return call()

        return run

    copies = [own, *([each.clone() for each in own] for _ in range(count - 1))]
    return [with_weights(copy, call) for copy in copies for call in calls]


def _quantization(each: WeightFormat) -> Any:
    if not each.method:
        return None
    from vllm.model_executor.layers.quantization import get_quantization_config

    try:
        kind = get_quantization_config(each.method)
    except ValueError:
        kind = get_quantization_config(f"auto_{each.method}")  # AWQ and GPTQ as vLLM 0.32 names them
    found = kind.from_config({**each.config, "quant_method": each.method})
    found.packed_modules_mapping = {}
    return found


def _fill(layer: Any) -> int:
    """Gives a layer numbers of a usual size; returns its bytes as loaded."""
    total = 0
    for parameter in layer.parameters():
        total += parameter.nbytes
        if parameter.is_floating_point():
            block = torch.rand(min(parameter.numel(), 1 << 20), dtype=torch.float32) * 0.01 + 0.01
            repeats = -(-parameter.numel() // block.numel())
            parameter.data.copy_(block.repeat(repeats)[: parameter.numel()].view(parameter.shape))
        else:
            parameter.data.zero_()
    return total


def _kernel(layer: Any) -> str:
    """Returns the name of what computes it: ours, or what vLLM chose."""
    from vllm_heteroinfer.patches.cpu_experts import library_of

    method = layer.quant_method
    moe = getattr(method, "moe_kernel", None)
    if (ours := library_of(layer)) is not None:
        return f"heteroinfer {ours.kernel(1)}"
    chosen = (
        moe.fused_experts if moe is not None else getattr(getattr(layer, "scheme", None), "kernel", method)
    )
    return type(chosen).__name__


if __name__ == "__main__":
    main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # no thread of vLLM or torch keeps this process: all is reported
