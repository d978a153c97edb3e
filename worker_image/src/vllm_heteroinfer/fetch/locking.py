"""Locks of a model's folder: they save work, and protect what is being confirmed. Stdlib only."""

import errno
import fcntl
from typing import Final

_NO_LOCKS: Final = frozenset({errno.ENOTSUP, errno.ENOSYS, errno.ENOLCK, errno.EINVAL})


def try_lock_file(descriptor: int) -> bool | None:
    """Returns whether the lock was free and is held now; None on a file system without locks.

    Raises:
        OSError: of the file system.
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
