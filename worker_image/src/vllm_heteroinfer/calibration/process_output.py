"""Output of measuring processes: a line of JSON for each result.

The parent reads the output while the processes run, with limits on memory and time. Stdlib only.
"""

import json
import os
import selectors
import sys
import time
from collections.abc import Callable, Iterable
from typing import IO, Any, Final

BEGUN: Final = "begun"
"""Kind of a line that reports the start of a measurement."""
MAX_LINE_BYTES: Final = 2**16
"""Lines are cut after this number of bytes."""
_CHUNK_BYTES: Final = 2**16


def rounded(value: float) -> float:
    """Rounds a rate or time to four digits, the precision of the measurements."""
    return float(f"{value:.4g}")


def report(kind: str, **values: Any) -> None:
    """Writes one result."""
    sys.stdout.write(json.dumps({"kind": kind, **values}) + "\n")
    sys.stdout.flush()


def report_begun(what: str) -> None:
    """Reports the start of a measurement. If it crashes this process, the parent can name it."""
    report(BEGUN, what=what)


def report_skipped(what: str, error: BaseException) -> None:
    """Reports a failed measurement, with the first line of the error."""
    lines = str(error).strip().splitlines() or [""]
    report("skipped", what=what, why=f"{type(error).__name__}: {lines[0]}")


class LineReader:
    """Splits chunks of output into lines.

    Args:
        take: called with each line, without its newline, cut at MAX_LINE_BYTES.
    """

    def __init__(self, take: Callable[[str], None]) -> None:
        self._take = take
        self._line = bytearray()

    def feed(self, chunk: bytes) -> None:
        """Takes the next chunk of the output, and emits the lines that are complete.

        An empty chunk marks the end of the output.
        """
        *complete_parts, incomplete_part = chunk.split(b"\n")
        for part in complete_parts:
            self._add(part)
            self._emit_line()
        self._add(incomplete_part)
        if not chunk and self._line:
            self._emit_line()

    def _add(self, part: bytes) -> None:
        """Adds a part to the current line; drops bytes beyond MAX_LINE_BYTES."""
        self._line += part[: MAX_LINE_BYTES - len(self._line)]

    def _emit_line(self) -> None:
        """Passes the current line to `take`, and begins a new line."""
        line = self._line.decode(errors="replace")
        self._line.clear()
        self._take(line)


class ProcessOutput:
    """Reads from several pipes. As a context manager, closes the pipes at the end.

    Args:
        pipes: unbuffered pipes, each with the function that receives its lines.
    """

    def __init__(self, pipes: Iterable[tuple[IO[bytes], Callable[[str], None]]]) -> None:
        self._selector = selectors.DefaultSelector()
        self._open = {pipe.fileno(): (pipe, LineReader(take)) for pipe, take in pipes}
        for descriptor in self._open:
            self._selector.register(descriptor, selectors.EVENT_READ)

    def __enter__(self) -> "ProcessOutput":
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in list(self._open):
            self._close(descriptor)
        self._selector.close()

    def read(self, timeout_s: float) -> None:
        """Waits for output up to `timeout_s`, and reads the available output."""
        if not self._open:  # the processes have closed their pipes, but may still run
            time.sleep(timeout_s)
            return
        for key, _ in self._selector.select(timeout_s):
            chunk = os.read(key.fd, _CHUNK_BYTES)
            _, reader = self._open[key.fd]
            reader.feed(chunk)
            if not chunk:
                self._close(key.fd)

    def read_rest(self, limit_s: float) -> None:
        """Reads until all writers have closed the pipes, or until the limit."""
        deadline = time.monotonic() + limit_s
        left_s = limit_s
        while self._open and left_s > 0:
            self.read(left_s)
            left_s = deadline - time.monotonic()

    def _close(self, descriptor: int) -> None:
        """Closes a pipe and stops reading it."""
        self._selector.unregister(descriptor)
        pipe, _ = self._open.pop(descriptor)
        pipe.close()
