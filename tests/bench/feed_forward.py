"""Feed-forward mode on a machine with a GPU: what an exchange costs, what the host reads, and decode steps.

    python -m tests.bench.feed_forward exchange [--asks N]    the exchange in a CUDA graph; checksums
    python -m tests.bench.feed_forward memory [--gib N]       a memfd: read rate by page size, registering it
    python -m tests.bench.feed_forward decode [...]           steps of a model's shape, ours and stock vLLM's

Needs one GPU and a Python with vLLM's CUDA and CPU builds. In `decode` weights are dummies, and
routing is uniform (VLLM_MOE_ROUTING_SIMULATION_STRATEGY) on both sides. A step is the time
between steps while all requests decode, over at least 100 of them.
"""

import argparse
import ctypes
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from heteroinfer_contract import metric_names as names
from heteroinfer_contract.plan import Device, Plan
from tests.bench.model_shapes import SHAPES, make_shape
from tests.bench.offload import ending
from tests.gpu.scrape import scrape
from tests.integration.feed_forward.feed_forward_plans import feed_forward_plan
from tests.integration.worker.groups import Group, start_group

MAX_LEN, MAX_SEQS, MAX_TOKENS, BLOCK = 512, 64, 2048, 32
START_TIMEOUT_S = 400.0
PROMPT_TOKENS = 16
WARM_STEPS = 20
CAPTURE = json.dumps({"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64]})
GIB = 1 << 30
ROUTING = {"VLLM_MOE_ROUTING_SIMULATION_STRATEGY": "uniform_random"}


def off_bytes(shape: str, *, fp8: bool) -> int:
    """Returns the bytes of a layer's experts, or of its MLP."""
    config = SHAPES[shape]
    width = config.get("moe_intermediate_size", config["intermediate_size"])
    elements = 3 * config["hidden_size"] * width * config.get("num_experts", 1)
    return int(elements * (1 + 4 / 128**2 if fp8 else 2))


def prompts(requests: int) -> list[list[int]]:
    """Returns prompts that share no prefix."""
    return [[(7 * i + j) % 500 + 1 for j in range(PROMPT_TOKENS)] for i in range(requests)]


# Ours


def plan_of(model: Path, layers: int, off: int, options: argparse.Namespace) -> Plan:
    """Returns a plan of one GPU rank and the feed-forward ranks of the first `off` layers."""
    plan = feed_forward_plan(
        model,
        num_layers=layers,
        remote=range(off),
        shares=[1] * options.lanes,
        device=Device.GPU,
        dtype="bfloat16",
        max_model_len=MAX_LEN,
        max_num_batched_tokens=MAX_TOKENS,
        max_num_seqs=MAX_SEQS,
        block_size=BLOCK,
        eager_gpu=False,
        extra_args=("--load-format", "dummy", "--compilation-config", CAPTURE, "--no-enable-prefix-caching"),
    )
    return replace(plan, ranks=(replace(plan.ranks[0], kv_cache_bytes=4 * GIB), *plan.ranks[1:]))


def lane_counters(group: Group, rank: int) -> dict[str, float]:
    """Returns a feed-forward rank's sums."""
    total = scrape(group, rank).total
    return {
        "compute_s": total(names.FEED_FORWARD_COMPUTE_SECONDS_TOTAL),
        "asks": total(names.FEED_FORWARD_ASKS_TOTAL),
        "rows": total(names.FEED_FORWARD_ROWS_TOTAL),
        "experts": total(names.FEED_FORWARD_EXPERTS_TOTAL),
        "bytes": total(names.FEED_FORWARD_BYTES_TOTAL),
    }


def measure_group(group: Group, requests: int, steps: int) -> dict[str, float]:
    """Returns a step's time and the first lane's share of it, while `requests` decode."""
    tokens = WARM_STEPS * 2 + steps + 60

    def ask(prompt: Sequence[int]) -> None:
        group.complete(prompt, tokens)

    threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in prompts(requests)]
    for thread in threads:
        thread.start()

    def count() -> float:
        return scrape(group, 0).total(names.STEP_SECONDS + "_count", phase=names.PHASE_DECODE)

    first = count()
    deadline = time.monotonic() + 120
    while count() < first + WARM_STEPS and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.5)  # lanes tell their counters four times a second
    start, before, lanes = time.perf_counter(), count(), lane_counters(group, 1)
    while (now := count()) < before + steps and time.monotonic() < deadline:
        time.sleep(0.02)
    seconds = time.perf_counter() - start
    after = lane_counters(group, 1)
    for thread in threads:
        thread.join(120)
    spent = {key: after[key] - lanes[key] for key in after}
    asks = max(1.0, spent["asks"])
    return {
        "step_ms": seconds / max(1.0, now - before) * 1e3,
        "steps": now - before,
        "compute_ms_a_layer": spent["compute_s"] / asks * 1e3,
        "rows_an_ask": spent["rows"] / asks,
        "experts_an_ask": spent["experts"] / asks,
        "gb_s": spent["bytes"] / max(1e-9, spent["compute_s"]) / 1e9,
    }


