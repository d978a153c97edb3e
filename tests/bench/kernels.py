"""Measures the GB/s of our CPU kernels' weights in each format, of the host's stream, and of vLLM's kernels.

    python -m tests.bench.kernels [--formats fp8-channel,...] [--rows 1,4,16,64] [--paths avx512_bf16,...]
        [--threads N] [--rounds 9] [--dtype bf16] [--experts]

Each line is a format on an instruction set, and each cell is the median of the rounds. A round measures the
stream (a sum over 256 MiB with the same threads) just before the kernel. The share is relative to the smaller
of the stream and the rate that the instruction's own peak allows (`instruction_peak`, measured in the same
run). The weights are many times as large as the caches.

`--experts` measures a layer of EXPERTS experts, of which each token uses CHOICES, and counts each chosen
expert once. The last lines are vLLM's kernels for bf16 and, with AVX-512, for int4 without zero points. Needs
the worker's Python.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

COLUMNS, INPUTS = 8192, 4096
AMX_ROWS = 5
EXPERTS, CHOICES, INNER = 64, 8, 1024
"""Numbers of a layer: experts, experts of a token, inputs of w2. INPUTS are the inputs of w13."""
WEIGHT_BYTES = 256 << 20
"""Bytes of all weights of a format, at least. Calls read the weights in turn."""
STREAM_BYTES = 256 << 20


CLOCK = [time.perf_counter]


def timed(call: Callable[[], object]) -> float:
    """Returns the seconds of a call."""
    start = CLOCK[0]()
    call()
    return CLOCK[0]() - start


class Bench:
    """Linear layers of one format, and their measurement."""

    def __init__(self, name: str, dtype: Any) -> None:
        import torch

        from tests.integration.kernels.coded_weights import FORMATS, draw_coded
        from vllm_heteroinfer.kernels import coded

        self._torch, self._coded, self._dtype = torch, coded, dtype
        library = coded.register()
        form = FORMATS[name]
        draw = torch.Generator().manual_seed(0)
        first = coded.pack(library, draw_coded(draw, form, COLUMNS, INPUTS))
        self.weight_bytes = first.packed.nbytes / COLUMNS / INPUTS
        count = -(-WEIGHT_BYTES // first.packed.nbytes)
        self.weights = [first]
        for _ in range(count - 1):
            copy = coded.PackedWeight(
                format=form, columns=COLUMNS, inputs=INPUTS, packed=first.packed.clone()
            )
            self.weights.append(copy)

    def rate(self, rows: int) -> tuple[float, float]:
        """Reads all weights once. Returns GB/s of packed weights, and the rows of each weight."""
        x = self._torch.randn(rows, INPUTS).to(self._dtype)
        weights = self.weights[: max(2, len(self.weights) // max(1, rows // 8))]
        seconds = timed(lambda: [self._coded.linear(x, weight) for weight in weights])
        return sum(weight.packed.nbytes for weight in weights) / seconds / 1e9, rows


class ExpertsBench:
    """Layers of experts of one format, and their measurement."""

    def __init__(self, name: str, dtype: Any) -> None:
        import torch

        from tests.integration.kernels.coded_weights import FORMATS, draw_coded
        from vllm_heteroinfer.kernels import coded
        from vllm_heteroinfer.kernels.coded_experts import Activation, CodedExperts, PackedPart

        self._torch, self._dtype = torch, dtype
        library, form, draw = coded.register(), FORMATS[name], torch.Generator().manual_seed(0)

        def part(columns: int, inputs: int) -> PackedPart:
            one = coded.pack(library, draw_coded(draw, form, columns, inputs)).packed
            return PackedPart(format=form, columns=columns, inputs=inputs, packed=one.repeat(EXPERTS, 1))

        def parts() -> tuple[PackedPart, PackedPart]:
            return part(2 * INNER, INPUTS), part(INPUTS, INNER)

        first = parts()
        self._expert_bytes = sum(each.packed.nbytes for each in first) / EXPERTS
        others = [parts() for _ in range(int(WEIGHT_BYTES // (self._expert_bytes * EXPERTS)))]
        self._layers = [
            CodedExperts(library, w13, w2, Activation(), dtype=dtype) for w13, w2 in (first, *others)
        ]
        self.weight_bytes = self._expert_bytes / (3 * INNER * INPUTS)

    def rate(self, rows: int) -> tuple[float, float]:
        """Returns GB/s of the chosen experts' packed weights, and the rows of an expert."""
        torch, count = self._torch, 0
        x = torch.randn(rows, INPUTS).to(self._dtype)
        y, weights = torch.empty_like(x), torch.full((rows, CHOICES), 1 / CHOICES)
        calls = []
        for layer in self._layers * (4 if rows == 1 else 1):
            ids = torch.rand(rows, EXPERTS).argsort(1)[:, :CHOICES].to(torch.int32).contiguous()
            count += len(ids.unique())
            calls.append((layer, ids))

        def compute() -> None:
            for layer, ids in calls:
                layer.compute(y, x, weights, ids)

        seconds = timed(compute)
        return count * self._expert_bytes / seconds / 1e9, rows * CHOICES * len(calls) / count


