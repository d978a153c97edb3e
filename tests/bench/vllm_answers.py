"""Compares vLLM's own answers about models with `heteroinfer-worker inspect`: time, memory and differences.

    python -m tests.bench.vllm_answers [--configs DIR ...] [--rounds 3] [--write FILE]

Asks vLLM's registry and ModelConfig in the worker's environment, on the models of tests/shapes and on every
DIR/*/config.json. Seconds are wall time of a process; its memory is the proportional set size (PSS) of the
process and its children together, and the largest resident set of one, both sampled. "Cold" drops the
pages of the worker's environment from the file cache before each run, as far as no other process maps them.
"""

import argparse
import datetime
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.gpu.machine import describe_cpus
from tests.shapes.corpus import SHAPES, write_shape

REPOSITORY = Path(__file__).parents[2]
WORKER_PYTHON = REPOSITORY / ".venv-worker/bin/python"
MIB = 2**20
SAMPLE_S = 0.05
ONE = "Qwen3-30B-A3B"
"""The model for runs with one model, or the first model if there is none with this name."""
CORES = (1, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One process with its children: time, CPU time, peak memory of all and of one, and bytes read."""

    seconds: float
    cpu_s: float
    tree_bytes: int
    process_bytes: int
    disk_bytes: int
    output: str


def run(command: Sequence[str], *, cores: int, cache: Path) -> Run:
    """Runs a command of the worker's Python on this number of cores.

    `cache` stores vLLM's answers about classes.
    """
    paths = [str(REPOSITORY / "worker_image/src"), str(REPOSITORY / "operator/src"), str(REPOSITORY)]
    env = {
        "PATH": os.environ["PATH"],
        "HOME": str(cache),
        "PYTHONPATH": os.pathsep.join(paths),
        "HF_HUB_OFFLINE": "1",
        "VLLM_CACHE_ROOT": str(cache),
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_PLUGINS": "",
    }
    began = time.monotonic()
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            ["taskset", "-c", f"0-{cores - 1}", str(WORKER_PYTHON), *command],
            env=env, cwd=REPOSITORY, stdout=output, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        sampler = _TreeMemory(process.pid)
        sampler.start()
        _, _, usage = os.wait4(process.pid, 0)
        seconds = time.monotonic() - began
        sampler.stop()
        output.seek(0)
        return Run(
            seconds=seconds,
            cpu_s=usage.ru_utime + usage.ru_stime,
            tree_bytes=sampler.tree_bytes,
            process_bytes=sampler.process_bytes,
            disk_bytes=usage.ru_inblock * 512,
            output=output.read(),
        )


class _TreeMemory(threading.Thread):
    """Samples the memory of a process and its descendants, and the largest resident set of one of them.

    It does not use `ru_maxrss`, which counts the parent's pages before the program is loaded.
    """

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._pid = pid
        self._ended = threading.Event()
        self.tree_bytes = self.process_bytes = 0

    def run(self) -> None:
        while not self._ended.wait(SAMPLE_S):
            pids = list(_tree(self._pid))
            together = sum(_bytes(pid, "smaps_rollup", "Pss:") for pid in pids)
            self.tree_bytes = max(self.tree_bytes, together)
            largest = max(_bytes(pid, "status", "VmHWM:") for pid in pids)
            self.process_bytes = max(self.process_bytes, largest)

    def stop(self) -> None:
        self._ended.set()
        self.join()


def _tree(pid: int) -> Iterator[int]:
    yield pid
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        children = [child for task in tasks for child in (task / "children").read_text().split()]
    except OSError:
        return
    for child in children:
        yield from _tree(int(child))


def _bytes(pid: int, file: str, field: str) -> int:
    try:
        lines = Path(f"/proc/{pid}/{file}").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def drop_file_cache() -> None:
    """Drops the pages of the worker's environment that no process maps from the file cache."""
    for folder, _, files in os.walk((REPOSITORY / ".venv-worker").resolve()):
        for name in files:
            path = Path(folder) / name
            if path.is_file():
                descriptor = os.open(path, os.O_RDONLY)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(descriptor)


def ask(directory: Path) -> dict[str, Any]:
    """Returns the answers of vLLM's registry and ModelConfig. Imports vLLM."""
    from vllm.config import ModelConfig

    config = ModelConfig(model=str(directory), skip_tokenizer_init=True)
    text = config.hf_text_config
    types = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None)
    return {
        "architecture": config.architecture,
        "generates": config.runner_type == "generate",
        "pipeline": bool(config.is_pp_supported),
        "dtype": str(config.dtype).removeprefix("torch."),
        "quantization": config.quantization or "",
        "layers": config.get_total_num_hidden_layers(),
        "hidden size": config.get_hidden_size(),
        "heads": config.model_arch_config.total_num_attention_heads,
        "KV heads": config.get_total_num_kv_heads(),
        "head size": config.get_head_size(),
        "vocabulary": config.get_vocab_size(),
        "longest": config.max_model_len,
        "experts": config.get_num_experts(),
        "experts of a token": config.get_num_experts_per_tok(),
        "latents": config.is_deepseek_mla,
        "window": config.get_sliding_window() or 0,
        "layer types": list(types) if types else None,
        "states": config.has_inner_state,
    }


