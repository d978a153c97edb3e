"""Measures the all-reduce of one GPU rank and one CPU rank on one host, in three ways.

    PYTHONPATH=worker_image/src python3 -m tests.bench.bridge_all_reduce [--threads 8] [--cpu]

Needs torch only. The ways are a plain one (`.cpu()`, gloo's all_reduce, `.cuda()`) and the bridge's two
transports. The times are those of the GPU rank, and include a synchronization of its stream. The CPU rank
calls as fast as it can. The results are checked. `--cpu` runs two CPU ranks, for a machine without a GPU.
"""

import argparse
import os
import platform
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.ports import free_port
from vllm_heteroinfer.distributed.bridge import Bridge
from vllm_heteroinfer.distributed.meter import Meter

KIB, MIB = 1 << 10, 1 << 20
SIZES_BYTES = [8 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 8 * MIB, 16 * MIB, 64 * MIB]
BUDGET_S = 1.5
"""Seconds for each way and size, with MIN_ITERATIONS to MAX_ITERATIONS calls."""
MIN_ITERATIONS, MAX_ITERATIONS = 20, 1000
WARM_UP = 10
TIMEOUT_S = 60.0
BARS = {size: 5.0 for size in SIZES_BYTES if size <= MIB} | {64 * MIB: 8.0}

AllReduce = Callable[[torch.Tensor], torch.Tensor]


def plain_all_reduce(x: torch.Tensor) -> torch.Tensor:
    if x.device.type == "cpu":
        dist.all_reduce(x)
        return x
    on_host = x.cpu()
    dist.all_reduce(on_host)
    return on_host.cuda()


def build_bridge(rank: int, device: torch.device, *, share_host: bool) -> Bridge:
    return Bridge(
        group="bench",
        ranks=[0, 1],
        rank=rank,
        device=device,
        cpu_group=dist.group.WORLD,
        share_host=share_host,
        timeout_s=TIMEOUT_S,
        meter=Meter(),
    )


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream().synchronize()


def check(all_reduce: AllReduce, size: int, device: torch.device) -> None:
    """Raises if a sum differs from torch's sum of the same numbers on one device."""
    parts = [
        torch.randn(size // 2, generator=torch.Generator().manual_seed(size + rank)).bfloat16()
        for rank in range(2)
    ]
    got = all_reduce(parts[dist.get_rank()].to(device, copy=True)).cpu()
    if not torch.equal(got, parts[0] + parts[1]):
        raise AssertionError(f"{size} bytes on {device}: the sum differs from torch.add")


def measure(all_reduce: AllReduce, size: int, device: torch.device) -> list[float]:
    """Returns the seconds of each call."""
    x = torch.zeros(size // 2, dtype=torch.bfloat16, device=device)
    check(all_reduce, size, device)
    start = time.perf_counter()
    for _ in range(WARM_UP):
        all_reduce(x)
        synchronize(device)
    estimate_s = (time.perf_counter() - start) / WARM_UP
    count = torch.tensor([min(MAX_ITERATIONS, max(MIN_ITERATIONS, int(BUDGET_S / estimate_s)))])
    dist.broadcast(count, 0)  # both ranks must make the same number of calls
    seconds = []
    for _ in range(int(count)):
        start = time.perf_counter()
        all_reduce(x)
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return seconds


@torch.inference_mode()  # as vLLM's workers run
def run(rank: int, port: int, device_name: str, threads: int, results: Any) -> None:
    """Runs one rank: measures each way with each size. Rank 0 puts its times into `results`."""
    torch.set_num_threads(threads)
    device = torch.device(device_name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    by_gloo, by_memory = (build_bridge(rank, device, share_host=share) for share in (False, True))
    in_place = device.type == "cpu"  # the plain way uses this address
    ways: dict[str, AllReduce] = {
        "plain": plain_all_reduce,
        by_gloo.path: lambda x: by_gloo.all_reduce(x, in_place=in_place),
        by_memory.path: lambda x: by_memory.all_reduce(x, in_place=in_place),
    }
    for size in SIZES_BYTES:
        for way, all_reduce in ways.items():
            seconds = measure(all_reduce, size, device)
            if rank == 0:
                results.put((size, way, seconds))
    by_gloo.close()
    by_memory.close()
    dist.destroy_process_group()


def quantile(seconds: list[float], share: float) -> float:
    return sorted(seconds)[min(len(seconds) - 1, int(len(seconds) * share))]


def size_name(size: int) -> str:
    return f"{size // MIB} MiB" if size >= MIB else f"{size // KIB} KiB"


def table(measured: dict[tuple[int, str], list[float]]) -> str:
    """Returns the Markdown table of all sizes. Its last column compares the bridge with the limit."""
    lines = [
        "| bf16 | plain p50 / p99 us | gloo | shared memory | plain : gloo | plain : shared memory | bar |",
        "|---|---|---|---|---|---|---|",
    ]
    for size in SIZES_BYTES:
        halves = {way: quantile(measured[size, way], 0.5) for way in ("plain", "gloo", "shared_memory")}
        times = [
            f"{halves[way] * 1e6:.1f} / {quantile(measured[size, way], 0.99) * 1e6:.1f}" for way in halves
        ]
        gain = halves["plain"] / halves["shared_memory"]
        bar = BARS.get(size)
        verdict = "" if bar is None else f"{bar:.0f}x: {'met' if gain >= bar else 'MISSED'}"
        lines.append(
            f"| {size_name(size)} | {' | '.join(times)} | {halves['plain'] / halves['gloo']:.1f}x "
            f"| {gain:.1f}x | {verdict} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Starts both ranks, collects the times of rank 0, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=8, help="threads of the CPU rank")
    parser.add_argument("--cpu", action="store_true", help="run two CPU ranks")
    options = parser.parse_args()
    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    port, first = free_port(), "cpu" if options.cpu else "cuda:0"
    ranks = [
        context.Process(target=run, args=(rank, port, device, options.threads, results))
        for rank, device in enumerate((first, "cpu"))
    ]
    for process in ranks:
        process.start()
    measured: dict[tuple[int, str], list[float]] = {}
    wanted = len(SIZES_BYTES) * 3  # each size in three ways
    while len(measured) < wanted:
        if not results.empty():
            size, way, seconds = results.get()
            measured[size, way] = seconds
        elif any(process.exitcode for process in ranks):
            for process in ranks:
                process.terminate()
            sys.exit("a rank failed")
        else:
            time.sleep(0.05)
    for process in ranks:
        process.join(TIMEOUT_S)
    device = "CPU" if options.cpu else torch.cuda.get_device_name(0)
    print(
        f"{device} and {options.threads} CPU threads of {platform.machine()}, torch {torch.__version__}, "
        f"{datetime.now(UTC).date()}"
    )
    print(table(measured))


if __name__ == "__main__":
    main()
