"""Runs processes that keep CPUs busy, like those of another pod."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Collection, Iterator, Sequence


@contextlib.contextmanager
def spinning(on: Sequence[Collection[int]]) -> Iterator[None]:
    """Runs a busy process on each of these sets of CPUs, until the context ends.

    Args:
        on: a set of CPUs for each process.
    """
    others = [subprocess.Popen([sys.executable, "-c", "while True: 0"]) for _ in on]
    try:
        for other, cpus in zip(others, on, strict=True):
            os.sched_setaffinity(other.pid, cpus)
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()
