"""Measures the memory of a GPU rank besides weights and KV cache: context, NCCL, activations, CUDA graphs.

    python -m tests.bench.gpu_floor [--cases NAME,...] [--seconds 560] [--json FILE] [--on-cpu]

Each case is a process that starts vLLM's own worker as the engine does, as one stage of a pipeline. The
process group reports other stages to the worker, so that the model has no embedding or no head. Weights are
random, and no request is served: after the start, the largest batch runs, with attention and, in the stage
with the head, with the sampler. The figures are the memory of the whole device, so no other program may use
the GPU. The program lists cases for which no time is left, and does not begin them.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from heteroinfer_contract.printable import format_bytes
from tests.bench.model_shapes import make_shape

RESULT: Final = "gpu-floor-result "
KV_CACHE_BYTES: Final = 1 << 30
MAX_MODEL_LEN: Final = 4096
CASE_TIMEOUT_S: Final = 240.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One start of one rank.

    Attributes:
        shape: name of a shape in tests.bench.model_shapes.
        layers: number of layers of the whole model.
        stage: index of the stage in the pipeline.
        stages: number of stages. The rank has its equal share of the layers.
        seqs: largest number of requests of a step. CUDA graphs are captured for up to twice as many
            tokens.
        tokens: largest number of tokens of a step.
        eager: whether there are no CUDA graphs and no compiled code.
    """

    shape: str
    layers: int
    stage: int = 0
    stages: int = 1
    seqs: int = 64
    tokens: int = 2048
    eager: bool = False

    @property
    def has_head(self) -> bool:
        """Returns whether the rank has the head and samples."""
        return self.stage == self.stages - 1

    @property
    def name(self) -> str:
        """Returns its name as one word."""
        how = "-eager" * self.eager
        where = f"stage{self.stage}of{self.stages}"
        return f"{self.shape}-{self.layers}-{where}-{self.seqs}seqs-{self.tokens}tokens{how}"


_LLAMA = Case(shape="llama-8b", layers=16)
_MIXTURE = Case(shape="qwen3-30b-a3b", layers=8)
_WIDE = Case(shape="gemma-vocabulary", layers=8)
CASES: Final = (
    _LLAMA,
    replace(_LLAMA, stages=2, layers=32),
    replace(_LLAMA, stage=1, stages=2, layers=32),
    replace(_LLAMA, eager=True),
    _WIDE,
    replace(_WIDE, stages=2, layers=16),
    replace(_LLAMA, seqs=256),
    replace(_LLAMA, tokens=8192),
    _MIXTURE,
    replace(_LLAMA, layers=32),
    replace(_MIXTURE, seqs=256, tokens=8192),
    replace(_WIDE, seqs=256),
    replace(_LLAMA, seqs=16),
    replace(_WIDE, seqs=256, eager=True),
    replace(_MIXTURE, stages=2, layers=16),
)
"""The most informative cases first."""
TINY: Final = (
    Case(shape="tiny-llama", layers=2),
    Case(shape="tiny-llama", layers=4, stages=2),
    Case(shape="tiny-llama", layers=4, stage=1, stages=2),
    Case(shape="tiny-moe", layers=2, eager=True),
)
"""Cases of a dry run without a GPU."""


class DeviceMeter:
    """Reads the memory of the GPU in bytes, by the driver and by torch."""

    def __init__(self) -> None:
        """Reads the used memory before this process has a context."""
        self._handle = _nvml_handle()
        self._before = self._driver_used()

    def _driver_used(self) -> int:
        if self._handle is None:
            return 0
        from vllm.third_party import pynvml

        return int(pynvml.nvmlDeviceGetMemoryInfo(self._handle).used)

    def read(self) -> dict[str, int]:
        """Returns the memory that this process uses now."""
        import torch

        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        return {
            "used": self._driver_used() - self._before if self._handle else total - free,
            "by_cuda": total - free,
            "allocated": torch.cuda.memory_allocated(),
            "reserved": torch.cuda.memory_reserved(),
            "peak_allocated": torch.cuda.max_memory_allocated(),
            "peak_reserved": torch.cuda.max_memory_reserved(),
        }

    def wait(self) -> None:
        """Waits until the GPU has completed all work."""
        import torch

        torch.cuda.synchronize()

    def forget_peak(self) -> None:
        """Resets the peak, and empties torch's cache."""
        import torch

        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


class HostMeter:
    """Reads the resident memory of this process instead, for a dry run without a GPU."""

    def read(self) -> dict[str, int]:
        """Returns the memory that this process uses now."""
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        used = pages * os.sysconf("SC_PAGE_SIZE")
        return dict.fromkeys(
            ("used", "by_cuda", "allocated", "reserved", "peak_allocated", "peak_reserved"), used
        )

    def wait(self) -> None:
        """Does nothing, because a CPU computes synchronously."""

    def forget_peak(self) -> None:
        """Does nothing, because the resident memory has no separate peak here."""


