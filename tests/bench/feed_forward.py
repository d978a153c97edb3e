"""Measures the exchange of mode FeedForward on a machine with a GPU.

    python -m tests.bench.feed_forward exchange [--asks N]    the exchange in a CUDA graph; checksums
    python -m tests.bench.feed_forward frozen                 when a kernel gives up a lane, as JSON

Needs one GPU and a Python with vLLM's CUDA and CPU builds. A lane is the place of a feed-forward rank in the
slab; here, a small process serves it. `tests.bench.feed_forward_cells` measures whole steps.
"""

import argparse
import ctypes
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any


def echo_lane(offer: str, lane: int, ready: Any) -> None:
    """Serves a lane in C++: it returns the inputs of each ask until it is stopped."""
    from vllm_heteroinfer.feed_forward import slab_library
    from vllm_heteroinfer.feed_forward.slab import Offer, connect

    slab, _ = connect(Offer.from_json(offer), lane, Offer.from_json(offer).shape)
    ready.put(lane)
    slab_library.load().heteroinfer_ff_echo(slab.address, ctypes.byref(slab.layout), lane, 2_000_000, 0)


class Exchange:
    """A CudaExchange and the processes of its lanes."""

    def __init__(self, hidden: int, max_rows: int, lanes: int = 1, *, limit_s: float = 60.0) -> None:
        import torch

        from vllm_heteroinfer.feed_forward.cuda_exchange import CudaExchange
        from vllm_heteroinfer.feed_forward.slab import Shape, create

        shape = Shape(epoch=1, hidden=hidden, topk=8, max_rows=max_rows, dtype="bfloat16", lanes=lanes)
        self.slab, offer = create(shape)
        context = multiprocessing.get_context("spawn")
        ready = context.Queue()
        self.lanes = [
            context.Process(target=echo_lane, args=(offer.to_json(), lane, ready)) for lane in range(lanes)
        ]
        for lane in self.lanes:
            lane.start()
        for _ in self.lanes:
            ready.get(timeout=60)
        self.asks = CudaExchange(self.slab, torch.device("cuda:0"), limit_s=limit_s)

    def close(self) -> None:
        """Ends the processes of the lanes."""
        import torch

        torch.cuda.synchronize()
        self.slab.stop()
        for lane in self.lanes:
            lane.join(10)
        torch.cuda.cudart().cudaHostUnregister(self.slab.address)


def graph_of(layers: int, step: Callable[[], Any]) -> Any:
    """Runs `step` once, and returns a captured CUDA graph of it."""
    import torch

    del layers
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def replay_us(graph: Any, layers: int) -> float:
    """Returns the median microseconds of a layer in a graph."""
    import torch

    for _ in range(5):
        graph.replay()
    torch.cuda.synchronize()
    times = []
    for _ in range(40):
        start = time.perf_counter()
        graph.replay()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return sorted(times)[20] / layers * 1e6


def exchange(options: argparse.Namespace) -> None:
    """Measures the exchange by number of rows, checks padded rows, and checks many exchanges."""
    import torch

    layers = 48
    for hidden in (2048, 4096, 7168):
        bench = Exchange(hidden, 256)
        for rows in (1, 4, 16, 64, 256):
            x = torch.randn((rows, hidden), device="cuda", dtype=torch.bfloat16)
            w = torch.randn((hidden, hidden), device="cuda", dtype=torch.bfloat16) * 0.01
            ids = torch.zeros((rows, 8), dtype=torch.int32, device="cuda")
            weights = torch.zeros((rows, 8), device="cuda")

            def step(ask: bool, x: Any = x, w: Any = w, ids: Any = ids, weights: Any = weights) -> Any:
                for layer in range(layers):
                    h = x @ w
                    x = h + (bench.asks.ask(layer, h, ids, weights, None) if ask else h)  # noqa: B023
                return x

            alone = replay_us(graph_of(layers, lambda: step(False)), layers)
            asked = replay_us(graph_of(layers, lambda: step(True)), layers)
            print(f"RESULT exchange hidden={hidden} rows={rows}: {asked - alone:.1f} us a layer", flush=True)
        if hidden == 2048:
            padded_rows(bench)
            many(bench, options.asks)
        bench.close()


