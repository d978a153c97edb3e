"""Random products with coded weights between guard pages, against float64, for a number of seconds.

.venv-worker/bin/python -m tests.integration.kernels.guarded_layers [SECONDS]

Weights and inputs end at a page that the process must not touch. Prints the worst error of each format with
float32 inputs, as a part of 2^-20 of the sum of the sizes of all products.
"""

import ctypes
import random
import sys
import time
from typing import Any

SECONDS = float(sys.argv.pop(1)) if len(sys.argv) > 1 else 60.0

import torch  # noqa: E402

from tests.integration.kernels.coded_probe import Product, prepare, tune  # noqa: E402
from tests.integration.kernels.coded_weights import FORMATS  # noqa: E402
from vllm_heteroinfer.kernels import coded  # noqa: E402

_PAGE = 4096
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
_LIBC.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


def guarded(tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[int, int]]:
    """Returns a copy that ends at a guard page, and its mapping."""
    pages = -(-tensor.nbytes // _PAGE) * _PAGE
    address, length = _LIBC.mmap(None, pages + 2 * _PAGE, 3, 0x22, -1, 0), pages + 2 * _PAGE
    for guard in (address, address + _PAGE + pages):
        _LIBC.mprotect(guard, _PAGE, 0)
    memory = (ctypes.c_char * tensor.nbytes).from_address(address + _PAGE + pages - tensor.nbytes)
    return torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape).copy_(tensor), (address, length)


def draw_case(draw: random.Random, paths: tuple[str, ...]) -> dict[str, Any]:
    """Returns a case at random."""
    path = draw.choice(paths)
    return {
        "format": draw.choice(list(FORMATS)),
        "path": path,
        "dtype": draw.choice(("bf16", "float16", "float32")) if path in {"avx512f", "avx2"} else "bf16",
        "rows": draw.choice((1, 1, 2, 3, 4, 5, 7, 12, 13, 30, 65)),
        "columns": draw.choice((1, 31, 32, 33, 64, 96, 200)),
        "inputs": draw.choice((2, 16, 32, 48, 64, 128, 160, 256, 416)),
        "streams": draw.choice((-1, 1, 2, 4)),
        "prefetch": draw.choice((-1, 0, 1, 8)),
        "threads": draw.choice((1, 1, 2)),
    }


def main() -> int:
    """Prints the table; returns 1 if an output is beyond its limit."""
    library, draw, worst, count = prepare(), random.Random(5), dict[str, float](), 0
    paths, end = library.coded_paths, time.time() + SECONDS
    while time.time() < end:
        case = draw_case(draw, paths)
        product = Product(case, count)
        packed = coded.pack(library, product.weight)
        own, weights = guarded(packed.packed)
        product.x, inputs = guarded(product.x.contiguous())
        weight = coded.PackedWeight(
            format=packed.format, columns=packed.columns, inputs=packed.inputs, packed=own
        )
        torch.set_num_threads(case["threads"])
        tune(case)
        y = coded.linear(product.x, weight)
        tune({})
        error = product.error(y)
        if not error <= 1.0:
            print("beyond its limit", error, case)
            return 1
        if case["dtype"] == "float32":
            worst[case["format"]] = max(worst.get(case["format"], 0.0), error)
        for mapping in (weights, inputs):
            _LIBC.munmap(*mapping)
        count += 1
    print(count, "products;", ", ".join(f"{name} {worst[name]:.2f}" for name in sorted(worst)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
