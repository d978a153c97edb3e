"""Calls the host's C++ side of the slab, which is in the library of CPU kernels. Import torch first."""

import ctypes
import functools
from typing import Any, Final

from vllm_heteroinfer.kernels.build import library_path
from vllm_heteroinfer.kernels.library import load_functions

ASKED: Final = 1
STOPPED: Final = -1
"""Results of `heteroinfer_ff_next`; 0 means that no ask came in time."""
WAS_STOPPED: Final = -(2**31)
"""Result of `heteroinfer_ff_exchange` if the slab was stopped. `heteroinfer_ff_reply` returns it if the
connection has ended."""


class Layout(ctypes.Structure):
    """The same fields as `Layout` in kernels/source/feed_forward_slab.h. Offsets are in bytes."""

    _fields_ = (
        ("x", ctypes.c_uint64),
        ("ids", ctypes.c_uint64),
        ("weights", ctypes.c_uint64),
        ("y", ctypes.c_uint64),
        ("y_stride", ctypes.c_uint64),
        ("hidden", ctypes.c_uint32),
        ("topk", ctypes.c_uint32),
        ("dtype", ctypes.c_uint32),
        ("lanes", ctypes.c_uint32),
    )


_PTR, _U64, _U32, _INT = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_int
_LAYOUT, _OUT = ctypes.POINTER(Layout), ctypes.POINTER(ctypes.c_uint32)
_SIGNATURES: Final[dict[str, tuple[Any, tuple[Any, ...]]]] = {
    "heteroinfer_ff_next": (_INT, (_PTR, _INT, _U64, _U64, _OUT, _OUT)),
    "heteroinfer_ff_answer": (None, (_PTR, _INT, ctypes.c_int32, _U32, _PTR, _U32, _U64)),
    "heteroinfer_ff_wake": (None, (_PTR,)),
    "heteroinfer_ff_stop": (None, (_PTR,)),
    "heteroinfer_ff_exchange": (_INT, (_PTR, _LAYOUT, _U32, _U32, _PTR, _PTR, _PTR, _PTR, _U64, _U64)),
    "heteroinfer_ff_stress": (_U64, (_PTR, _LAYOUT, _U64, _U32, _U64, _U64)),
    "heteroinfer_ff_relay": (_INT, (_PTR, _LAYOUT, _PTR, _INT, _U64)),
    "heteroinfer_ff_receive": (_INT, (_PTR, _PTR, _LAYOUT, _U32, _U64, _U64, _OUT, _OUT)),
    "heteroinfer_ff_reply": (_INT, (_PTR, _PTR, _LAYOUT, _U64, _U64, _U64)),
    "heteroinfer_ff_echo": (_U64, (_PTR, _LAYOUT, _INT, _U64, _U64)),
}


@functools.cache
def load() -> Any:
    """Loads the library's functions once. Each function releases Python's lock while it waits.

    Raises:
        KernelsUnavailableError: the library was not compiled.
    """
    return load_functions(library_path(), _SIGNATURES)
