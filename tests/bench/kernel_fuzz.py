"""Compares random layers with coded weights, linear and of experts, with float64.

    .venv-worker/bin/python -m tests.bench.kernel_fuzz [--layers 1000] [--seconds 60] [--seed 1] [--first 0]
        [--threads 2] [--jobs 16] [--asan] [--library FILE] [--totals FILE]

Weights, inputs and outputs begin or end at pages that the process must not touch. Layers have random formats,
sizes, rows, threads, elements, activations, biases and settings of the kernels. Some have inputs or scales
that are denormal, huge, infinite or NaN.

The program prints the number of layers, and the worst error of each format with float32 inputs. The error of
a linear layer is a share of 2^-20 of the sum of the absolute values of all products; that of experts is a
share of 2^-14 of this sum. An output beyond its limit ends the run with its case. Each layer has its own
seed, so `--first` and `--layers` repeat it. After a crash, the last printed number shows the layer.

`--totals` adds the results of several runs in a file. Use another `--seed` for each of these runs. `--jobs`
divides the layers into ranges, one for each process. A process that reaches `--seconds` before the end of its
range counts only the layers that it checked. `--asan` builds the kernels with AddressSanitizer, and uses
plain memory instead of pages. On a host without a compiler, use a library that was built elsewhere:
`--build-asan FILE` writes a library with the runtime of AddressSanitizer beside it, and
`--asan --library FILE` uses both. Needs the worker's Python.
"""

import argparse
import ctypes
import faulthandler
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

_PAGE: Final = 4096
_ARENA: Final = 4 << 20
"""Bytes between two guard pages."""
_CANARY: Final = 0xA5
_NEAR: Final = 256
"""Bytes beside an output that must not change."""
_RUNTIME: Final = "libasan.so"
_WITHOUT_END: Final = 10**9
"""Number of layers between the first layers of two jobs, if `--layers` sets no limit."""
_KINDS: Final = (
    *("plain",) * 16,
    *("denormal", "huge", "x inf", "x nan", "scale nan", "code nan"),
)
_WHOLE: Final = frozenset({"plain", "denormal", "huge"})
"""Kinds of layers whose outputs are all finite."""
_ACTIVATIONS: Final = ("silu", "gelu", "gelu_tanh", "gpt-oss", "limited", "limited after", "relu2")
_ROWS: Final = (1, 1, 1, 2, 3, 4, 5, 6, 7, 12, 13, 30, 64, 65, 140)


