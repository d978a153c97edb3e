"""Measures the speed at which vLLM's kernels and HeteroInfer's own kernels read weights.

Run as `python -m vllm_heteroinfer.calibration.kernel_reading ...`. For each format, builds and packs layers
with random weights, as vLLM does for a model. Calls experts as a feed-forward rank does. Imports vLLM.
"""

import json
import math
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

from heteroinfer_contract import names
from heteroinfer_contract.calibration import MORE_ROWS, KernelPart
from heteroinfer_contract.column_shares import Span
from heteroinfer_contract.model import SchemeName
from vllm_heteroinfer.calibration.formats import FORMATS, SIZE, WeightFormat
from vllm_heteroinfer.calibration.process_output import report, report_begun, report_skipped, rounded
from vllm_heteroinfer.feed_forward.expert_reader import LayerReader
from vllm_heteroinfer.feed_forward.file_tensors import MappedFiles
from vllm_heteroinfer.feed_forward.held_experts import Experts, OwnPart, load_experts
from vllm_heteroinfer.kernels import linear
from vllm_heteroinfer.kernels.host_caches import bytes_beyond_caches
from vllm_heteroinfer.kernels.rounds import median_s

BF16: Final = "bfloat16"
HIDDEN, WIDTH, EXPERTS, TOP_K = 2048, 768, 16, 8
"""Sizes of Qwen3-30B-A3B's layers, but with 16 of 128 experts, because packing takes long in some formats."""
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
_LINEAR_PREFIX = "model.layers.0.mlp.up_proj"
"""Name of the measured linear layer, as in a model."""
_MANY_ROWS, _MANY_CALLS = 512, 2
"""A product of at least _MANY_ROWS rows spends more time on computing than on reading, so _MANY_CALLS calls
are enough to measure its time."""
_MAX_ROWS: Final = {KernelPart.LINEAR: 2048, KernelPart.EXPERTS: 512}
"""Maximum number of rows of a product. A prompt's chunk has 2,048 rows; each expert computes only some."""
_MORE_ROWS_TIME_S: Final = 0.2
"""Time in which rounds may begin, for each number of rows above 1."""
_LONGEST_CALL_S: Final = 0.5
"""Longest call to measure. No larger number of rows is measured if its call would probably take longer, in
proportion to the previous call."""
Call = Callable[[], Any]


class Input:
    """Holds the input `x` of a linear kernel's calls, so that all calls can get another `x`."""

    x: torch.Tensor


class ExpertsInput:
    """Input of the calls of a kernel for experts, as in the slab of a feed-forward rank.

    With one row, each call uses other experts than the call before, until all experts were used. With more
    rows, tokens choose experts at random, so that the number of rows differs between experts, as in a model.
    This matters, because kernels process 32 rows at a time, and then the remaining rows.
    """

    turns: Final = EXPERTS // TOP_K
    """Number of calls with one row that together use each expert once: a call uses TOP_K experts."""

    def __init__(self) -> None:
        self._chosen = torch.arange(EXPERTS, dtype=torch.int32).view(self.turns, TOP_K)
        self.turn = 0

    def prepare(self, rows: int) -> None:
        """Makes inputs with which each expert computes `rows` rows on average.

        With one row, each call has one token, which uses only the experts of the current `turn`.
        """
        self._one_row = rows == 1
        tokens = 1 if self._one_row else rows * self.turns
        self._x = torch.randn((tokens, HIDDEN), dtype=torch.bfloat16)
        self._y = torch.empty_like(self._x)
        self._ids = self._chosen if self._one_row else _choose_experts(tokens)
        self._weights = torch.full((tokens, TOP_K), 1 / TOP_K, dtype=torch.float32)

    @property
    def tokens(self) -> int:
        """Number of tokens of a call."""
        return len(self._x)

    def arguments(self) -> tuple[torch.Tensor, ...]:
        """Returns x, ids, weights and y of a call."""
        ids = self._ids[self.turn : self.turn + 1] if self._one_row else self._ids
        return self._x, ids, self._weights, self._y


def _choose_experts(tokens: int) -> torch.Tensor:
    """Returns TOP_K random experts for each token."""
    return torch.rand((tokens, EXPERTS)).topk(TOP_K).indices.to(torch.int32)


