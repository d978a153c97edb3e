"""Finds the instruction sets of this CPU, and builds the kernels with emulated instructions in plain C++."""

import hashlib
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tests.cluster.folders import cache_folder, locked
from vllm_heteroinfer.kernels import build

SETS: Final = {
    "avx512f": {"avx512f"},
    "avx512_bf16": {"avx512f", "avx512bw", "avx512vl", "avx512_bf16"},
    "amx_bf16": {"avx512f", "amx_tile", "amx_bf16"},
}
"""For each path of the kernels, the required flags in /proc/cpuinfo."""
CODED_SETS: Final = {
    "avx512f": {"avx512f"},
    "avx512_bf16": {"avx512f", "avx512bw", "avx512vl", "avx512_bf16", "avx512vbmi"},
    "amx_bf16": {"avx512f", "avx512bw", "avx512vl", "avx512_bf16", "avx512vbmi", "amx_tile", "amx_bf16"},
    "avx2": {"avx2", "fma", "f16c"},
}
"""For each path of the kernels for coded weights, the required flags in /proc/cpuinfo."""
EMULATION: Final = Path(__file__).parent / "emulated_instructions.h"

_FLAGS: Final = (
    "-std=c++17",
    "-O1",
    "-fPIC",
    "-fvisibility=hidden",
    "-fopenmp",
    "-w",
    "-mavx2",
    "-mfma",
    "-mf16c",
)


def of_this_cpu(sets: Mapping[str, set[str]] = SETS) -> list[str]:
    """Returns the kernels' paths that this CPU supports, by the flags in /proc/cpuinfo."""
    line = next(row for row in Path("/proc/cpuinfo").read_text().splitlines() if row.startswith("flags"))
    flags = set(line.split())
    return [path for path, needed in sets.items() if needed <= flags]


def emulated_library(*, cpu_has_them: bool = True) -> Path:
    """Builds the library with every instruction beyond AVX2 emulated, once for its sources.

    Args:
        cpu_has_them: whether the library finds all instruction sets on its CPU, or none.
    """
    compiler = subprocess.run(["g++", "--version"], check=True, capture_output=True, timeout=60).stdout
    digest = hashlib.sha256(repr((compiler, _FLAGS, build.LINK_FLAGS)).encode())
    for source in sorted([*build.SOURCE.iterdir(), EMULATION, Path(__file__)]):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    folder, what = cache_folder() / "emulated", "has" if cpu_has_them else "lacks"
    library = folder / f"{what}-{digest.hexdigest()[:16]}.so"
    with locked(folder / f"{what}.lock"):
        if not library.exists():
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                _build_emulated(Path(scratch), cpu_has_them=cpu_has_them).replace(library)
            for old in set(folder.glob(f"{what}-*.so")) - {library}:
                old.unlink()
    return library


def _build_emulated(folder: Path, *, cpu_has_them: bool) -> Path:
    """Compiles the library with the emulated instructions."""
    for source in build.SOURCE.iterdir():
        # The compiler must not use instructions that this CPU lacks, and unrolled calls take minutes to
        # compile.
        kept = [
            line
            for line in source.read_text().splitlines()
            if not line.startswith(("#pragma GCC target", "#pragma GCC unroll"))
        ]
        (folder / source.name).write_text("\n".join([*kept, ""]))
    library = folder / "library.so"
    command = ["g++", *_FLAGS, f"-DEMULATED_CPU={int(cpu_has_them)}", "-include", str(EMULATION)]
    compiling = [
        subprocess.Popen([*command, "-c", file.name], cwd=folder, stderr=subprocess.PIPE, text=True)
        for file in folder.glob("*.cpp")
    ]
    output = [process.communicate(timeout=900)[1] for process in compiling]
    assert not any(process.returncode for process in compiling), output
    subprocess.run(
        ["g++", *build.LINK_FLAGS, *map(str, folder.glob("*.o")), "-o", str(library)], check=True, timeout=60
    )
    return library
