"""Loads the compiled kernels by ctypes. Import torch first: the kernels use its OpenMP library."""

import ctypes
import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from heteroinfer_contract import names
from heteroinfer_contract.errors import ContractError
from vllm_heteroinfer.kernels.build import library_path

PATHS: Final = ("avx512f", "avx512_bf16", "amx_bf16")
"""Names of the instruction sets, in the order of their bits in the result of `heteroinfer_init`."""
CODED_PATHS: Final = (*PATHS, "avx2")
"""Instruction sets for coded weights (`kernels/coded.py`), which also run on AVX2 with FMA and F16C."""
_WIDENING: Final = 1 << len(CODED_PATHS)
"""Bit of AVX512-VBMI in the result of `heteroinfer_init`. It is needed to widen coded weights to bf16."""
_ALLOWED_BITS: Final = {"avx2": 8, "avx512f": 8 + 1, "avx512_bf16": 8 + 1 + 2, "amx_bf16": 8 + 1 + 2 + 4}
"""Bits that each value of HETEROINFER_MAX_INSTRUCTIONS allows: its own bit, and the bits of older sets."""

_POINTER = ctypes.c_void_p
_LONG = ctypes.c_long
_SIGNATURES: Final[dict[str, tuple[Any, tuple[Any, ...]]]] = {
    "heteroinfer_init": (ctypes.c_int, (ctypes.c_int,)),
    "heteroinfer_kernel": (ctypes.c_char_p, (_LONG,)),
    "heteroinfer_tune": (ctypes.c_int, (ctypes.c_int, ctypes.c_int, ctypes.c_int)),
    "heteroinfer_threads": (ctypes.c_int, ()),
    "heteroinfer_packed_elements": (_LONG, (_LONG, _LONG)),
    "heteroinfer_ask_for_huge_pages": (None, (_POINTER, _LONG)),
    "heteroinfer_pack": (None, (_POINTER, _POINTER, _LONG, _LONG, _LONG)),
    "heteroinfer_pack_fp8": (None, (_POINTER, _POINTER, _LONG, _LONG, _LONG)),
    "heteroinfer_linear": (
        None,
        (_POINTER, _LONG, _POINTER, _LONG, _POINTER, _POINTER, _LONG, _LONG, _LONG),
    ),
    "heteroinfer_coded_bytes": (_LONG, (_POINTER, _LONG, _LONG)),
    "heteroinfer_coded_layout": (None, (_POINTER, _LONG, _LONG, _POINTER)),
    "heteroinfer_coded_places": (None, (_LONG, _POINTER)),
    "heteroinfer_coded_pack": (
        None,
        (_POINTER, _POINTER, _POINTER, _LONG, _POINTER, _POINTER, _POINTER, _LONG, _LONG),
    ),
    "heteroinfer_coded_linear": (
        None,
        (_POINTER, _LONG, _POINTER, _LONG, _LONG, _POINTER, _POINTER, _POINTER, _LONG, _LONG, _LONG),
    ),
    "heteroinfer_coded_experts": (
        None,
        (_POINTER, _POINTER, _LONG, _POINTER, _LONG, _POINTER, _POINTER, _LONG, _LONG),
    ),
    "heteroinfer_experts": (
        None,
        (_POINTER, _LONG, _POINTER, _LONG, *(_POINTER,) * 6, *(_LONG,) * 5),
    ),
    "heteroinfer_norm": (
        None,
        (_POINTER, _POINTER, _POINTER, _LONG, _LONG, _LONG, _LONG, _LONG, ctypes.c_float),
    ),
    "heteroinfer_add_and_norm": (None, (_POINTER, _POINTER, _POINTER, _LONG, _LONG, ctypes.c_float)),
    "heteroinfer_choose_experts": (
        None,
        (_POINTER, _POINTER, _POINTER, ctypes.c_int, _POINTER, _LONG),
    ),
    "heteroinfer_mixture": (
        None,
        (_POINTER, _POINTER, _LONG, _POINTER, _LONG, _POINTER, ctypes.c_int, _LONG),
    ),
}


class KernelsUnavailableError(RuntimeError):
    """This process cannot use the kernels. The message contains the reason, and a fix if one exists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelLibrary:
    """The loaded library.

    Attributes:
        path: file of the library.
        calls: the library's functions.
        paths: instruction sets that both this CPU and the kernels for bf16 support; none without AVX-512F.
        coded_paths: instruction sets that both this CPU and the kernels for coded weights support; none
            without AVX2, FMA and F16C.
    """

    path: Path
    calls: ctypes.CDLL
    paths: tuple[str, ...]
    coded_paths: tuple[str, ...]

    def kernel(self, rows: int) -> str:
        """Returns the name of the instruction set that multiplies a batch of `rows` rows."""
        return bytes(self.calls.heteroinfer_kernel(rows)).decode()


def load_functions(path: Path, signatures: Mapping[str, tuple[Any, tuple[Any, ...]]]) -> Any:
    """Loads a library and declares the types of its functions.

    Args:
        signatures: type of the result and types of the arguments, by name of the function.

    Raises:
        KernelsUnavailableError: the library was not compiled, or torch is not imported.
    """
    if not path.exists():
        raise KernelsUnavailableError(
            f"{path.name} was not compiled. Run: python -m vllm_heteroinfer.kernels.build"
        )
    try:
        # ctypes resolves all symbols immediately (RTLD_NOW). So if this process lacks torch's OpenMP, loading
        # fails instead of the first call.
        calls = ctypes.CDLL(str(path))
    except OSError as error:
        raise KernelsUnavailableError(
            f"{path.name} cannot be loaded ({error}). Import torch first, because the kernels use its OpenMP"
        ) from error
    for name, (result, arguments) in signatures.items():
        function = getattr(calls, name)
        function.restype, function.argtypes = result, arguments
    return calls


@functools.cache
def load(path: Path | None = None) -> KernelLibrary:
    """Loads the kernels. Later calls return the same library.

    Args:
        path: file of the library. Default: the library of these sources.

    Raises:
        KernelsUnavailableError: the library was not compiled.
        ContractError: HETEROINFER_MAX_INSTRUCTIONS names no instruction set.
    """
    path = path or library_path()
    calls = load_functions(path, _SIGNATURES)
    setting = os.environ.get(names.ENV_MAX_INSTRUCTIONS, "amx_bf16")
    if setting not in _ALLOWED_BITS:
        raise ContractError(
            f"{names.ENV_MAX_INSTRUCTIONS} must be one of {', '.join(_ALLOWED_BITS)} (got {setting}). Change "
            "engine.env"
        )
    available_bits = calls.heteroinfer_init(_ALLOWED_BITS[setting])
    # Without VBMI, the kernels cannot widen coded weights to bf16. AVX-512F then decodes these weights to
    # float32, and the bf16 instruction sets compute no coded weights.
    coded_bits = available_bits
    if not available_bits & _WIDENING:
        coded_bits &= ~(_bit_of("avx512_bf16") | _bit_of("amx_bf16"))
    return KernelLibrary(
        path=path,
        calls=calls,
        paths=tuple(name for name in PATHS if available_bits & _bit_of(name)),
        coded_paths=tuple(name for name in CODED_PATHS if coded_bits & _bit_of(name)),
    )


def _bit_of(path: str) -> int:
    """Returns the bit of an instruction set in the result of `heteroinfer_init`."""
    return 1 << CODED_PATHS.index(path)
