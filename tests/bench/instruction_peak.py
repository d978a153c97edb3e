"""Measures the peak rate of an instruction set on this machine: products in registers, on several threads.

Compiles `instruction_peak.cpp` once for each measuring process.
"""

import ctypes
import functools
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

_SOURCE = Path(__file__).with_name("instruction_peak.cpp")
_SECONDS = 0.05
"""Approximate seconds of a measurement."""


def peak(path: str, threads: int, clock: Callable[[], float] = time.perf_counter) -> float:
    """Returns the operations a second of an instruction set. A multiplication and an addition are two.

    Args:
        path: instruction set, which this CPU must have.
        clock: clock of this process. Its CPU time counts all threads, so it is right for only one thread.
    """
    function = getattr(_library(), f"peak_{path}")
    function.restype, function.argtypes = ctypes.c_long, (ctypes.c_long,)
    start = time.perf_counter()
    function(100_000)
    rounds = max(1, int(100_000 * _SECONDS / (time.perf_counter() - start)))
    if threads == 1:
        start = clock()
        return float(function(rounds) / (clock() - start))
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(function, [1] * threads))
        start = clock()
        done = sum(pool.map(function, [rounds] * threads))
        return float(done / (clock() - start))


@functools.cache
def _library() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        library = f"{folder}/peak.so"
        subprocess.run(
            ["g++", "-O2", "-shared", "-fPIC", str(_SOURCE), "-o", library], check=True, timeout=60
        )
        return ctypes.CDLL(library)
