"""Products with one row, whose time is that of reading their weights from memory. Imports torch, not vLLM.

The stream is that of our linear kernel, or torch's own product where this CPU has no kernels of ours.
"""

from collections.abc import Callable

import torch

from vllm_heteroinfer.kernels import linear
from vllm_heteroinfer.kernels.host_caches import bytes_beyond_caches
from vllm_heteroinfer.kernels.library import KernelsUnavailableError

INPUTS, COLUMNS = 4096, 4096
PRODUCT_BYTES = INPUTS * COLUMNS * 2
"""That one product reads."""

Read = Callable[[], torch.Tensor]


def memory_stream() -> list[Read]:
    """Returns products of PRODUCT_BYTES each, with weights that together no cache holds.

    Their weights are in memory until they are let go.
    """
    count = -(-bytes_beyond_caches() // PRODUCT_BYTES)
    x = torch.randn((1, INPUTS)).to(torch.bfloat16)
    dense = torch.randn((COLUMNS, INPUTS)).to(torch.bfloat16)
    try:
        linear.prepare()
    except KernelsUnavailableError:
        return [_torch_product(x, dense.clone()) for _ in range(count)]
    return [_our_product(x, linear.pack(dense)) for _ in range(count)]


def _torch_product(x: torch.Tensor, weight: torch.Tensor) -> Read:
    return lambda: torch.nn.functional.linear(x, weight)


def _our_product(x: torch.Tensor, packed: torch.Tensor) -> Read:
    return lambda: linear.linear(x, packed, None, COLUMNS)
