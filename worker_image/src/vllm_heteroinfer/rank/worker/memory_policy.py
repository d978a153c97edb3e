"""Sets the NUMA memory policy of this process: memory on the nodes of its cores. Linux only; stdlib only."""

import ctypes
import errno
import logging
import os
from collections.abc import Sequence

_logger = logging.getLogger(__name__)

MPOL_PREFERRED = 1
MPOL_INTERLEAVE = 3
"""Policies for `set_mempolicy` (linux/mempolicy.h)."""
_LIBNUMA = "libnuma.so.1"
_MASK_BITS = 1024
"""Limit of NUMA nodes in a Linux kernel (CONFIG_NODES_SHIFT)."""


def prefer_nodes_or_warn(nodes: Sequence[int]) -> None:
    """Makes the kernel take new memory of this process from `nodes`, or logs why it cannot.

    Does nothing without nodes.
    """
    if nodes and (problem := prefer_nodes(nodes)):
        _logger.warning(
            "cannot bind memory to NUMA nodes %s: %s. Memory is on the node of the core that uses it first",
            nodes,
            problem,
        )


def prefer_nodes(nodes: Sequence[int]) -> str:
    """Makes the kernel take new memory of this process from `nodes`. Returns the reason for a failure, or "".

    A single node is preferred, not required: if it is full, memory comes from other nodes. Several nodes are
    interleaved, so that the process reads from all of them at the same time.

    Args:
        nodes: at least one.
    """
    word_bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    mask = (ctypes.c_ulong * (_MASK_BITS // word_bits))()
    for node in nodes:
        mask[node // word_bits] |= 1 << node % word_bits
    mode = MPOL_PREFERRED if len(nodes) == 1 else MPOL_INTERLEAVE
    try:
        libnuma = ctypes.CDLL(_LIBNUMA, use_errno=True)
    except OSError as error:
        return f"{error}. Install libnuma1"
    if libnuma.set_mempolicy(mode, mask, ctypes.c_ulong(_MASK_BITS)) == 0:
        return ""
    number = ctypes.get_errno()
    remedy = (
        " (the container's seccomp profile forbids this call. Allow set_mempolicy in the profile)"
        if number == errno.EPERM
        else ""
    )
    return f"set_mempolicy: {os.strerror(number)}{remedy}"