def first_token_s(complete: Callable[[list[int]], Any], tokens: int, seed: int) -> float:
    """Returns the seconds until one token follows a prompt of so many."""
    prompt = [(seed * 31 + 7 * j) % 500 + 1 for j in range(tokens)]
    start = time.perf_counter()
    complete(prompt)
    return time.perf_counter() - start


def run_ours(model: Path, layers: int, off: int, options: argparse.Namespace) -> None:
    """Measures one of our groups and prints a line for each load."""
    plan = plan_of(model, layers, off, options)
    folder = Path(tempfile.mkdtemp(prefix="hi-ff-"))
    env = {
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        **(ROUTING if "moe" in options.shape or "a3b" in options.shape else {}),
    }
    env |= dict(setting.split("=", 1) for setting in options.env)
    with start_group(plan, folder, env=env, startup_timeout_s=START_TIMEOUT_S) as group:
        try:
            ready = group.wait_ready(START_TIMEOUT_S)
            report("ours", off, {"ready_s": ready})
            for requests in options.requests:
                measure_group(group, requests, 10)
                report("ours", off, {"N": requests, **measure_group(group, requests, options.steps)})
            for tokens in options.prompts:
                found = [
                    first_token_s(lambda prompt: group.complete(prompt, 1), tokens, seed) for seed in range(3)
                ]
                report("ours", off, {"prompt": tokens, "first_token_ms": min(found) * 1e3})
        except BaseException:
            print(group.logs(), flush=True)
            raise


# Stock


def run_stock(model: Path, off: int, kind: str, options: argparse.Namespace) -> None:
    """Measures stock vLLM in a process of its own."""
    per_layer = off_bytes(options.shape, fp8=options.fp8)
    what = "experts" if "a3b" in options.shape else "mlp"
    layers = options.layers
    offloads: Mapping[str, Mapping[str, Any]] = {
        "gpu": {},
        "uva": {"cpu_offload_gb": off * per_layer / GIB * options.uva_scale, "cpu_offload_params": {what}},
        "prefetch": {
            "offload_backend": "prefetch",
            "offload_group_size": layers // off,
            "offload_num_in_group": 1,
            "offload_prefetch_step": 1,
            "offload_params": {what},
        },
    }
    given = {
        "model": str(model),
        "offload": {k: sorted(v) if isinstance(v, set) else v for k, v in offloads[kind].items()},
        "requests": options.requests,
        "steps": options.steps,
        "prompts": options.prompts,
        "kind": kind,
        "off": off,
    }
    command = [sys.executable, "-m", "tests.bench.feed_forward", "stock", json.dumps(given)]
    env = {
        **os.environ,
        **(ROUTING if "a3b" in options.shape else {}),
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    process = subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    lines: list[str] = []
    with ending(process):  # type: ignore[arg-type]
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if line.startswith("RESULT ") or "CPU offloaded" in line or "offload" in line.lower():
                print("   ", line.strip()[-220:], flush=True)
        code = process.wait(60)
    if code:
        print(f"stock {kind} {off} exited {code}:", "".join(lines[-30:]), flush=True)


def stock_main(text: str) -> None:
    """Runs in a process of its own: stock vLLM, its engine stepped by hand."""
    import vllm

    given = json.loads(text)
    offload = {k: set(v) if isinstance(v, list) else v for k, v in given["offload"].items()}
    llm = vllm.LLM(
        model=given["model"],
        dtype="bfloat16",
        load_format="dummy",
        max_model_len=MAX_LEN if not given["prompts"] else 4096,
        max_num_seqs=MAX_SEQS,
        max_num_batched_tokens=MAX_TOKENS,
        kv_cache_memory_bytes=4 * GIB,
        enable_prefix_caching=False,
        compilation_config=json.loads(CAPTURE),
        **offload,
    )
    engine = llm.llm_engine

    def decode(requests: int, steps: int) -> float:
        sampling = vllm.SamplingParams(
            temperature=0, max_tokens=WARM_STEPS + steps + 10, ignore_eos=True, detokenize=False
        )
        for number, prompt in enumerate(prompts(requests)):
            engine.add_request(f"{requests}-{steps}-{number}", {"prompt_token_ids": prompt}, sampling)
        times: list[float] = []
        while engine.has_unfinished_requests():
            outputs = engine.step()
            tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
            if len(outputs) == requests and tokens:
                times.append(time.perf_counter())
        steady = times[WARM_STEPS : WARM_STEPS + steps]
        return (steady[-1] - steady[0]) / (len(steady) - 1)

    for requests in given["requests"]:
        decode(requests, 10)
        step = decode(requests, given["steps"])
        report(given["kind"], given["off"], {"N": requests, "step_ms": step * 1e3})
    one = vllm.SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)

    def first(prompt: list[int]) -> None:
        llm.generate([{"prompt_token_ids": prompt}], one, use_tqdm=False)

    for tokens in given["prompts"]:
        found = [first_token_s(first, tokens, seed) for seed in range(3)]
        report(given["kind"], given["off"], {"prompt": tokens, "first_token_ms": min(found) * 1e3})


