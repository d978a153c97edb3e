"""Matrix products with one row, which measure the speed of memory. Imports torch, not vLLM.

Such a product takes as long as reading its weights. The products use our linear kernel, or torch's if this
process cannot use our kernel or the user turned it off.
"""

from collections.abc import Callable

import torch

from vllm_heteroinfer.kernels import linear
from vllm_heteroinfer.kernels.host_caches import MAX_SAMPLE_BYTES, bytes_beyond_caches
from vllm_heteroinfer.kernels.library import KernelsUnavailableError

INPUTS, COLUMNS = 4096, 4096
PRODUCT_BYTES = INPUTS * COLUMNS * 2
"""Bytes that one product reads."""

ReadingProduct = Callable[[], torch.Tensor]


def memory_stream(*, ours: bool = True, max_bytes: int = MAX_SAMPLE_BYTES) -> list[ReadingProduct]:
    """Returns products of PRODUCT_BYTES each, which together read more bytes than all caches hold.

    Each product keeps its weights in memory.

    Args:
        ours: whether to use our kernel, if this process can use it.
        max_bytes: limit of the bytes of all weights, even if caches hold more.
    """
    count = -(-min(bytes_beyond_caches(), max_bytes) // PRODUCT_BYTES)
    x = torch.randn((1, INPUTS)).to(torch.bfloat16)
    dense = torch.randn((COLUMNS, INPUTS)).to(torch.bfloat16)
    if ours and _prepare_kernels():
        return [_our_product(x, linear.pack(dense)) for _ in range(count)]
    return [_torch_product(x, dense.clone()) for _ in range(count)]


def _prepare_kernels() -> bool:
    """Prepares our kernels. Returns whether this process can use them."""
    try:
        linear.prepare()
    except KernelsUnavailableError:
        return False
    return True


def _torch_product(x: torch.Tensor, weight: torch.Tensor) -> ReadingProduct:
    """Returns torch's product of x and a weight."""
    return lambda: torch.nn.functional.linear(x, weight)


def _our_product(x: torch.Tensor, packed: torch.Tensor) -> ReadingProduct:
    """Returns our kernel's product of x and a packed weight."""
    return lambda: linear.linear(x, packed, None, COLUMNS)