def read(directory: Path) -> dict[str, Any]:
    """Returns our tables' answers to the same questions, from config.json alone."""
    from heteroinfer_contract.model import AttentionKind
    from heteroinfer_contract.model.attention import layer_attention
    from heteroinfer_contract.model.config import CONFIG_FILE, from_params, text_config
    from heteroinfer_contract.model.scheme import read_method
    from heteroinfer_operator.vllm_support import listed_architectures

    own = directory / CONFIG_FILE
    if own.exists():
        config = json.loads(own.read_text())
    else:
        config = from_params(json.loads((directory / "params.json").read_text()))
    text = text_config(config)
    kinds = layer_attention(text)
    architecture = text["architectures"][0]
    heads = text["num_attention_heads"]
    latents = any(kind.attention in (AttentionKind.LATENT, AttentionKind.SPARSE) for kind in kinds)
    experts = text.get("num_experts", 0)
    return {
        "architecture": architecture,
        "generates": architecture in listed_architectures.GENERATES | listed_architectures.BY_TRANSFORMERS,
        "pipeline": architecture not in listed_architectures.NO_PIPELINE,
        "dtype": text.get("dtype"),
        "quantization": read_method(config, text),
        "layers": text["num_hidden_layers"],
        "hidden size": text["hidden_size"],
        "heads": heads,
        "KV heads": text.get("num_key_value_heads", heads),
        "head size": kinds[0].kv_width if latents else text.get("head_dim", text["hidden_size"] // heads),
        "vocabulary": text["vocab_size"],
        "longest": text["max_position_embeddings"],
        "experts": experts,
        "experts of a token": text.get("num_experts_per_tok", 0) if experts else 0,
        "latents": latents,
        "window": max((kind.window for kind in kinds if kind.attention is AttentionKind.WINDOW), default=0),
        "layer types": [kind.attention.value for kind in kinds],
        "states": any(kind.conv_elements or kind.state_elements for kind in kinds),
    }


_TYPES = {
    "full_attention": "Full",
    "attention": "Full",
    "sliding_attention": "Window",
    "linear_attention": "Linear",
    "chunked_attention": "Chunked",
    "conv": "Linear",
    "mamba": "Linear",
    "moe": "None",
    "mlp": "None",
}


def is_same(fact: str, vllm: Any, ours: Any) -> bool | None:
    """Returns whether two answers are equal, or None if vLLM's config has no answer."""
    if fact != "layer types":
        return bool(vllm == ours)
    if vllm is None:
        return None
    return [_TYPES.get(each, each) for each in vllm][: len(ours)] == ours


def ask_all(directories: Sequence[Path], *, compare: bool) -> int:
    """Prints a JSON line for the imports, and one for each model, in the measured process.

    For a comparison, it imports classes that are not cached in this process. vLLM uses a process for each.
    """
    began = time.monotonic()
    from vllm.config import ModelConfig
    from vllm.model_executor.models import registry

    assert ModelConfig is not None
    if compare:
        registry._run_in_subprocess = lambda function: function()
    print(json.dumps({"imports_s": time.monotonic() - began}), flush=True)
    for directory in directories:
        began = time.monotonic()
        line: dict[str, Any] = {"name": directory.name}
        try:
            line["vllm"] = ask(directory)
        except Exception as error:  # vLLM's message about a model that it refuses, as data
            text = " ".join(str(error).split())
            line["error"] = f"{type(error).__name__}: {text.partition('[type=')[0]}"[:300]
        line["seconds"] = time.monotonic() - began
        if compare:
            try:
                line["ours"] = read(directory)
            except Exception as error:  # the same for our tables
                line["ours_error"] = f"{type(error).__name__}: {error}"[:300]
        print(json.dumps(line), flush=True)
    return 0


def _lines(done: Run) -> list[dict[str, Any]]:
    return [json.loads(line) for line in done.output.splitlines() if line.startswith("{")]


def measure(directories: Sequence[Path], rounds: int, folder: Path) -> Iterator[str]:
    """Yields the lines of the result."""
    one = next((each for each in directories if each.name == ONE), directories[0])
    module = ["-m", "tests.bench.vllm_answers", "--ask"]
    inspect = ["-m", "vllm_heteroinfer.launch.cli", "inspect", "--model"]
    filled = folder / "filled"
    run([*module, str(one)], cores=max(CORES), cache=filled)
    caches = iter(range(10**6))

    def empty() -> Path:
        return folder / f"empty-{next(caches)}"

    cases: dict[str, tuple[list[str], Callable[[], Path]]] = {
        "`inspect` as it is": ([*inspect, str(one)], empty),
        "imports of vLLM alone": (module, empty),
        "a model, classes not cached": ([*module, str(one)], empty),
        "a model, its class cached": ([*module, str(one)], lambda: filled),
    }
    yield "| process | cores | file cache | seconds | CPU seconds | all, MiB | one process, MiB | disk, MiB |"
    yield "|---|---|---|---|---|---|---|---|"
    for name, (command, cache) in cases.items():
        for cores in CORES:
            for is_cold in (False, True):
                runs = []
                for _ in range(rounds):
                    if is_cold:
                        drop_file_cache()
                    runs.append(run(command, cores=cores, cache=cache()))
                assert all("{" in each.output for each in runs), (name, command)
                yield _row(name, cores, is_cold, runs)
    built = run(["-m", "tests.shapes.oracle", one.name], cores=max(CORES), cache=filled)
    assert "weights" in built.output, built.output
    yield _row("a model built without weights, in two stages", max(CORES), False, [built])


def _row(name: str, cores: int, is_cold: bool, runs: Sequence[Run]) -> str:
    seconds = [each.seconds for each in runs]
    return (
        f"| {name} | {cores} | {'cold' if is_cold else 'warm'} "
        f"| {statistics.median(seconds):.1f} ({min(seconds):.1f}-{max(seconds):.1f}) "
        f"| {statistics.median(each.cpu_s for each in runs):.1f} "
        f"| {max(each.tree_bytes for each in runs) / MIB:.0f} "
        f"| {max(each.process_bytes for each in runs) / MIB:.0f} "
        f"| {max(each.disk_bytes for each in runs) / MIB:.0f} |"
    )


def _one_process_for_all(command: Sequence[str], cache: Path) -> Iterator[str]:
    """Yields times and memory of one process for all models, then the comparison of the answers."""
    for name in ("classes imported in it", "classes cached"):
        done = run(command, cores=max(CORES), cache=cache)
        lines = [line for line in _lines(done) if "name" in line]
        seconds = sorted(line["seconds"] for line in lines)
        yield (
            f"One process for {len(lines)} models, {name}: {done.seconds:.1f} s in all; a model "
            f"{statistics.median(seconds):.2f} s (median), {seconds[-1]:.2f} s (longest); "
            f"{done.tree_bytes / MIB:.0f} MiB with its children."
        )
    yield ""
    yield from compare(lines)


def _brief(answer: Any) -> str:
    if not isinstance(answer, list):
        return str(answer)
    return " ".join(f"{number} {name}" for name, number in Counter(answer).items())


def compare(lines: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yields which answers are equal, and which models vLLM refuses."""
    both = [line for line in lines if "vllm" in line and "ours" in line]
    answered = [sum(who in line for line in lines) for who in ("vllm", "ours")]
    yield f"Of {len(lines)} models vLLM answers for {answered[0]}, our tables for {answered[1]}:"
    yield ""
    yield "| fact | same | not in vLLM's config | differs (vLLM / ours) |"
    yield "|---|---|---|---|"
    for fact in both[0]["vllm"] if both else ():
        found = {line["name"]: is_same(fact, line["vllm"][fact], line["ours"][fact]) for line in both}
        counts = Counter(found.values())
        differs = [
            f"{line['name']} {_brief(line['vllm'][fact])} / {_brief(line['ours'][fact])}"
            for line in both
            if found[line["name"]] is False
        ]
        yield f"| {fact} | {counts[True]} | {counts[None]} | {'; '.join(differs)} |"
    yield ""
    yield "| model | refused |"
    yield "|---|---|"
    for line in lines:
        for who, key in (("vLLM", "error"), ("ours", "ours_error")):
            if key in line:
                yield f"| {line['name']} | {who}: {line[key]} |".replace("\n", " ")


def main() -> int:
    """Measures, prints the result and writes it to a file. Returns 0."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--configs", type=Path, action="append", default=[], metavar="DIR")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", type=Path, metavar="FILE")
    parser.add_argument("--only-compare", action="store_true")
    parser.add_argument("--ask", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--compare", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("directories", type=Path, nargs="*", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.ask:
        return ask_all(arguments.directories, compare=arguments.compare)
    kept = [f"Measured on {datetime.date.today()}, {describe_cpus()}."]  # noqa: DTZ011 - of this machine
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        directories = [write_shape(shape, folder / "shapes" / shape.name) for shape in SHAPES]
        for configs in arguments.configs:
            directories += sorted(path.parent for path in configs.glob("*/config.json"))
        command = ["-m", "tests.bench.vllm_answers", "--ask", "--compare", *map(str, directories)]
        found = _one_process_for_all(command, folder / "all")
        if not arguments.only_compare:
            found = itertools.chain(found, [""], measure(directories, arguments.rounds, folder))
        for line in found:
            print(line, flush=True)
            kept.append(line)
    if arguments.write:
        arguments.write.write_text("\n".join(kept) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