def report(kind: str, off: int, values: Mapping[str, float]) -> None:
    """Prints a line of results."""
    text = json.dumps({k: round(v, 3) for k, v in values.items()})
    print(f"RESULT {kind} off={off} {text}", flush=True)


def decode(options: argparse.Namespace) -> None:
    """Measures every kind that was asked for, at every number of layers off the GPU."""
    model = make_shape(
        Path(tempfile.mkdtemp(prefix="hi-shape-")), options.shape, options.layers, fp8=options.fp8
    )
    for off in options.off:
        for kind in options.only:
            start = time.monotonic()
            try:
                if kind == "ours":
                    run_ours(model, options.layers, off, options)
                else:
                    run_stock(model, off, kind, options)
            except (AssertionError, RuntimeError, OSError) as error:
                print(f"{kind} {off} FAILED: {str(error)[-3000:]}", flush=True)
            print(f"  {kind} {off}: {time.monotonic() - start:.0f} s", flush=True)


# The exchange alone


def echo_lane(offer: str, lane: int, ready: Any) -> None:
    """A lane in C++ that gives back what it is asked, until stopped."""
    from vllm_heteroinfer.feed_forward import slab_library
    from vllm_heteroinfer.feed_forward.slab import Offer, connect

    slab, _ = connect(Offer.from_json(offer), lane, Offer.from_json(offer).shape)
    ready.put(lane)
    slab_library.load().heteroinfer_ff_echo(slab.address, ctypes.byref(slab.layout), lane, 2_000_000, 0)


class Exchange:
    """A CudaExchange with C++ lanes of its own."""

    def __init__(self, hidden: int, max_rows: int, lanes: int = 1) -> None:
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
        self.asks = CudaExchange(self.slab, torch.device("cuda:0"), limit_s=60.0)

    def close(self) -> None:
        """Ends the lanes."""
        import torch

        torch.cuda.synchronize()
        self.slab.stop()
        for lane in self.lanes:
            lane.join(10)
        torch.cuda.cudart().cudaHostUnregister(self.slab.address)


def graph_of(layers: int, step: Callable[[], Any]) -> Any:
    """Returns a captured graph of `step`, which has run once before."""
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
    """Returns the median time of a layer of a graph, in us."""
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
    """Measures the exchange by size of rows; counts padded rows; checks many exchanges."""
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
    """Checks that padded rows are asked of nobody and come back as zeros."""
    import torch

    x = torch.randn((8, 2048), device="cuda", dtype=torch.bfloat16)
    ids = torch.zeros((8, 8), dtype=torch.int32, device="cuda")
    weights = torch.zeros((8, 8), device="cuda")
    padding = torch.zeros(8, dtype=torch.bool, device="cuda")
    out: list[Any] = []
    graph = graph_of(1, lambda: out.append(bench.asks.ask(0, x, ids, weights, padding)))
    for live in (8, 5, 0):
        padding[:live], padding[live:] = False, True
        before = bench.slab.lane(0).rows
        graph.replay()
        torch.cuda.synchronize()
        right = torch.equal(out[-1][:live], x[:live]) and not out[-1][live:].any()
        asked = bench.slab.lane(0).rows - before
        print(f"RESULT padded live={live} of 8: rows asked {asked}, right {right}", flush=True)