def main(argv: list[str]) -> None:
    """Reports a rate for each kernel. Kernels that most models use come first.

    Args:
        argv: number of threads; optionally the seconds in which measurements may begin; then the names of
            measurements to leave out, because an earlier process has begun them.
    """
    os.environ |= {names.ENV_VISIBLE_GPUS: names.HIDE_GPUS, names.ENV_TARGET_DEVICE: "cpu"}
    threads = int(argv[0])
    time_left_s = float(argv[1]) if len(argv) > 1 else inf
    begun_before = argv[2:]
    attempts = _Attempts(deadline=time.monotonic() + time_left_s, skipped=begun_before)
    torch.set_num_threads(threads)
    our_linear = "our linear kernel"
    # An earlier process began the measurements in `begun_before`, in this order, and crashed in the last of
    # these. So if another measurement follows the measurement of our kernel, the latter did not crash, and
    # counts as a success.
    was_measured_before = our_linear in begun_before[:-1]
    has_our_linear = attempts.attempt(our_linear, lambda: measure_our_linear(threads)) or was_measured_before
    report_begun("vLLM's kernels")  # this name is reported if vLLM crashes before the first kernel
    bench = KernelBench(threads)
    attempts.attempt(
        "linear in float32", partial(bench.measure, KernelPart.LINEAR, SchemeName.NONE, "float32")
    )
    for part, scheme in _kernels_in_order():
        if has_our_linear and (part, scheme) == (KernelPart.LINEAR, SchemeName.NONE):
            continue  # ranks use our kernel for these layers, and never vLLM's kernel
        what = f"{part} in {'bf16' if scheme is SchemeName.NONE else scheme}"
        attempts.attempt(what, partial(bench.measure, part, scheme))
    bench.close()


