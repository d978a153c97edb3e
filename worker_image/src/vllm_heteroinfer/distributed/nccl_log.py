"""The transports that NCCL uses, read from its log, since NCCL has no call for it. Stdlib only.

NCCL logs into a memfd of this process, so that no file remains on a disk. If the user sets NCCL_DEBUG, the
log goes where the user wants it, and the transports are unknown here.
Source: nccl/src/transport/{p2p,shm,net}.cc ("Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM").
"""

import os
import re
from collections.abc import MutableMapping
from typing import Final

_LEVEL: Final = "NCCL_DEBUG"
_FILE: Final = "NCCL_DEBUG_FILE"
_TRANSPORT: Final = re.compile(r" via (P2P|SHM|NVLS|COLLNET|NET/[A-Za-z0-9_ -]{1,32})(?![A-Za-z0-9_ -])")
_MAX_BYTES: Final = 4 * 2**20
"""Limit of bytes to read from the log; the connection of 8 ranks logs about 100 KB."""


class NcclLog:
    """The log of NCCL in this process."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    @classmethod
    def capture(cls, env: MutableMapping[str, str]) -> "NcclLog | None":
        """Redirects NCCL's log into memory. Returns None if the user configured NCCL's log.

        Args:
            env: the environment of this process; NCCL reads it when the first process group begins.
        """
        if _LEVEL in env or _FILE in env:
            return None
        fd = os.memfd_create("heteroinfer-nccl")
        env[_LEVEL], env[_FILE] = "INFO", f"/proc/{os.getpid()}/fd/{fd}"
        return cls(fd)

    def used_transports(self) -> frozenset[str]:
        """Returns the transports that NCCL has used so far; empty if NCCL is not used."""
        return find_transports(os.pread(self._fd, _MAX_BYTES, 0).decode(errors="replace"))


def find_transports(log: str) -> frozenset[str]:
    """Finds the transports in a log of NCCL, such as `nccl_p2p`, `nccl_shm` or `nccl_net_socket`."""
    return frozenset(
        "nccl_" + re.sub(r"[^a-z0-9]+", "_", transport.lower()) for transport in _TRANSPORT.findall(log)
    )
