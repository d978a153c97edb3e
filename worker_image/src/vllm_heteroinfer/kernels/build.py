"""Compiles the kernels: `python -m vllm_heteroinfer.kernels.build [--into DIR]`. Stdlib only.

One library runs on any x86-64: `target` pragmas in the sources compile the code for AVX-512 and AMX, and the
library chooses at run time. The library's name contains a hash of the sources and flags, so that a library
built from other sources is never loaded. A file next to the library stores the compiler's version. With
another version, the library is compiled again.
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

SOURCE: Final = Path(__file__).parent / "source"
BUILT: Final = Path(__file__).parent / "compiled"
"""Folder of the library, in the package because the image's root file system is read-only."""

COMPILER: Final = "g++"
FLAGS: Final = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-fopenmp",
    "-Wall",
    "-Wextra",
    # GCC's own AVX-512 headers use undefined values on purpose (GCC bug 105593).
    "-Wno-uninitialized",
    "-Wno-maybe-uninitialized",
)
LINK_FLAGS: Final = ("-shared", "-static-libgcc", "-static-libstdc++")
"""Without -fopenmp, so that OpenMP's symbols (GOMP_*) resolve to the library that torch has loaded."""

_TIMEOUT_S: Final = 600.0


class BuildError(RuntimeError):
    """The kernels could not be compiled. The message has the reason and a fix."""


def library_path(folder: Path = BUILT) -> Path:
    """Returns the path of the library for these sources, whether it exists or not."""
    digest = hashlib.sha256(" ".join((*FLAGS, "|", *LINK_FLAGS)).encode())
    for file in _list_sources("*"):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return folder / f"libheteroinfer_cpu-{digest.hexdigest()[:16]}.so"


def build(into: Path = BUILT, compiler: str = COMPILER) -> Path:
    """Compiles the library if it is missing or another compiler built it, and returns its path.

    Args:
        into: folder of the library. Libraries of other sources in this folder are deleted.
        compiler: GCC 11 or later. Earlier versions do not support AMX.

    Raises:
        BuildError: the compiler is missing or failed.
    """
    version = _find_version(compiler)
    library = library_path(into)
    version_file = library.with_suffix(".compiler")
    if library.exists() and version_file.exists() and version_file.read_text() == version:
        return library
    into.mkdir(parents=True, exist_ok=True)
    # To stderr, because stdout is for the path of the library. 6 minutes were measured on two busy cores.
    sys.stderr.write(f"kernels: compiling {len(_list_sources('*.cpp'))} files, which can take 6 minutes\n")
    start = time.monotonic()
    # A finished library replaces the old one at once, so no rank ever loads an incomplete library.
    with tempfile.TemporaryDirectory(dir=into) as scratch:
        _compile(compiler, Path(scratch))
        for old in into.glob("libheteroinfer_cpu-*"):
            if old.stem != library.stem:
                old.unlink(missing_ok=True)
        new_library = Path(scratch) / "library.so"
        new_library.chmod(0o755)
        new_library.replace(library)
    version_file.write_text(version)
    sys.stderr.write(f"kernels: compiled in {time.monotonic() - start:.0f} s\n")
    return library


def _compile(compiler: str, scratch: Path) -> None:
    """Compiles all sources at the same time, and links them to `library.so` in the folder `scratch`."""
    sources = _list_sources("*.cpp")
    objects = [scratch / f"{source.stem}.o" for source in sources]
    compiling = [
        subprocess.Popen(
            [compiler, *FLAGS, "-c", str(source), "-o", str(object_file)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for source, object_file in zip(sources, objects, strict=True)
    ]
    outputs = [process.communicate(timeout=_TIMEOUT_S)[0] for process in compiling]
    failures = [out for process, out in zip(compiling, outputs, strict=True) if process.returncode]
    if not failures:
        link = [compiler, *LINK_FLAGS, *map(str, objects), "-o", str(scratch / "library.so")]
        linked = subprocess.run(
            link, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=_TIMEOUT_S
        )
        failures = [linked.stdout] if linked.returncode else []
    if failures:
        raise BuildError(
            f"kernels: {compiler} cannot compile {SOURCE}. Use GCC 11 or later, which supports AMX. The "
            "compiler's messages:\n" + "\n".join(failures)
        )


def _list_sources(pattern: str) -> list[Path]:
    """Returns the sources and headers that match the pattern, sorted by name."""
    return sorted(file for file in SOURCE.glob(pattern) if file.suffix in {".cpp", ".h"})


def _find_version(compiler: str) -> str:
    """Returns the first line of the compiler's version; raises BuildError if the compiler is missing."""
    program = shutil.which(compiler)
    if program is None:
        raise BuildError(f"kernels: {compiler} not found. Install it (Debian: apt-get install g++)")
    done = subprocess.run([program, "--version"], check=True, capture_output=True, text=True, timeout=60)
    return done.stdout.splitlines()[0]


def main(argv: Sequence[str]) -> int:
    """Compiles the library and prints its path."""
    parser = argparse.ArgumentParser(prog="python -m vllm_heteroinfer.kernels.build", description=__doc__)
    parser.add_argument("--into", type=Path, default=BUILT, help="folder of the library")
    parser.add_argument("--compiler", default=os.environ.get("CXX", COMPILER))
    args = parser.parse_args(argv)
    try:
        print(build(args.into, args.compiler))  # noqa: T201 - a command prints
    except BuildError as error:
        print(error, file=sys.stderr)  # noqa: T201
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
