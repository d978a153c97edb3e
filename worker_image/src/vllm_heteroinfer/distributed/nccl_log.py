"""Which way NCCL's tensors travel: NCCL has no call for it, only its log. Stdlib only.

NCCL logs into a memfd of this process, so that nothing stays on a disk. A user who sets NCCL_DEBUG has
the log where they want it, and then the way is not known here.
Source: nccl/src/transport/{p2p,shm,net}.cc ("Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM").
"""

import os
import re
from collections.abc import MutableMapping
from typing import Final

_LEVEL: Final = "NCCL_DEBUG"
_FILE: Final = "NCCL_DEBUG_FILE"
_WAY: Final = re.compile(r" via (P2P|SHM|NVLS|COLLNET|NET/[A-Za-z0-9_ -]{1,32})(?![A-Za-z0-9_ -])")
_MOST_BYTES: Final = 4 * 2**20
"""Of the log that is read; connecting 8 ranks writes some 100 KB."""


class NcclLog:
    """What NCCL logs in this process."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    @classmethod
    def begin(cls, env: MutableMapping[str, str]) -> "NcclLog | None":
        """Has NCCL log into memory from now on, or returns None if the user has it log elsewhere.

        Args:
            env: the environment of this process, which NCCL reads when its first process group begins.
        """
        if _LEVEL in env or _FILE in env:
            return None
        fd = os.memfd_create("heteroinfer-nccl")
        env[_LEVEL], env[_FILE] = "INFO", f"/proc/{os.getpid()}/fd/{fd}"
        return cls(fd)

    def ways(self) -> frozenset[str]:
        """Returns the ways that tensors have travelled so far, as `find_ways`; empty if NCCL is not used."""
        return find_ways(os.pread(self._fd, _MOST_BYTES, 0).decode(errors="replace"))


def find_ways(log: str) -> frozenset[str]:
    """Returns the ways in a log of NCCL, such as `nccl_p2p`, `nccl_shm` or `nccl_net_socket`."""
    return frozenset("nccl_" + re.sub(r"[^a-z0-9]+", "_", way.lower()) for way in _WAY.findall(log))
