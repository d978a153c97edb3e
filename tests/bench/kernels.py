"""GB/s of weights that our CPU kernels read in each format, beside the host's stream, and vLLM's kernels.

    python -m tests.bench.kernels [--formats fp8-channel,...] [--rows 1,4,16,64]
        [--paths avx512_bf16,...] [--threads N] [--rounds 9] [--dtype bf16]

Each line is a format on an instruction set, and each cell is the median of the rounds. A round measures the
stream (a sum over 256 MiB by the same threads) just before the kernel; the share is the median of their
quotients. The weights are many times as large as the caches. Needs the worker's Python.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

COLUMNS, INPUTS = 8192, 4096
WEIGHT_BYTES = 256 << 20
"""Of all weights of a format, at least, which calls read in turn."""
STREAM_BYTES = 256 << 20


CLOCK = [time.perf_counter]


def timed(call: Callable[[], object]) -> float:
    """Returns how long a call takes, in seconds."""
    start = CLOCK[0]()
    call()
    return CLOCK[0]() - start


class Bench:
    """Weights of one format, and what reads them."""

    def __init__(self, name: str, dtype: Any) -> None:
        import torch

        from tests.integration.kernels.coded_weights import FORMATS, draw_coded
        from vllm_heteroinfer.kernels import coded

        self._torch, self._coded, self._dtype = torch, coded, dtype
        library = coded.register()
        form = FORMATS[name]
        draw = torch.Generator().manual_seed(0)
        first = coded.pack(library, draw_coded(draw, form, COLUMNS, INPUTS))
        count = -(-WEIGHT_BYTES // first.packed.nbytes)
        self.weights = [first]
        for _ in range(count - 1):
            copy = coded.PackedWeight(
                format=form, columns=COLUMNS, inputs=INPUTS, packed=first.packed.clone()
            )
            self.weights.append(copy)

    def rate(self, rows: int) -> float:
        """Returns GB/s of packed weights read, once over all of them."""
        x = self._torch.randn(rows, INPUTS).to(self._dtype)
        weights = self.weights[: max(2, len(self.weights) // max(1, rows // 8))]
        seconds = timed(lambda: [self._coded.linear(x, weight) for weight in weights])
        return sum(weight.packed.nbytes for weight in weights) / seconds / 1e9


def stream(words: Any) -> float:
    """Returns GB/s of a sum over memory."""
    return float(words.nbytes / timed(words.sum) / 1e9)


def line(bench: Bench, label: str, words: Any, rows: Sequence[int], rounds: int) -> str:
    """Returns a line of the table: GB/s and the share of the stream, by rows."""
    cells = []
    for count in rows:
        bench.rate(count)
        rates, shares = [], []
        for _ in range(rounds if count < 16 else max(3, rounds // 3)):
            memory = stream(words)
            rates.append(bench.rate(count))
            shares.append(rates[-1] / memory)
        cells.append(f"{statistics.median(rates):7.1f} {statistics.median(shares):5.0%}")
    return f"{label:28} " + "  ".join(cells)


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
        "--busy", action="store_true", help="one thread's CPU time, on a machine with other work"
    )
    options = parser.parse_args(argv)
    import torch

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
    print(f"{'rows':28} " + "  ".join(f"{count:7} {'share':>5}" for count in rows))
    paths = options.paths.split(",") if options.paths else [""]
    for name in options.formats.replace("-", " ").split(",") if options.formats else FORMATS:
        bench = Bench(name, dtype)
        for path in paths:
            index = CODED_PATHS.index(path) if path else -1
            if not library.calls.heteroinfer_tune(index, -1, -1):
                continue
            print(line(bench, f"{name} {path}", words, rows, options.rounds), flush=True)
        library.calls.heteroinfer_tune(-1, -1, -1)


if __name__ == "__main__":
    main()
