"""Opens memory files (memfd) of other processes of the pod through /proc. Stdlib only."""

import os
from pathlib import Path


def open_memfd(pid: int, fd: int, name: str, owner: str) -> int:
    """Opens another process's memory file, and returns this process's descriptor.

    Args:
        pid: id of the other process in the PID namespace of the pod.
        fd: descriptor in that process.
        name: name with which the file was created. The check of the name protects files of other processes:
            in another PID namespace, `pid` is another process.
        owner: description of the file for the error, such as "the shared memory of the pod".

    Raises:
        OSError: the file is not there, or has another name.
    """
    path = Path(f"/proc/{pid}/fd/{fd}")
    opened = os.readlink(path)
    if opened != f"/memfd:{name} (deleted)":
        raise OSError(f"{path} is {opened}, not {owner}")
    return os.open(path, os.O_RDWR | os.O_CLOEXEC)