def many(bench: Exchange, asks: int) -> None:
    """Replays a graph of exchanges with rows that change each time; counts wrong words on the device."""
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
                ctypes.c_void_p(bench.asks.number_address),
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
        f"device gave up {bench.slab.failed}",
        flush=True,
    )


# The host's memory


def memory(options: argparse.Namespace) -> None:
    """Measures what threads read from anonymous memory and from a memfd, and how long registering takes."""
    import torch

    num_bytes = int(options.gib * GIB)
    print(f"RESULT threads {torch.get_num_threads()}, {num_bytes / GIB:.0f} GiB", flush=True)
    for name, make in (("anonymous", _anonymous), ("memfd", _memfd), ("memfd-advised", _memfd_advised)):
        view = make(num_bytes)
        data = torch.frombuffer(view, dtype=torch.int64)
        start = time.perf_counter()
        data.fill_(1)
        filled = time.perf_counter() - start
        rates = []
        for _ in range(5):
            start = time.perf_counter()
            assert int(data.sum()) == data.numel()
            rates.append(num_bytes / (time.perf_counter() - start) / 1e9)
        line = f"RESULT memory {name}: fill {filled:.2f} s, read {max(rates):.1f} GB/s, {_huge_pages(view)}"
        if torch.cuda.is_available() and not name.startswith("anonymous"):
            address = data.data_ptr()
            start = time.perf_counter()
            status = torch.cuda.cudart().cudaHostRegister(address, num_bytes, 0)
            line += f", cudaHostRegister {time.perf_counter() - start:.2f} s (status {int(status)})"
            if int(status) == 0:
                torch.cuda.cudart().cudaHostUnregister(address)
        print(line, flush=True)
        del data
        view.close()


MADV_HUGEPAGE = 14


def _anonymous(num_bytes: int) -> Any:
    import mmap

    view = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    view.madvise(MADV_HUGEPAGE)
    return view


def _memfd(num_bytes: int, *, advise: bool = False) -> Any:
    import mmap

    fd = os.memfd_create("bench")
    os.ftruncate(fd, num_bytes)
    view = mmap.mmap(fd, num_bytes)
    os.close(fd)
    if advise:
        view.madvise(MADV_HUGEPAGE)
    return view


def _memfd_advised(num_bytes: int) -> Any:
    return _memfd(num_bytes, advise=True)


def _huge_pages(view: Any) -> str:
    del view
    text = Path("/proc/meminfo").read_text()
    wanted = ("AnonHugePages", "ShmemHugePages", "ShmemPmdMapped")
    return ", ".join(line.strip() for line in text.splitlines() if line.startswith(wanted))


def main() -> int:
    """Runs one part; see the module."""

    def numbers(text: str) -> list[int]:
        return [int(number) for number in text.split(",") if number]

    parser = argparse.ArgumentParser(prog="python -m tests.bench.feed_forward")
    parts = parser.add_subparsers(dest="part", required=True)
    part = parts.add_parser("exchange")
    part.add_argument("--asks", type=int, default=10_000_000)
    part = parts.add_parser("memory")
    part.add_argument("--gib", type=float, default=16.0)
    part = parts.add_parser("stock")
    part.add_argument("given")
    part = parts.add_parser("decode")
    part.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-30b-a3b")
    part.add_argument("--layers", type=int, default=24)
    part.add_argument("--off", type=numbers, default=[6, 24])
    part.add_argument("--requests", type=numbers, default=[1, 4, 16, 64])
    part.add_argument("--prompts", type=numbers, default=[])
    part.add_argument("--steps", type=int, default=100)
    part.add_argument("--lanes", type=int, default=1)
    part.add_argument("--fp8", action="store_true")
    part.add_argument(
        "--uva-scale", type=float, default=1.0, help="stock offloads whole tensors until a limit"
    )
    part.add_argument("--only", type=lambda text: text.split(","), default=["ours", "uva", "prefetch"])
    part.add_argument("--env", action="append", default=[], help="NAME=VALUE, for our pods")
    options = parser.parse_args()
    if options.part == "stock":
        stock_main(options.given)
    else:
        {"exchange": exchange, "memory": memory, "decode": decode}[options.part](options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
