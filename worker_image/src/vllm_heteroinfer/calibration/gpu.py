"""Measures the GPU, its PCIe link and the exchange with feed-forward ranks.

Run as `python -m vllm_heteroinfer.calibration.gpu`. Imports torch. Without a GPU, reports nothing.
"""

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final

import torch

from heteroinfer_contract.calibration import Direction, HopPath
from vllm_heteroinfer.calibration.process_output import report, report_skipped, rounded
from vllm_heteroinfer.kernels.rounds import ROUNDS

COPY_BYTES: Final = 256 << 20
"""Size of a copy between host and GPU."""
SIDE: Final = 8192
"""Rows and columns of the weight: 128 MiB in bf16, more than any GPU cache of 2026 except MI300's."""
COPIES: Final = 8
"""Number of weights that a round reads."""
MANY_ROWS: Final = 4096
"""Rows of a product that spends more time on computing than on reading."""
EXCHANGES: Final = 48
"""Exchanges in one CUDA graph, about the number of layers of a model."""
HIDDEN, ROWS = 4096, 1
"""Elements of a row, and rows of the message in an exchange."""
LIMIT_S: Final = 5.0
"""Seconds after which the GPU gives up waiting for an answer."""


def main() -> None:
    """Measures the first GPU, and reports the results."""
    if not torch.cuda.is_available():
        return
    device = torch.device("cuda:0")
    report("gpu_name", name=torch.cuda.get_device_name(device))
    for name, measure in (
        ("GPU", _measure_gpu),
        ("PCIe", _measure_transfers),
        ("exchange", _measure_exchange),
    ):
        try:
            measure(device)
        # A measurement that this driver or GPU does not support is reported as skipped.
        except Exception as error:
            report_skipped(name, error)


def _best_seconds(call: Callable[[], object], repeats: int = 1) -> float:
    """Returns the seconds that one call takes in the fastest of several rounds on the current stream.

    Args:
        repeats: calls in a round.
    """
    best = float("inf")
    for _ in range(ROUNDS + 1):  # one more, because the first round also warms up
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        torch.cuda.synchronize()
        best = min(best, (time.perf_counter() - start) / repeats)
    return best


def _measure_gpu(device: torch.device) -> None:
    """Reports the GPU's rate of reading weights, and its rate of computing products."""
    weights = [torch.randn((SIDE, SIDE), device=device, dtype=torch.bfloat16) for _ in range(COPIES)]
    x = torch.randn((1, SIDE), device=device, dtype=torch.bfloat16)
    many_rows = torch.randn((MANY_ROWS, SIDE), device=device, dtype=torch.bfloat16)
    with torch.inference_mode():
        reading_s = _best_seconds(lambda: [torch.nn.functional.linear(x, weight) for weight in weights])
        computing_s = _best_seconds(lambda: torch.nn.functional.linear(many_rows, weights[0]))
    num_bytes = sum(weight.nbytes for weight in weights)
    operations = 2 * MANY_ROWS * SIDE * SIDE / computing_s
    report("gpu", bytes_per_s=rounded(num_bytes / reading_s), operations_per_s=rounded(operations))


def _measure_transfers(device: torch.device) -> None:
    """Reports the rate of copies in each direction: alone, and while other copies and reads compete."""
    on_host = [torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    on_gpu = [torch.empty(COPY_BYTES, dtype=torch.uint8, device=device) for _ in range(2)]
    copies = {
        Direction.TO_GPU: lambda: on_gpu[0].copy_(on_host[0], non_blocking=True),
        Direction.FROM_GPU: lambda: on_host[1].copy_(on_gpu[1], non_blocking=True),
    }
    for direction, copy in copies.items():
        report("transfers", direction=direction, bytes_per_s=rounded(COPY_BYTES / _best_seconds(copy)))
    for direction, copy in copies.items():
        other = copies[Direction.FROM_GPU if direction is Direction.TO_GPU else Direction.TO_GPU]
        rate = COPY_BYTES / _contended_s(copy, other)
        report("transfers", direction=direction, bytes_per_s=rounded(rate), contended=True)


def _contended_s(copy: Callable[[], object], other: Callable[[], object]) -> float:
    """Returns the median seconds of a copy while other copies and reads compete for memory.

    The other copies run in the opposite direction, and a CPU thread reads memory.

    Args:
        other: starts a copy in the opposite direction.
    """
    ended = threading.Event()
    dense = torch.randn((SIDE, SIDE))

    def read_memory() -> None:
        """Reads host memory until the measurement has ended."""
        while not ended.is_set():
            dense.sum()

    reader = threading.Thread(target=read_memory)
    stream, other_stream = torch.cuda.Stream(), torch.cuda.Stream()
    reader.start()
    times = []
    try:
        for _ in range(ROUNDS):
            with torch.cuda.stream(other_stream):
                for _ in range(3):  # the opposite copies must last longer than the measured copy
                    other()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            with torch.cuda.stream(stream):
                begin.record()
                copy()
                end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
    finally:
        ended.set()
        reader.join()
    return sorted(times)[len(times) // 2]


def _measure_exchange(device: torch.device) -> None:
    """Reports the time of an exchange with a feed-forward rank.

    A process that returns the rows that it gets takes the place of the feed-forward rank.
    """
    from vllm_heteroinfer.feed_forward.cuda_exchange import CudaExchange
    from vllm_heteroinfer.feed_forward.slab import Shape, create

    shape = Shape(epoch=1, hidden=HIDDEN, topk=0, max_rows=ROWS, dtype="bfloat16", lanes=1)
    slab, offer = create(shape)
    with _echo_process(offer.to_json()):
        exchange = CudaExchange(slab, device, limit_s=LIMIT_S)
        x = torch.ones((ROWS, HIDDEN), dtype=torch.bfloat16, device=device)
        exchange.slab.wake_lanes()
        first = exchange.ask(layer=0, x=x, ids=None, weights=None, padding=None)
        torch.cuda.synchronize()
        if not torch.equal(first, x):
            raise RuntimeError(
                "calibration of the exchange between GPU and CPU: the GPU got other rows than it sent. "
                "Report this defect"
            )
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for layer in range(EXCHANGES):
                x = exchange.ask(layer=layer, x=x, ids=None, weights=None, padding=None)
        seconds = _best_seconds(graph.replay) / EXCHANGES
        slab.stop()
    report("hops", path=HopPath.EXCHANGE, message_bytes=shape.row_bytes, seconds=rounded(seconds))


@contextlib.contextmanager
def _echo_process(offer: str) -> Iterator[None]:
    """Runs a process that answers requests over the slab while the context lasts.

    The context begins when the process is ready.

    Raises:
        RuntimeError: the process did not become ready.
    """
    command = [sys.executable, "-m", "vllm_heteroinfer.calibration.echo", offer]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        if process.stdout.readline().strip() != "ready":
            raise RuntimeError(
                "calibration of the exchange between GPU and CPU: the CPU process ended with exit code "
                f"{process.wait()}. Read the error of the CPU process above"
            )
        yield
    finally:
        process.kill()
        process.communicate()


if __name__ == "__main__":
    main()
