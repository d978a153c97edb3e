"""Asks the kernel to kill a process when its parent dies.

The supervisor starts each child as `parent_death.py PARENT_PID COMMAND...`. This script calls
die_with_parent() and then executes the command. Processes that a rank or vLLM's API server starts call
die_with_parent() themselves. Stdlib only: the script runs with -I -S, before the command's own
interpreter, so it must not import anything from this package.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
"""Option of linux/prctl.h. The setting survives exec; fork clears it."""
PR_SET_CHILD_SUBREAPER = 36
"""Option of linux/prctl.h. Orphans below this process become its children."""


def die_with_parent(parent_pid: int) -> None:
    """Makes the kernel kill this process (SIGKILL) when the thread that started this process ends.

    Args:
        parent_pid: process that started this process. If the parent has already ended, this process
            kills itself.

    Raises:
        OSError: the kernel refused.
    """
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


def adopt_orphans() -> None:
    """Makes this process the parent of all orphans below it, like PID 1, so that it can reap them.

    Raises:
        OSError: the kernel refused.
    """
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, argument: int) -> None:
    """Calls prctl(2); raises OSError if it fails."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, argument, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])  # noqa: S606 - becoming the command is this file's work