class VllmBench:
    """vLLM's kernel for int4 in groups of 128, bf16 only."""

    weight_bytes = 0.5 + 2 / 128

    def __init__(self) -> None:
        import torch
        import vllm._C  # noqa: F401 - registers the operations
        from vllm import _custom_ops as ops

        self._torch, self._ops = torch, ops
        words = torch.randint(-(2**31), 2**31, (COLUMNS // 16, INPUTS * 2), dtype=torch.int64)
        scales = torch.rand(INPUTS // 128, COLUMNS).to(torch.bfloat16)
        count = int(WEIGHT_BYTES // (COLUMNS * INPUTS * self.weight_bytes)) + 1
        self._weights = [(words.to(torch.int32), scales.clone()) for _ in range(count)]
        self._isa = "amx" if torch.cpu._is_amx_tile_supported() else "vec"

    def rate(self, rows: int) -> tuple[float, float]:
        """Reads all weights once. Returns GB/s of weights, and the rows of each weight."""
        x = self._torch.randn(rows, INPUTS).to(self._torch.bfloat16)
        product = self._ops.cpu_gemm_wna16
        seconds = timed(
            lambda: [product(x, words, scales, None, None, 8, self._isa) for words, scales in self._weights]
        )
        return len(self._weights) * COLUMNS * INPUTS * self.weight_bytes / seconds / 1e9, rows


class VllmFloatBench:
    """vLLM's kernel for bf16: oneDNN's product, or torch's if oneDNN has none for this CPU."""

    weight_bytes = 2.0

    def __init__(self) -> None:
        import torch
        from vllm.platforms import current_platform

        current_platform.import_kernels()  # registers the operations for this CPU
        self._torch = torch
        count = int(WEIGHT_BYTES // (COLUMNS * INPUTS * self.weight_bytes)) + 1
        dense = torch.randn(COLUMNS, INPUTS).to(torch.bfloat16)
        self._products = [self._product(dense.clone()) for _ in range(count)]

    def _product(self, weight: Any) -> Callable[[Any], Any]:
        """Returns a function for a product with oneDNN, or with torch if oneDNN has none for this CPU."""
        torch, ops = self._torch, self._torch.ops._C
        try:
            handler = torch.tensor(ops.create_onednn_mm_handler(weight.t(), 32), dtype=torch.int64)
        except RuntimeError:
            return lambda x: torch.nn.functional.linear(x, weight)

        def product(x: Any) -> Any:
            out = torch.empty(len(x), COLUMNS, dtype=x.dtype)
            ops.onednn_mm(out, x, None, handler)
            return out

        return product

    def rate(self, rows: int) -> tuple[float, float]:
        """Reads all weights once. Returns GB/s of weights, and the rows of each weight."""
        x = self._torch.randn(rows, INPUTS).to(self._torch.bfloat16)
        seconds = timed(lambda: [product(x) for product in self._products])
        return len(self._products) * COLUMNS * INPUTS * self.weight_bytes / seconds / 1e9, rows


def stream(words: Any) -> float:
    """Returns GB/s of a sum over memory."""
    return float(words.nbytes / timed(words.sum) / 1e9)


def line(bench: Any, label: str, words: Any, rows: Sequence[int], rounds: int, peaks: Any) -> str:
    """Returns a line of the table: by rows, GB/s, and the share of the bounding rate.

    Args:
        peaks: returns the operations a second of the instruction set that multiplies this number of rows.
    """
    cells = []
    for count in rows:
        bench.rate(count)
        rates, shares = [], []
        for _ in range(rounds if count < 16 else max(3, rounds // 3)):
            memory = stream(words)
            rate, each = bench.rate(count)
            most = peaks(each) / 1e9 * bench.weight_bytes / (2 * each)
            rates.append(rate)
            shares.append(rate / min(memory, most))
        cells.append(f"{statistics.median(rates):7.1f} {statistics.median(shares):5.0%}")
    return f"{label:28} " + "  ".join(cells)


def instruction(paths: Sequence[str], path: str, name: str, dtype: str, rows: float) -> str:
    """Returns the instruction set that multiplies `rows` rows, as source/linear.cpp chooses it."""
    allowed = [path] if path else list(paths)
    narrow = dtype == "bf16" and name != "float16"
    if narrow and "amx_bf16" in allowed and rows >= AMX_ROWS:
        return "amx_bf16"
    if narrow and {"avx512_bf16", "amx_bf16"} & set(allowed):
        return "avx512_bf16"
    return "avx2" if path == "avx2" or "avx512f" not in paths else "avx512f"


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--formats", default="")
    parser.add_argument("--rows", default="1,4,16,64")
    parser.add_argument("--paths", default="")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument(
        "--busy", action="store_true", help="measure the CPU time of one thread, for a busy machine"
    )
    parser.add_argument(
        "--experts", action="store_true", help="measure a layer of experts, by number of tokens"
    )
    options = parser.parse_args(argv)
    import torch

    from tests.bench.instruction_peak import peak
    from tests.integration.kernels.coded_weights import FORMATS
    from vllm_heteroinfer.kernels import coded
    from vllm_heteroinfer.kernels.library import CODED_PATHS

    if options.busy:
        options.threads, CLOCK[0] = 1, time.process_time
    if options.threads:
        torch.set_num_threads(options.threads)
    library = coded.register()
    dtype = {"bf16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}[options.dtype]
    rows = [int(each) for each in options.rows.split(",")]
    words = torch.ones(STREAM_BYTES // 8, dtype=torch.int64)
    best = max(stream(words) for _ in range(5))
    print(
        f"{torch.get_num_threads()} threads, {', '.join(library.coded_paths)}, stream {best:.1f} GB/s at best"
    )
    peaks = {path: peak(path, torch.get_num_threads(), CLOCK[0]) for path in library.coded_paths}
    print("peaks: " + ", ".join(f"{path} {each / 1e9:.0f} GFLOP/s" for path, each in peaks.items()))
    print(f"{'rows':28} " + "  ".join(f"{count:7} {'share':>5}" for count in rows))
    paths = options.paths.split(",") if options.paths else [""]
    for name in options.formats.replace("-", " ").split(",") if options.formats else FORMATS:
        bench = (ExpertsBench if options.experts else Bench)(name, dtype)
        for path in paths:
            index = CODED_PATHS.index(path) if path else -1
            if not library.calls.heteroinfer_tune(index, -1, -1):
                continue

            def by_rows(each: float, name: str = name, path: str = path) -> float:
                return peaks[instruction(library.coded_paths, path, name, options.dtype, each)]

            print(line(bench, f"{name} {path}", words, rows, options.rounds, by_rows), flush=True)
        library.calls.heteroinfer_tune(-1, -1, -1)
    if options.experts or options.dtype != "bf16":
        return

    def of_vllm(_: float) -> float:
        return max(peaks.values())

    print(line(VllmFloatBench(), "bf16 of vLLM", words, rows, options.rounds, of_vllm), flush=True)
    if "avx512f" in library.coded_paths:
        print(line(VllmBench(), "int4 128 of vLLM", words, rows, options.rounds, of_vllm), flush=True)


if __name__ == "__main__":
    main()