class Arena:
    """Memory between two guard pages, for one tensor at a time."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
        libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        # PROT_READ | PROT_WRITE, and MAP_PRIVATE | MAP_ANONYMOUS
        address = libc.mmap(None, _ARENA + 2 * _PAGE, 3, 0x22, -1, 0)
        for guard in (address, address + _PAGE + _ARENA):
            if libc.mprotect(guard, _PAGE, 0):
                raise OSError(ctypes.get_errno(), "mprotect")
        self._memory = (ctypes.c_uint8 * _ARENA).from_address(address + _PAGE)

    def place(self, tensor: Any, *, at_end: bool) -> Any:
        """Returns a copy of the tensor that ends, or begins, at a guard page.

        Canaries are on its other side.
        """
        import torch

        size = tensor.nbytes
        if not size or size + _NEAR > _ARENA:
            return tensor
        start = _ARENA - size if at_end else 0
        self._near = start - _NEAR if at_end else size
        ctypes.memset(ctypes.addressof(self._memory) + self._near, _CANARY, _NEAR)
        part = torch.frombuffer(self._memory, dtype=torch.uint8)[start : start + size]
        return part.view(tensor.dtype).view(tensor.shape).copy_(tensor)

    def is_clean(self) -> bool:
        """Returns whether the canaries of the last tensor are unchanged."""
        return set(self._memory[self._near : self._near + _NEAR]) == {_CANARY}


class Fuzz:
    """Draws layers, computes them and compares the results."""

    def __init__(self, seed: int, *, guarded: bool) -> None:
        from tests.integration.kernels.coded_probe import prepare
        from tests.integration.kernels.coded_weights import FORMATS

        self.seed, self._formats = seed, tuple(FORMATS)
        self.library = prepare()
        self._arenas = [Arena() for _ in range(4)] if guarded else []
        self.worst: dict[str, dict[str, float]] = {"linear": {}, "experts": {}}

    def draw(self, number: int, most_threads: int) -> dict[str, Any]:
        """Draws the case of a layer. The same number always gives the same case."""
        draw = random.Random(f"{self.seed} {number}")
        path = draw.choice(self.library.coded_paths)
        any_element = path in {"avx512f", "avx2"}
        case = {
            "seed": draw.randrange(2**31),
            "what": "experts" if draw.random() < 0.15 else "linear",
            "format": draw.choice(self._formats),
            "path": path,
            "dtype": draw.choice(("bf16", "float16", "float32", "float32")) if any_element else "bf16",
            "rows": draw.choice(_ROWS),
            "streams": draw.choice((-1, 1, 2, 4)),
            "prefetch": draw.choice((-1, 0, 1, 8)),
            # With several team sizes, small layers would spend more time to start threads than to compute.
            "threads": 1 + number // 200 % most_threads,
            "bias": draw.random() < 0.3,
            "kind": draw.choice(_KINDS),
            "at_end": draw.random() < 0.7,
        }
        if case["what"] == "experts":
            experts = draw.choice((1, 2, 3, 5))
            case |= {
                "activation": draw.choice(_ACTIVATIONS),
                "rows": min(case["rows"], 30),
                "hidden": draw.choice((32, 64, 96, 160)),
                "inner": draw.choice((32, 64, 96)),
                "experts": experts,
                "topk": draw.randint(1, min(experts, 3)),
            }
        else:
            case |= {
                "columns": draw.choice((1, 2, 31, 32, 33, 64, 96, 200, 1000 if draw.random() < 0.1 else 70)),
                "inputs": draw.choice((2, 16, 30, 32, 48, 64, 96, 128, 160, 256, 416, 1024)),
                "stride": draw.choice((0, 0, 3)),
            }
        return case

    def check(self, case: dict[str, Any]) -> str:
        """Computes a layer. Returns the fault as text, or ""."""
        return self._experts(case) if case["what"] == "experts" else self._linear(case)

    def _place(self, tensors: Sequence[Any], case: dict[str, Any]) -> list[Any]:
        if not self._arenas:
            return list(tensors)
        return [
            each if each is None else arena.place(each, at_end=case["at_end"])
            for arena, each in zip(self._arenas, tensors, strict=True)
        ]

    def _note(self, case: dict[str, Any], error: float) -> None:
        found = self.worst[case["what"]]
        if case["dtype"] == "float32":
            found[case["format"]] = max(found.get(case["format"], 0.0), error)

    def _linear(self, case: dict[str, Any]) -> str:
        """Computes a linear layer with guarded memory. Returns the fault as text, or ""."""
        import torch

        from tests.integration.kernels.coded_probe import Product, tune
        from vllm_heteroinfer.kernels import coded

        product = Product(case, case["seed"])
        kind = _spoil(product, case)
        packed = coded.pack(self.library, product.weight)
        y = torch.full((case["rows"], case["columns"]), 7.0).to(product.x.dtype)
        whole = product.x._base if product.x._base is not None else product.x
        weights, x, y, bias = self._place((packed.packed, whole, y, product.bias), case)
        native = packed.format.to_native()
        torch.set_num_threads(case["threads"])
        tune(case)
        self.library.calls.heteroinfer_coded_linear(
            *(y.data_ptr(), y.stride(0), x.data_ptr(), x.stride(0), coded.ELEMENTS[x.dtype]),
            *(weights.data_ptr(), ctypes.addressof(native), None if bias is None else bias.data_ptr()),
            *(case["rows"], case["columns"], case["inputs"]),
        )
        tune({})
        if self._arenas and not self._arenas[2].is_clean():
            return "wrote beside its output"
        if kind not in _WHOLE:
            return "" if product.is_number_where_exact(y) else f"{kind}: other outputs are numbers"
        error = product.error(y)
        if kind == "plain":
            self._note(case, error)
        return "" if error <= 1 else f"error {error:.3g} of its limit"

    def _experts(self, case: dict[str, Any]) -> str:
        """Computes a layer of experts with guarded memory. Returns the fault as text, or ""."""
        import torch

        from tests.integration.kernels.coded_experts_probe import Layer

        layer = Layer(case, case["seed"])
        spoiled = case["rows"] // 2 if case["kind"] not in _WHOLE and case["rows"] > 1 else None
        if spoiled is not None:
            layer.x[spoiled, 5] = torch.nan if case["kind"] == "x nan" else torch.inf
        parts = [part.packed for part in layer.parts]
        parts[0], layer.x, layer.y, parts[1] = self._place((parts[0], layer.x, layer.y, parts[1]), case)
        for part, packed in zip(layer.parts, parts, strict=True):
            object.__setattr__(part, "packed", packed)
        layer.compute()
        if self._arenas and not self._arenas[2].is_clean():
            return "wrote beside its output"
        errors = layer.errors()
        if spoiled is not None:  # no other row may be affected
            errors[spoiled] = 0
        error = float(errors.max())
        self._note(case, error)
        return "" if error <= 1 else f"error {error:.3g} of its limit"


def _spoil(product: Any, case: dict[str, Any]) -> str:
    """Changes a drawn layer to its kind. Returns "plain" if the layer cannot have this kind."""
    import torch

    kind, weight = case["kind"], product.weight
    exact = case["path"] in {"avx512f", "avx2"}
    if kind == "denormal" and exact and case["dtype"] != "float16":
        product.x.mul_(2.0**-120)
    elif kind == "huge" and case["dtype"] != "float16":
        product.x.mul_(2.0**60)
    elif kind == "x nan" or (kind == "x inf" and exact and weight.zeros is None):
        product.x[-1, -1] = torch.nan if kind == "x nan" else torch.inf
    elif kind == "scale nan" and weight.scales is not None:
        floats = weight.scales.is_floating_point()
        weight.scales[-1, -1] = torch.nan if floats else {5: 255, 6: 127}[int(weight.format.scale)]
    elif kind == "code nan" and weight.format.code == 2:  # e4m3
        weight.codes[-1, -1] = 255
    else:
        return "plain"
    return str(kind)


def build_with_asan(library: Path) -> None:
    """Compiles the kernels with AddressSanitizer, and copies its runtime beside the library."""
    from vllm_heteroinfer.kernels import build

    extra = ("-fsanitize=address", "-fno-omit-frame-pointer", "-g1")
    with tempfile.TemporaryDirectory() as folder:
        running = []
        for source in sorted(build.SOURCE.glob("*.cpp")):
            made = Path(folder) / f"{source.stem}.o"
            flags = [flag for flag in build.FLAGS if flag != "-O3"]
            command = [build.COMPILER, *flags, "-O1", *extra, "-c", str(source), "-o", str(made)]
            running.append(subprocess.Popen(command))
        if any(process.wait() for process in running):
            raise SystemExit("the kernels do not compile with AddressSanitizer")
        objects = [str(file) for file in Path(folder).glob("*.o")]
        subprocess.run(
            [build.COMPILER, "-shared", "-fsanitize=address", *objects, "-o", str(library)], check=True
        )
    runtime = subprocess.run(
        [build.COMPILER, f"-print-file-name={_RUNTIME}"], check=True, capture_output=True, text=True
    ).stdout.strip()
    shutil.copy(Path(runtime).resolve(), library.with_name(_RUNTIME))


def _run_with_asan(arguments: Sequence[str], library: Path | None) -> int:
    """Runs this program again with AddressSanitizer. Builds the library if none is given."""
    with tempfile.TemporaryDirectory() as folder:
        if library is None:
            library = Path(folder) / "library.so"
            build_with_asan(library)
            arguments = [*arguments, "--library", str(library)]
        runtime = library.with_name(_RUNTIME).resolve()
        variables = {"LD_PRELOAD": str(runtime), "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0"}
        command = [sys.executable, "-m", "tests.bench.kernel_fuzz", *arguments, "--plain-memory"]
        return subprocess.run(command, check=False, env={**os.environ, **variables}).returncode


def _run_jobs(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Runs a process for each range of layers. Returns 1, and shows the output, if one of them fails.

    The processes end when the first of them fails.
    """
    each = -(-options.layers // options.jobs) if options.layers else 0
    with tempfile.TemporaryDirectory() as scratch:
        folder, running = Path(scratch), []
        for job in range(options.jobs):
            first = options.first + job * (each or _WITHOUT_END)
            count = min(each, max(0, options.first + options.layers - first))
            if each and not count:
                continue
            command = [sys.executable, "-m", "tests.bench.kernel_fuzz", *arguments, "--jobs", "1"]
            command += [
                "--first",
                str(first),
                "--layers",
                str(count),
                "--totals",
                str(folder / f"{job}.json"),
            ]
            with (folder / f"{job}.log").open("wb") as log:
                # More threads run than the host has cores, so no thread may spin while it waits.
                env = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
                running.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=env))
        waiting = dict(enumerate(running))
        while waiting:
            time.sleep(0.2)
            for job in [job for job, process in waiting.items() if process.poll() is not None]:
                if waiting.pop(job).returncode:
                    for process in running:
                        process.kill()
                        process.wait()
                    print(f"job {job} failed:\n{(folder / f'{job}.log').read_text()[-8000:]}")
                    return 1
        totals = _no_totals()
        for file in folder.glob("*.json"):
            _add(totals, json.loads(file.read_text()))
    _print_totals(totals)
    if options.totals:
        _add_to_file(options.totals, totals)
    return 0


