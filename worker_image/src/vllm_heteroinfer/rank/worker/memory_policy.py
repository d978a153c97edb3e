"""Where the kernel takes this process's memory from: the NUMA nodes of its cores. Linux only; stdlib only."""

import ctypes
import errno
import logging
import os
from collections.abc import Sequence

_logger = logging.getLogger(__name__)

MPOL_PREFERRED = 1
MPOL_INTERLEAVE = 3
"""linux/mempolicy.h."""
_LIBNUMA = "libnuma.so.1"
_MASK_BITS = 1024
"""As many nodes as any kernel has (CONFIG_NODES_SHIFT)."""


def prefer_nodes_or_warn(nodes: Sequence[int]) -> None:
    """Has new memory of this process come from `nodes`, and says in its log if it cannot; none is no wish."""
    if nodes and (problem := prefer_nodes(nodes)):
        _logger.warning(
            "memory is not allocated on NUMA nodes %s, but where it is touched: %s", nodes, problem
        )


def prefer_nodes(nodes: Sequence[int]) -> str:
    """Makes new memory of this process and its threads to come from `nodes`; returns why not, "" if so.

    One node is preferred, never required: what it cannot hold comes from another one. Several
    are used in turn, so that all of them are read at once.

    Args:
        nodes: at least one.
    """
    mask = (ctypes.c_ulong * (_MASK_BITS // (8 * ctypes.sizeof(ctypes.c_ulong))))()
    bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    for node in nodes:
        mask[node // bits] |= 1 << node % bits
    mode = MPOL_PREFERRED if len(nodes) == 1 else MPOL_INTERLEAVE
    try:
        libnuma = ctypes.CDLL(_LIBNUMA, use_errno=True)
    except OSError as error:
        return f"{error}: install libnuma1"
    if libnuma.set_mempolicy(mode, mask, ctypes.c_ulong(_MASK_BITS)) == 0:
        return ""
    number = ctypes.get_errno()
    remedy = " (the container's seccomp profile forbids it)" if number == errno.EPERM else ""
    return f"set_mempolicy: {os.strerror(number)}{remedy}"