def _nvml_handle() -> Any:
    """Returns NVML's handle of the first visible GPU."""
    try:
        from vllm.third_party import pynvml

        pynvml.nvmlInit()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        if visible.isdecimal():
            return pynvml.nvmlDeviceGetHandleByIndex(int(visible))
        return pynvml.nvmlDeviceGetHandleByUUID(visible)
    except Exception as error:
        print(f"no NVML: {error}", file=sys.stderr)
        return None


def act_as_stage(case: Case, config: Any) -> None:
    """Makes this process's pipeline look like one of several stages.

    Nothing is sent, because only dummy batches run.
    """
    from vllm.distributed.parallel_state import get_pp_group

    group = get_pp_group()
    group.ranks = list(range(-case.stage, case.stages - case.stage))
    group.rank_in_group, group.world_size = case.stage, case.stages
    config.parallel_config.pipeline_parallel_size = case.stages
    config.parallel_config.rank = case.stage


def build_config(case: Case, model: Path) -> Any:
    """Returns vLLM's configuration of a rank, with the settings of the supervisor and the plan."""
    from vllm import EngineArgs

    arguments = EngineArgs(
        model=str(model),
        load_format="dummy",
        dtype="bfloat16",
        max_model_len=max(MAX_MODEL_LEN, case.tokens),
        max_num_seqs=case.seqs,
        max_num_batched_tokens=case.tokens,
        kv_cache_memory_bytes=KV_CACHE_BYTES,
        enforce_eager=case.eager,
        async_scheduling=False,
        disable_custom_all_reduce=True,
        gpu_memory_utilization=0.5,
        kernel_config={"enable_flashinfer_autotune": False},
    )
    return arguments.create_engine_config()


def build_worker(case: Case, config: Any, scratch: Path, *, on_cpu: bool) -> Any:
    """Builds vLLM's worker, which acts as the stage of the case as soon as its process groups exist."""
    if on_cpu:
        from vllm.v1.worker.cpu_worker import CPUWorker as Base

        runner_made = None
    else:
        from vllm.v1.worker.gpu_worker import Worker as Base

        runner_made = "_init_workspace_and_model_runner"

    class StageWorker(Base):
        """A worker of one stage."""

        if runner_made is not None:

            def _init_workspace_and_model_runner(self) -> None:
                act_as_stage(case, config)
                super()._init_workspace_and_model_runner()

    return StageWorker(config, 0, 0, f"file://{scratch}/rendezvous", is_driver_worker=True)


def measure(case: Case, scratch: Path, *, on_cpu: bool) -> dict[str, Any]:
    """Returns the device's memory at each point of one start."""
    import torch

    meter: DeviceMeter | HostMeter = HostMeter() if on_cpu else DeviceMeter()
    points: dict[str, dict[str, int]] = {}
    seconds: dict[str, float] = {}
    began_s = time.monotonic()

    def note(point: str) -> None:
        points[point] = meter.read()
        seconds[point] = round(time.monotonic() - began_s, 1)

    if not on_cpu:
        torch.zeros(1, device="cuda")
    note("context")
    from vllm.config import set_current_vllm_config

    config = build_config(case, make_shape(scratch / "model", case.shape, case.layers))
    if on_cpu:
        note("config")
    with set_current_vllm_config(config):
        worker = build_worker(case, config, scratch, on_cpu=on_cpu)
        worker.init_device()
        if on_cpu:
            act_as_stage(case, config)
        note("device")
        worker.load_model()
        note("loaded")
        meter.forget_peak()
        note("before profile")
        worker.determine_available_memory()
        note("profiled")
        meter.forget_peak()
        note("before cache")
        cache = make_cache(worker, config)
        note("cache")
        worker.compile_or_warm_up_model()
        note("graphs")
        serve_largest(worker.model_runner, case, meter, note)
    weights = sum(
        tensor.numel() * tensor.element_size() for tensor in worker.model_runner.get_model().parameters()
    )
    return {
        "case": asdict(case),
        "name": case.name,
        "points": points,
        "seconds": seconds,
        "weights": weights,
        "kv_cache": cache,
        "device": "CPU" if on_cpu else describe_device(),
        "captured": list(config.compilation_config.cudagraph_capture_sizes or ()),
        "cudagraph_mode": str(config.compilation_config.cudagraph_mode),
    }


def describe_device() -> str:
    """Describes the GPU and the versions."""
    import torch
    import vllm

    found = torch.cuda.get_device_properties(0)
    memory = format_bytes(found.total_memory)
    return f"{found.name}, {memory}, torch {torch.__version__}, vLLM {vllm.__version__}"