def padded_rows(bench: Exchange) -> None:
    """Checks that no rank gets padded rows, and that their results are zeros."""
    import torch

    x = torch.randn((8, 2048), device="cuda", dtype=torch.bfloat16)
    ids = torch.zeros((8, 8), dtype=torch.int32, device="cuda")
    weights = torch.zeros((8, 8), device="cuda")
    padding = torch.zeros(8, dtype=torch.bool, device="cuda")
    out: list[Any] = []
    graph = graph_of(1, lambda: out.append(bench.asks.ask(0, x, ids, weights, padding)))
    for live in (8, 5, 0):
        padding[:live], padding[live:] = False, True
        before = bench.slab.read_lane(0).rows
        graph.replay()
        torch.cuda.synchronize()
        right = torch.equal(out[-1][:live], x[:live]) and not out[-1][live:].any()
        asked = bench.slab.read_lane(0).rows - before
        print(f"RESULT padded live={live} of 8: rows asked {asked}, right {right}", flush=True)


def many(bench: Exchange, asks: int) -> None:
    """Replays a graph of exchanges with new rows each time, and counts wrong words on the device."""
    import torch

    layers, rows = 1000, 1
    kernels = bench.asks._kernels
    fill, check = kernels.function("ff_fill"), kernels.function("ff_check")
    x = torch.zeros((rows, 2048), device="cuda", dtype=torch.bfloat16)
    wrong = torch.zeros(1, dtype=torch.int64, device="cuda")
    words = ctypes.c_uint64(x.numel() // 2)
    keep: list[Any] = []

    def launch(kernel: Any, *pointers: Any) -> None:
        arguments = (ctypes.c_void_p * len(pointers))(*(ctypes.addressof(p) for p in pointers))
        keep.append((arguments, pointers))
        kernels.launch(kernel, 4, arguments, torch.cuda.current_stream().cuda_stream)

    def step() -> None:
        for _ in range(layers):
            launch(
                fill,
                ctypes.c_void_p(x.data_ptr()),
                words,
                ctypes.c_void_p(bench.asks._state.data_ptr()),
            )
            out = bench.asks.ask(0, x, None, None, None)
            keep.append(out)
            launch(
                check,
                ctypes.c_void_p(x.data_ptr()),
                ctypes.c_void_p(out.data_ptr()),
                words,
                ctypes.c_void_p(wrong.data_ptr()),
            )

    graph = graph_of(layers, step)
    before = bench.slab.asked
    start = time.perf_counter()
    for _ in range(asks // layers):
        graph.replay()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    print(
        f"RESULT many {bench.slab.asked - before} asks in {seconds:.1f} s: wrong words {int(wrong)}, "
        f"device gave up {bench.slab.device_gave_up}",
        flush=True,
    )


FROZEN_LIMIT_S = 1.0
FROZEN_S = 3.0


def frozen(options: argparse.Namespace) -> None:
    """Stops the last of three lanes during an ask. Prints when the kernel gave up, and which lane.

    Without a watch, the device's clock decides. With a watch, the watch must have made the number of checks
    of the limit, because a watch without checks is frozen with its pod.
    """
    import torch

    from vllm_heteroinfer.feed_forward.exchange import WATCH_INTERVAL_S

    del options
    found = {}
    for case in ("no watch", "frozen watch", "watch"):
        bench = Exchange(2048, 16, lanes=3, limit_s=FROZEN_LIMIT_S)
        x = torch.ones((4, 2048), device="cuda", dtype=torch.bfloat16)
        ids = torch.zeros((4, 8), dtype=torch.int32, device="cuda")
        weights = torch.zeros((4, 8), device="cuda")
        assert torch.equal(bench.asks.ask(0, x, ids, weights, None), 3 * x), "a lane's answer is wrong"
        if case != "no watch":
            bench.slab.add_check()
        stopped = bench.lanes[-1].pid or 0
        os.kill(stopped, signal.SIGSTOP)
        start, done = time.monotonic(), torch.cuda.Event()
        out = bench.asks.ask(0, x, ids, weights, None)
        done.record()
        while not done.query() and time.monotonic() - start < FROZEN_S:
            time.sleep(WATCH_INTERVAL_S)
            if case == "watch":
                bench.slab.add_check()
        waited_s = time.monotonic() - start
        os.kill(stopped, signal.SIGCONT)
        torch.cuda.synchronize()
        found[case] = {
            "waited_s": waited_s,
            "gave_up": bench.slab.given_up_lane if bench.slab.device_gave_up else None,
            "right": torch.equal(out, 3 * x),
        }
        bench.close()
    print(json.dumps(found), flush=True)


def main() -> int:
    """Runs one part; see the module."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.feed_forward")
    parts = parser.add_subparsers(dest="part", required=True)
    part = parts.add_parser("exchange")
    part.add_argument("--asks", type=int, default=10_000_000)
    parts.add_parser("frozen")
    options = parser.parse_args()
    {"exchange": exchange, "frozen": frozen}[options.part](options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