def _no_totals() -> dict[str, Any]:
    return {"layers": 0, "cpu_seconds": 0.0, "linear": {}, "experts": {}}


def _add(totals: dict[str, Any], more: dict[str, Any]) -> None:
    """Adds the layers and CPU time of a run to the totals, and keeps the worst errors."""
    for key in ("layers", "cpu_seconds"):
        totals[key] = totals.get(key, 0) + more[key]
    for what in ("linear", "experts"):
        for name, error in more[what].items():
            totals[what][name] = max(totals[what].get(name, 0.0), error)


def _add_to_file(path: Path, more: dict[str, Any]) -> None:
    totals = json.loads(path.read_text()) if path.exists() else _no_totals()
    _add(totals, more)
    path.write_text(json.dumps(totals, indent=1))


def _print_totals(totals: dict[str, Any]) -> None:
    print(f"{totals['layers']} layers, {totals['cpu_seconds']:.0f} s of CPU time")
    for what in ("linear", "experts"):
        worst = totals[what]
        print(f"{what}: " + ", ".join(f"{name} {worst[name]:.2f}" for name in sorted(worst)))


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the worst errors. Returns 1 if an error exceeds its limit."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=0, help="number of layers; 0 for no limit")
    parser.add_argument("--seconds", type=float, default=60.0, help="end after this time")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first layer")
    parser.add_argument("--threads", type=int, default=2, help="largest number of threads of a layer")
    parser.add_argument("--totals", type=Path, help="JSON file with the sums of all runs")
    parser.add_argument("--library", type=Path, help="library of kernels; default: the package's own")
    parser.add_argument("--plain-memory", action="store_true", help="use plain memory without guard pages")
    parser.add_argument("--asan", action="store_true", help="use kernels with AddressSanitizer")
    parser.add_argument("--build-asan", type=Path, metavar="FILE", help="only build these kernels")
    parser.add_argument("--jobs", type=int, default=1, help="number of processes")
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = parser.parse_args(arguments)
    if options.build_asan:
        build_with_asan(options.build_asan)
        return 0
    if options.asan:
        return _run_with_asan([each for each in arguments if each != "--asan"], options.library)
    if options.jobs > 1:
        return _run_jobs(options, arguments)
    sys.argv[1:] = [str(options.library)] if options.library else []  # the probes read this variable
    faulthandler.enable()
    fuzz = Fuzz(options.seed, guarded=not options.plain_memory)
    number, end, started = options.first, time.monotonic() + options.seconds, time.process_time()
    while time.monotonic() < end and not 0 < options.layers <= number - options.first:
        case = fuzz.draw(number, options.threads)
        if number % 1000 == options.first % 1000:
            print(f"layer {number}", flush=True)
        wrong = fuzz.check(case)
        if wrong:
            print(f"layer {number}: {wrong}: {case}")
            return 1
        number += 1
    found = {"layers": number - options.first, "cpu_seconds": time.process_time() - started, **fuzz.worst}
    if options.totals:
        _add_to_file(options.totals, found)
    print(", ".join(fuzz.library.coded_paths))
    _print_totals(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
