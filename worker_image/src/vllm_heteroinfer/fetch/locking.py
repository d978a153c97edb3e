"""Locks a model's folder, to prevent duplicate downloads and a removal during a check. Stdlib only."""

import errno
import fcntl
from typing import Final

_NO_LOCKS: Final = frozenset({errno.ENOTSUP, errno.ENOSYS, errno.ENOLCK, errno.EINVAL})


def try_lock_file(descriptor: int) -> bool | None:
    """Tries to lock a file without waiting. Returns whether it succeeded; None on file systems without locks.

    Raises:
        OSError: the file system reported another error.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return None
    return True