def make_cache(worker: Any, config: Any) -> int:
    """Creates the KV cache like the engine's core, and returns its bytes."""
    from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
    from vllm.v1.core.kv_cache_utils import get_kv_cache_configs

    specs = worker.get_kv_cache_spec()
    layouts = [worker.get_supported_kv_cache_layouts()]
    layout = resolve_kv_cache_layout(config, layouts, list(specs.values()))
    worker.set_kv_cache_layout(layout.name)
    (cache,) = get_kv_cache_configs(config, [specs], [KV_CACHE_BYTES])
    cache.kv_cache_layout = config.cache_config.kv_cache_layout
    config.cache_config.num_gpu_blocks = cache.num_blocks
    worker.initialize_from_config(cache)
    return int(sum(tensor.size for tensor in cache.kv_cache_tensors))


def serve_largest(runner: Any, case: Case, meter: "DeviceMeter | HostMeter", note: Any) -> None:
    """Runs the largest batch with attention, a batch of decodes, and the head's work for them."""
    import torch

    def run(tokens: int, **how: bool) -> Any:
        hidden, last = runner._dummy_run(tokens, **how)
        if case.has_head:
            runner._dummy_sampler_run(hidden_states=last)
        # A step waits for the one before. Otherwise, the next batch's inputs would overwrite this batch's.
        meter.wait()
        return hidden

    with torch.inference_mode():
        for _ in range(2):
            hidden = run(case.tokens, force_attention=True)
            run(min(case.seqs, case.tokens), uniform_decode=True)
        note("served")
        if case.has_head:  # a request for the logprobs of its prompt's tokens
            logits = runner.model.compute_logits(hidden[: case.seqs])  # in parts: prompt_logprobs.py
            runner.sampler.compute_logprobs(logits)
            del logits
            note("prompt logprobs")
    meter.forget_peak()
    note("served, cache emptied")


def measure_nccl() -> dict[str, Any]:
    """Returns NCCL's memory on this process's GPU, with as many ranks as torchrun has started."""
    import torch
    import torch.distributed as dist

    meter = DeviceMeter()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(rank)
    torch.zeros(1, device="cuda")
    before = meter.read()
    dist.init_process_group("nccl", rank=rank, world_size=size)
    tensor = torch.ones(1 << 20, device="cuda")
    dist.all_reduce(tensor)
    torch.cuda.synchronize()
    first = meter.read()
    dist.all_gather_into_tensor(torch.empty(size << 20, device="cuda"), tensor)
    other = dist.new_group(list(range(size)), backend="nccl")
    dist.all_reduce(tensor, group=other)
    torch.cuda.synchronize()
    second = meter.read()
    dist.destroy_process_group()
    key = "by_cuda"
    return {
        "name": f"nccl-{size}",
        "one_group": first[key] - before[key] - (first["reserved"] - before["reserved"]),
        "second_group": second[key] - first[key] - (second["reserved"] - first["reserved"]),
    }


def memory_by_part(result: Mapping[str, Any]) -> dict[str, int]:
    """Returns the bytes of each part of a rank besides weights and KV cache.

    A part is the difference between two points of the start.
    """
    points = result["points"]

    def outside(point: str) -> int:
        """Returns the used bytes at a point that torch has not reserved."""
        return int(points[point]["used"] - points[point]["reserved"])

    profile = points["profiled"]["peak_allocated"] - points["before profile"]["allocated"]
    served = points["served"]
    return {
        "context": points["context"]["used"] - points["context"]["reserved"],
        "groups": outside("device") - outside("context"),
        "buffers": points["device"]["allocated"],
        "load_rest": points["loaded"]["allocated"] - points["device"]["allocated"] - result["weights"],
        "activations": profile,
        "kernels": outside("before cache") - outside("device"),
        "graphs": points["graphs"]["used"] - points["cache"]["used"],
        "serving": served["used"] - points["graphs"]["used"],
        "prompt_logprobs": points.get("prompt logprobs", served)["used"] - served["used"],
        "floor": served["used"] - result["weights"] - result["kv_cache"],
        "floor_emptied": points["served, cache emptied"]["used"] - result["weights"] - result["kv_cache"],
    }


def to_markdown(results: Sequence[Mapping[str, Any]]) -> str:
    """Returns the table."""
    rows = [result for result in results if "points" in result]
    lines = []
    if rows:
        heads = list(memory_by_part(rows[0]))
        lines = [f"| case | {' | '.join(heads)} | weights | s |", "|---" * (len(heads) + 3) + "|"]
    for result in rows:
        sizes = " | ".join(f"{size / 2**20:.0f}" for size in memory_by_part(result).values())
        last = list(result["seconds"].values())[-1]
        lines.append(f"| {result['name']} | {sizes} | {format_bytes(result['weights'])} | {last} |")
    for result in results:
        if "one_group" in result:
            lines.append(
                f"{result['name']}: {result['one_group'] / 2**20:.0f} MiB, a second group "
                f"{result['second_group'] / 2**20:.0f} MiB more"
            )
        elif "error" in result:
            lines.append(f"FAILED {result['name']}: {result['error']}")
    devices = dict.fromkeys(result["device"] for result in rows)
    return "\n".join([*devices, "in MiB:", *lines])


