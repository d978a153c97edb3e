"""The output of a pod's processes: every line passes through the supervisor, with a prefix.

A thread for each process: when the reader of our own output is slow, the thread blocks,
its pipe fills, and the process waits in its write. So no line is lost, no memory grows,
and the supervisor's loop, which beats for the group, never waits. Stdlib only.
"""

import contextlib
import fcntl
import logging
import os
import queue
import select
import struct
import sys
import termios
import threading
from typing import IO

MAX_LINE_BYTES = 32 * 1024
"""A longer line is cut in pieces; also the most that is held for a process."""
LAST_LINE_CHARS = 300

_stdout_lock = threading.Lock()


class OutputPump:
    """Copies a pipe to our own standard output, line by line, until its end."""

    def __init__(self, pipe: IO[bytes], *, prefix: str) -> None:
        self._pipe = pipe
        self._prefix = prefix.encode()
        self._last_line = ""
        self._rest = b""
        self._reading = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"output {prefix}", daemon=True)
        self._thread.start()

    def last_line(self) -> str:
        """Returns the last line that is not blank of what was looked at up to now, cut at its front."""
        return self._last_line

    @property
    def ended(self) -> bool:
        """Returns whether everything was copied, which it can be once all writers are dead."""
        return self._ended.is_set()

    def pending(self) -> bool:
        """Returns whether the pipe holds what has not been looked at yet; waits for nothing."""
        if self._ended.is_set():
            return False
        with self._reading:
            if self._pipe.closed:
                return False
            waiting = fcntl.ioctl(self._pipe.fileno(), termios.FIONREAD, struct.pack("i", 0))
        return struct.unpack("i", waiting)[0] > 0

    def _run(self) -> None:
        """Copies until the pipe's end; whatever ends this, no process may block for ever in its writes."""
        try:
            self._copy()
        finally:
            with self._reading:
                self._pipe.close()
            self._ended.set()

    def _copy(self) -> None:
        fd = self._pipe.fileno()
        at_end = False
        while not at_end:
            _wait(fd, select.POLLIN)
            with self._reading:
                # Reading and remembering are one act for pending(); the write, which may
                # block, is outside.
                chunk = os.read(fd, MAX_LINE_BYTES)
                at_end = not chunk
                lines = self._cut(chunk, at_end=at_end)
            if lines:
                _write(b"".join(self._prefix + line + b"\n" for line in lines))

    def _cut(self, chunk: bytes, *, at_end: bool) -> list[bytes]:
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        if self._rest and (at_end or len(self._rest) > MAX_LINE_BYTES):
            lines.append(self._rest)
            self._rest = b""
        for line in reversed(lines):
            text = line.decode(errors="replace").strip()
            if text:
                self._last_line = text[-LAST_LINE_CHARS:]
                break
        return lines


class BackgroundHandler(logging.Handler):
    """Log records of the supervisor, written by a thread of its own for the reason above."""

    def __init__(self) -> None:
        super().__init__()
        self._queue: queue.Queue[bytes | None] = queue.Queue(maxsize=1000)
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queues the record; it is dropped only when 1000 wait, that is when nobody reads our output."""
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait((self.format(record) + "\n").encode())

    def finish(self, timeout_s: float) -> None:
        """Writes what is queued, for at most `timeout_s`."""
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (line := self._queue.get()) is not None:
            _write(line)


def _wait(fd: int, event: int) -> None:
    poller = select.poll()
    poller.register(fd, event)
    poller.poll()


def _write(data: bytes) -> None:
    """Writes whole lines; blocks as long as the reader does. What cannot be written is lost."""
    view = memoryview(data)
    with _stdout_lock:
        while view:
            try:
                view = view[os.write(sys.stdout.fileno(), view) :]
            except BlockingIOError:
                _wait(sys.stdout.fileno(), select.POLLOUT)
            except OSError:
                # Nobody reads any more, or the disk of a log file is full; the processes must not block
                # because of it, and the next lines may find space again.
                return
