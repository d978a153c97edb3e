"""Delays the load of commands, as a scanner of files or a slow disk does (fanotify(7)). Needs root.

A separate process decides about each load, because a process that starts a command by vfork holds the
interpreter's lock. Run with `python -m` and the mark of a group, a pod, seconds and a file, it delays each
Python that the pod's supervisor starts, and writes a line for each.
"""

import ctypes
import os
import select
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from heteroinfer_contract import names
from tests.integration.launch.groups import MARK, SUPERVISOR, TinyGroup, environ

FAN_CLASS_CONTENT = 0x4
FAN_MARK_ADD = 0x1
FAN_OPEN_EXEC_PERM = 0x40000
FAN_ALLOW = 0x1
AT_FDCWD = -100
EVENT = struct.Struct("=IBBHQii")
"""linux/fanotify.h::fanotify_event_metadata: length, version, reserved, length, mask, descriptor, process."""
LOOK_S = 0.02
WATCHING = b"watching\n"


@contextmanager
def held_commands(group: TinyGroup, pod: int, seconds: float) -> Iterator[Path]:
    """Yields a file with the process id of each delayed process of this pod."""
    found = group.directory / "held"
    command = [sys.executable, "-m", __name__, group.env[MARK], str(pod), str(seconds), str(found)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as watcher:
        try:
            assert watcher.stdout is not None
            assert watcher.stdout.readline() == WATCHING
            yield found
        finally:
            watcher.kill()  # the kernel resumes delayed processes


def hold(mark: str, pod: int, seconds: float, found: Path) -> None:
    """Decides about loads, and never returns; see the module.

    Raises:
        OSError: the kernel lacks CONFIG_FANOTIFY_ACCESS_PERMISSIONS, or the user is not root.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    watch = _check(libc.fanotify_init(FAN_CLASS_CONTENT, os.O_RDONLY | os.O_CLOEXEC))
    path, mask = os.path.realpath(sys.executable).encode(), ctypes.c_uint64(FAN_OPEN_EXEC_PERM)
    _check(libc.fanotify_mark(watch, FAN_MARK_ADD, mask, AT_FDCWD, path))
    found.touch()
    os.write(sys.stdout.fileno(), WATCHING)
    waiting: list[tuple[float, int]] = []
    while True:
        if select.select([watch], [], [], LOOK_S)[0]:
            for *_, file, pid in EVENT.iter_unpack(os.read(watch, EVENT.size * 64)):
                held = is_of(mark, pod, pid)
                waiting.append((time.monotonic() + seconds if held else 0.0, file))
                if held:
                    with found.open("a") as lines:
                        lines.write(f"{pid}\n")
        for until_s, file in [each for each in waiting if each[0] <= time.monotonic()]:
            waiting.remove((until_s, file))
            os.write(watch, struct.pack("=iI", file, FAN_ALLOW))
            os.close(file)


def is_of(mark: str, pod: int, pid: int) -> bool:
    """Returns whether this process is a child of the supervisor of this group and pod."""
    with suppress(OSError, IndexError):
        parent = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
        words, variables = Path(f"/proc/{parent}/cmdline").read_text().split("\0"), environ(parent)
        return SUPERVISOR in words and {f"{MARK}={mark}", f"{names.ENV_POD_INDEX}={pod}"} <= set(variables)
    return False


def _check(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"fanotify: {os.strerror(number)}")
    return result


if __name__ == "__main__":
    hold(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), Path(sys.argv[4]))
