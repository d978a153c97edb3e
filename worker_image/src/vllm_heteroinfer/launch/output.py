"""The output of a pod's processes. Every line passes through the supervisor, which adds a prefix.

Each process has a thread. If the reader of the supervisor's output is slow, the thread blocks, the pipe
fills, and the process waits in its write. So no line is lost, memory does not grow, and the supervisor's
event loop, which sends heartbeats, never waits. Stdlib only.
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
"""Longer lines are split. This is also the largest memory for the output of a process."""
LAST_LINE_CHARS = 300

_stdout_lock = threading.Lock()


class OutputPump:
    """Copies a pipe to the supervisor's standard output, line by line, until its end."""

    def __init__(self, pipe: IO[bytes], *, prefix: str) -> None:
        self._pipe = pipe
        self._prefix = prefix.encode()
        self._last_line = ""
        self._incomplete_line = b""
        self._read_lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"output {prefix}", daemon=True)
        self._thread.start()

    def last_line(self) -> str:
        """Returns the last non-blank line read so far, shortened at its start."""
        return self._last_line

    @property
    def ended(self) -> bool:
        """Whether all output is copied, which is possible only after all writers have ended."""
        return self._ended.is_set()

    def has_unread_output(self) -> bool:
        """Returns whether the pipe has unread output; does not wait."""
        if self._ended.is_set():
            return False
        with self._read_lock:
            if self._pipe.closed:
                return False
            waiting = fcntl.ioctl(self._pipe.fileno(), termios.FIONREAD, struct.pack("i", 0))
        return struct.unpack("i", waiting)[0] > 0

    def _run(self) -> None:
        """Copies until the pipe's end. Always closes the pipe, so that no process blocks in a write."""
        try:
            self._copy()
        finally:
            with self._read_lock:
                self._pipe.close()
            self._ended.set()

    def _copy(self) -> None:
        """Copies lines until the pipe's end."""
        fd = self._pipe.fileno()
        at_end = False
        while not at_end:
            _wait_for_event(fd, select.POLLIN)
            with self._read_lock:
                # has_unread_output() must see the read and the update of the last line together. The write
                # may block, so it is outside of the lock.
                chunk = os.read(fd, MAX_LINE_BYTES)
                at_end = not chunk
                lines = self._take_lines(chunk, at_end=at_end)
            if lines:
                _write_all(b"".join(self._prefix + line + b"\n" for line in lines))

    def _take_lines(self, chunk: bytes, *, at_end: bool) -> list[bytes]:
        """Adds a chunk to the incomplete line; returns the complete lines and stores the last one.

        Splits a line that is longer than MAX_LINE_BYTES.
        """
        *lines, self._incomplete_line = (self._incomplete_line + chunk).split(b"\n")
        if self._incomplete_line and (at_end or len(self._incomplete_line) > MAX_LINE_BYTES):
            lines.append(self._incomplete_line)
            self._incomplete_line = b""
        for line in reversed(lines):
            text = line.decode(errors="replace").strip()
            if text:
                self._last_line = text[-LAST_LINE_CHARS:]
                break
        return lines


class BackgroundHandler(logging.Handler):
    """Writes the supervisor's log records in a separate thread, so that the event loop never waits."""

    def __init__(self) -> None:
        super().__init__()
        self._queue: queue.Queue[bytes | None] = queue.Queue(maxsize=1000)
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queues the record; drops it only if 1000 records wait because the output is not read."""
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait((self.format(record) + "\n").encode())

    def finish(self, timeout_s: float) -> None:
        """Writes all queued records; gives up after `timeout_s`."""
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        """Writes the queued lines until `finish`."""
        while (line := self._queue.get()) is not None:
            _write_all(line)


def _wait_for_event(fd: int, event: int) -> None:
    """Waits until a file descriptor is readable (POLLIN) or writable (POLLOUT)."""
    poller = select.poll()
    poller.register(fd, event)
    poller.poll()


def _write_all(data: bytes) -> None:
    """Writes whole lines to the standard output; waits for a slow reader, and drops the lines on an error."""
    view = memoryview(data)
    with _stdout_lock:
        while view:
            try:
                view = view[os.write(sys.stdout.fileno(), view) :]
            except BlockingIOError:
                _wait_for_event(sys.stdout.fileno(), select.POLLOUT)
            except OSError:
                # The reader has left, or the disk of a log file is full. Processes must not block for that,
                # and later lines may find space again.
                return
