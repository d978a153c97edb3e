"""No pod outlives `heteroinfer up`, even when that is killed: the kernel is asked to see to it.

Run as a file, `orphans.py PARENT_PID COMMAND...`, with -I -S: it asks to be killed
(SIGKILL) when its parent dies, and becomes the command. The worker's supervisor does the
same for its ranks, so the whole tree goes within a moment. Stdlib only: it runs under
the worker's interpreter, which has no operator installed.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
"""linux/prctl.h; holds across exec."""


def die_with_parent(parent_pid: int) -> None:
    """Makes the kernel kill this process when the thread that started it ends.

    Args:
        parent_pid: who started this process; if it is gone already, this process ends here.

    Raises:
        OSError: the kernel refused.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl(PR_SET_PDEATHSIG): {os.strerror(number)}")
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])  # noqa: S606 - becoming the command is this file's work