def run_child(arguments: Sequence[str], name: str, env: Mapping[str, str], limit_s: float) -> dict[str, Any]:
    """Runs a process of this module. Returns its result, or the reason why there is none."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", __spec__.name if __spec__ else __name__, *arguments],
            env={**os.environ, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"name": name, "error": f"no result after {limit_s:.0f} s"}
    for line in done.stdout.splitlines():
        if line.startswith(RESULT):
            found: dict[str, Any] = json.loads(line.removeprefix(RESULT))
            return found
    print(done.stdout[-6000:], file=sys.stderr)
    return {"name": name, "error": f"exit {done.returncode}: {done.stdout.strip()[-400:]}"}


def child_env(*, on_cpu: bool) -> dict[str, str]:
    """Returns the variables that the supervisor sets for a rank and that matter here."""
    return {
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_PLUGINS": "",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        **({"VLLM_TARGET_DEVICE": "cpu", "VLLM_CPU_OMP_THREADS_BIND": "nobind"} if on_cpu else {}),
    }


def run_all(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns a result for each case for which there was time, and for NCCL."""
    end_s = time.monotonic() + options.seconds
    cases = [case for case in (TINY if options.on_cpu else CASES) if _is_wanted(case, options.cases)]
    results: list[dict[str, Any]] = []
    env = child_env(on_cpu=options.on_cpu)

    def keep(result: dict[str, Any]) -> None:
        results.append(result)
        print(json.dumps({"name": result["name"], **_in_mib(result)}), flush=True)
        if options.json:
            options.json.write_text(json.dumps(results, indent=1))

    if not options.on_cpu:
        keep(run_nccl(options.gpus, env))
    for case in cases:
        left_s = end_s - time.monotonic()
        if left_s < 60:
            print(f"NOT RUN, no time left: {case.name}", flush=True)
            continue
        keep(
            run_child(
                ["--child", json.dumps(asdict(case)), *(["--on-cpu"] if options.on_cpu else [])],
                case.name,
                env,
                min(CASE_TIMEOUT_S, left_s),
            )
        )
    return results


def run_nccl(gpus: int, env: Mapping[str, str]) -> dict[str, Any]:
    """Returns NCCL's memory on each of this number of GPUs, from rank 0."""
    with tempfile.TemporaryDirectory(prefix="hi-") as scratch:
        rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29533", "WORLD_SIZE": str(gpus)}
        others = [
            subprocess.Popen(
                [sys.executable, "-m", __spec__.name if __spec__ else __name__, "--child", "nccl"],
                env={**os.environ, **env, **rendezvous, "RANK": str(rank)},
                stdout=(Path(scratch) / f"{rank}.log").open("w"),
                stderr=subprocess.STDOUT,
            )
            for rank in range(1, gpus)
        ]
        try:
            return run_child(["--child", "nccl"], f"nccl-{gpus}", {**env, **rendezvous, "RANK": "0"}, 120.0)
        finally:
            for process in others:
                process.kill()
                process.wait()


def _is_wanted(case: Case, asked: str) -> bool:
    return not asked or any(word in case.name for word in asked.split(","))


def _in_mib(result: Mapping[str, Any]) -> dict[str, Any]:
    if "points" not in result:
        return {key: value for key, value in result.items() if key != "name"}
    return {name: round(size / 2**20) for name, size in memory_by_part(result).items()}


def main() -> int:
    """Runs the benchmark; see the module."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.gpu_floor")
    parser.add_argument("--cases", default="", help="run only cases whose names contain one of these words")
    parser.add_argument("--seconds", type=float, default=560.0, help="begin no case after this time")
    parser.add_argument("--gpus", type=int, default=1, help="ranks of the NCCL group that is measured")
    parser.add_argument("--json", type=Path, help="write all numbers here")
    parser.add_argument("--on-cpu", action="store_true", help="a dry run on tiny shapes without a GPU")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child == "nccl":
        print(RESULT + json.dumps(measure_nccl()), flush=True)
        return 0
    if options.child:
        case = Case(**json.loads(options.child))
        with tempfile.TemporaryDirectory(prefix="hi-") as scratch:
            print(RESULT + json.dumps(measure(case, Path(scratch), on_cpu=options.on_cpu)), flush=True)
        os._exit(0)  # vLLM's threads are no longer needed
    results = run_all(options)
    print(to_markdown(results))
    return int(any("error" in result for result in results))


if __name__ == "__main__":
    raise SystemExit(main())