def _kernels_in_order() -> list[tuple[KernelPart, SchemeName]]:
    """Lists the kernels to measure, in the order of the formats."""
    return [(part, scheme) for scheme in FORMATS for part in (KernelPart.LINEAR, KernelPart.EXPERTS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attempts:
    """Runs measurements, except measurements after the deadline or from an earlier process.

    Attributes:
        deadline: time (time.monotonic()) after which no measurement begins.
        skipped: names of measurements that an earlier process has begun.
    """

    deadline: float
    skipped: Collection[str]

    def attempt(self, what: str, measure: Callable[[], None]) -> bool:
        """Runs a measurement if there is time and it is not skipped. Returns whether it succeeded."""
        if what in self.skipped:
            return False
        if time.monotonic() > self.deadline:
            report_skipped(what, TimeoutError("no time left"))
            return False
        report_begun(what)
        try:
            with torch.inference_mode():
                measure()
        # A format that this CPU or vLLM does not support may raise any error. The format is reported as
        # skipped.
        except Exception as error:
            report_skipped(what, error)
            return False
        return True


def measure_our_linear(threads: int) -> None:
    """Reports the rates of our linear kernel.

    Raises:
        KernelsUnavailableError: this machine cannot use the kernel.
    """
    library, size = linear.prepare(), SIZE
    dense = torch.randn((size, size)).to(torch.bfloat16)
    num_copies = -(-bytes_beyond_caches() // dense.nbytes)  # so that no cache holds all weights
    packed = [linear.pack(dense) for _ in range(num_copies)]
    shared_input = Input()

    def call(weight: torch.Tensor) -> Call:
        """Returns a call of our kernel with a packed weight."""
        return lambda: linear.linear(shared_input.x, weight, None, size)

    def prepare(rows: int) -> None:
        """Sets the input of all calls to `rows` random rows."""
        shared_input.x = torch.randn((rows, size)).to(torch.bfloat16)

    rates = _measure_rates(KernelPart.LINEAR, [call(each) for each in packed], dense.nbytes, prepare)
    _report_rates(
        KernelPart.LINEAR, SchemeName.NONE, BF16, f"heteroinfer {library.kernel(1)}", threads, rates
    )


def _measure_rates(
    part: KernelPart,
    calls: Sequence[Call],
    num_bytes: int,
    prepare: Callable[[int], None],
    many_bytes: int | None = None,
) -> list[float]:
    """Returns the bytes per second for one row, and for each number of MORE_ROWS.

    Stops before the first number of rows for which a call would take longer than _LONGEST_CALL_S.

    Args:
        calls: calls of one kernel, each with its own weights.
        num_bytes: bytes of weights that a call with one row reads.
        prepare: sets the number of rows of the calls.
        many_bytes: bytes of weights that a call with more rows reads; None if the same as `num_bytes`.
    """
    rates: list[float] = []
    call_s, rows_before = 0.0, 1
    for rows in (1, *MORE_ROWS):
        predicted_call_s = call_s * rows / rows_before
        if rows > _MAX_ROWS[part] or predicted_call_s > _LONGEST_CALL_S:
            break
        prepare(rows)
        # With few rows, all calls must run, because only all weights together exceed the caches.
        measured_calls = calls[:_MANY_CALLS] if rows >= _MANY_ROWS else calls
        if rows == 1:
            round_s, read_bytes = median_s(measured_calls), num_bytes
        else:
            round_s = median_s(measured_calls, max_s=_MORE_ROWS_TIME_S)
            read_bytes = many_bytes or num_bytes
        call_s = round_s / len(measured_calls)
        rates.append(read_bytes / call_s)
        rows_before = rows
    return rates


def _report_rates(
    part: KernelPart, scheme: SchemeName, dtype: str, kernel: str, threads: int, rates: Sequence[float]
) -> None:
    """Reports the measured rates of a kernel: for one row first, then for MORE_ROWS."""
    first, *more = map(rounded, rates)
    report(
        "kernels", part=part, scheme=scheme, dtype=dtype, kernel=kernel, threads=threads, bytes_per_s=first,
        more_rows=more,
    )  # fmt: skip


class KernelBench:
    """Measures vLLM's kernels in a process that is set up like a CPU rank."""

    def __init__(self, threads: int) -> None:
        """Sets vLLM up for one CPU rank, with the configuration of a small model and without its weights."""
        from vllm.config import ModelConfig, VllmConfig, set_current_vllm_config
        from vllm.distributed import init_distributed_environment, initialize_model_parallel

        from vllm_heteroinfer.patches import cpu_coded

        self._threads = threads
        self._folder = tempfile.TemporaryDirectory(prefix="heteroinfer-")
        (Path(self._folder.name) / "config.json").write_text(json.dumps(_MODEL))
        model = ModelConfig(model=self._folder.name, skip_tokenizer_init=True, dtype=BF16, max_model_len=2048)
        self._config = VllmConfig(model_config=model)
        torch.distributed.init_process_group(
            "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
        )
        with set_current_vllm_config(self._config):
            # One process with rank 0. vLLM does not use the address, because torch's process group exists.
            init_distributed_environment(1, 0, "unused://", 0, "gloo")
            initialize_model_parallel(1, 1)
        cpu_coded.install()  # as a CPU rank does
        if torch.cpu._is_amx_tile_supported():
            torch.cpu._init_amx()  # without this call, vLLM's kernels for AMX end with SIGILL

    def close(self) -> None:
        """Removes the temporary model folder."""
        self._folder.cleanup()

    def measure(self, part: KernelPart, scheme: SchemeName, dtype: str = BF16) -> None:
        """Reports the rate of one kernel. Raises vLLM's error if vLLM has no such kernel."""
        from vllm.config import set_current_vllm_config
        from vllm.utils.torch_utils import set_default_torch_dtype

        weight_format = FORMATS[scheme]
        with set_current_vllm_config(self._config), set_default_torch_dtype(getattr(torch, dtype)):
            if part is KernelPart.LINEAR:
                rates, kernel = self._measure_linear(weight_format, getattr(torch, dtype))
            else:
                rates, kernel = self._measure_experts(weight_format)
        _report_rates(part, scheme, dtype, kernel, self._threads, rates)

    def _measure_linear(self, weight_format: WeightFormat, dtype: torch.dtype) -> tuple[list[float], str]:
        """Returns the rates of vLLM's linear layer in a format, and the name of its kernel."""
        from vllm.model_executor.layers.linear import ReplicatedLinear

        def build() -> Any:
            """Returns vLLM's linear layer in this format."""
            return ReplicatedLinear(
                SIZE,
                SIZE,
                bias=False,
                quant_config=_quantization_config(weight_format),
                prefix=_LINEAR_PREFIX,
                params_dtype=dtype,
            )

        layer = build()
        num_bytes, shared_input = _fill_with_values(layer), Input()
        layer.quant_method.process_weights_after_loading(layer)
        num_copies = -(-bytes_beyond_caches() // num_bytes)  # so that no cache holds all weights
        if weight_format.copy:
            calls = _calls_with_copies(layer, num_copies, lambda: layer(shared_input.x))
        else:
            calls = [
                lambda: layer(shared_input.x),
                *(_packed_layer_call(build(), shared_input) for _ in range(num_copies - 1)),
            ]

        def prepare(rows: int) -> None:
            """Sets the input of all calls to `rows` random rows."""
            shared_input.x = torch.randn((rows, SIZE), dtype=dtype)

        return _measure_rates(KernelPart.LINEAR, calls, num_bytes, prepare), _kernel_name(layer)

    def _measure_experts(self, weight_format: WeightFormat) -> tuple[list[float], str]:
        """Returns the rates of a feed-forward rank's experts in a format, and the name of their kernel."""
        layer, shared_input = weight_format.layer(EXPERTS, TOP_K, HIDDEN, WIDTH), ExpertsInput()
        all_bytes = sum(
            math.prod(parameter.shape) * getattr(torch, parameter.dtype).itemsize
            for parameter in layer.parameters.values()
        )
        all_experts = OwnPart(
            columns=Span(total=WIDTH, first=0, end=WIDTH), experts=Span(total=EXPERTS, first=0, end=EXPERTS)
        )

        def call(experts: Experts, turn: int) -> None:
            """Computes the experts for the shared input. With one row, uses only the experts of this turn."""
            shared_input.turn = turn
            x, ids, weights, y = shared_input.arguments()
            experts.compute(y, x, weights, ids)

        num_copies = -(-bytes_beyond_caches() // all_bytes)  # so that no cache holds all weights
        copies = [
            load_experts(LayerReader(MappedFiles(), layer, dummy=True), all_experts, torch.bfloat16)
            for _ in range(num_copies)
        ]
        calls = [partial(call, experts, turn) for experts in copies for turn in range(shared_input.turns)]
        num_bytes = all_bytes // shared_input.turns
        return _measure_rates(
            KernelPart.EXPERTS, calls, num_bytes, shared_input.prepare, many_bytes=all_bytes
        ), copies[0].method


def _packed_layer_call(layer: Any, shared_input: Input) -> Call:
    """Fills a layer with typical values, and packs it. Returns a call of the layer."""
    _fill_with_values(layer)
    layer.quant_method.process_weights_after_loading(layer)
    return lambda: layer(shared_input.x)


def _calls_with_copies(layer: Any, count: int, call: Call) -> list[Call]:
    """Returns calls that read separate copies of a packed layer's weights, so that no cache serves them.

    Args:
        count: number of copies, including the layer's own weights.
        call: computes the layer with its current weights.
    """
    parameters = [parameter for parameter in layer.parameters() if parameter.numel()]
    own_weights = [parameter.data for parameter in parameters]
    copies = [own_weights, *([weight.clone() for weight in own_weights] for _ in range(count - 1))]

    def call_with(copy: Sequence[torch.Tensor]) -> Any:
        """Makes the layer's parameters use one copy of the weights, and computes the layer."""
        for parameter, tensor in zip(parameters, copy, strict=True):
            parameter.data = tensor
        return call()

    return [partial(call_with, copy) for copy in copies]


def _quantization_config(weight_format: WeightFormat) -> Any:
    """Returns vLLM's configuration of a weight format; None for unquantized weights."""
    if not weight_format.method:
        return None
    from vllm.model_executor.layers.quantization import get_quantization_config

    try:
        config_class = get_quantization_config(weight_format.method)
    except ValueError:
        # vLLM 0.32 names AWQ and GPTQ "auto_awq" and "auto_gptq".
        config_class = get_quantization_config(f"auto_{weight_format.method}")
    config = config_class.from_config({**weight_format.config, "quant_method": weight_format.method})
    config.packed_modules_mapping = {}  # vLLM's model loader sets this attribute, too
    return config


def _fill_with_values(layer: Any) -> int:
    """Fills a layer with typical values. Returns the bytes of its weights before packing."""
    total = 0
    for parameter in layer.parameters():
        total += parameter.nbytes
        if parameter.is_floating_point():
            # One block of random numbers is repeated, because drawing many random numbers takes long.
            block = torch.rand(min(parameter.numel(), 1 << 20), dtype=torch.float32) * 0.01 + 0.01
            repeats = -(-parameter.numel() // block.numel())
            parameter.data.copy_(block.repeat(repeats)[: parameter.numel()].view(parameter.shape))
        else:
            parameter.data.zero_()
    return total


def _kernel_name(layer: Any) -> str:
    """Returns the class name of a linear layer's kernel, or of its method if the layer has no kernel."""
    method = layer.quant_method
    return type(getattr(getattr(layer, "scheme", None), "kernel", method)).__name__


if __name__ == "__main__":
    main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # all results are reported: do not wait for threads of vLLM or torch
