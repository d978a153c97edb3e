"""No process outlives its parent: the kernel is asked to kill it when the parent dies.

The supervisor starts each child through this file (`parent_death.py PARENT_PID COMMAND...`),
which asks for the kill and becomes the command; processes that a rank or the API server
start themselves call die_with_parent(). Stdlib only: it runs with -I -S, before the
command's own interpreter, so it must not import anything of this package.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
"""linux/prctl.h; holds across exec, is cleared by fork."""
PR_SET_CHILD_SUBREAPER = 36
"""linux/prctl.h; orphans below this process become its children."""


def die_with_parent(parent_pid: int) -> None:
    """Makes the kernel kill this process (SIGKILL) when the thread that started it ends.

    Args:
        parent_pid: who started this process; if it is gone already, this process
            ends here.

    Raises:
        OSError: the kernel refused.
    """
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


def adopt_orphans() -> None:
    """Makes every orphan below this process its child, as it is for PID 1, so that it can be reaped.

    Raises:
        OSError: the kernel refused.
    """
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, argument: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, argument, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])  # noqa: S606 - becoming the command is this file's work
