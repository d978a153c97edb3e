"""How fast threads read memory: `python -m vllm_heteroinfer.calibration.memory_reading THREADS,... NODE`.

The stream is that of our linear kernel with one row, or torch's own product where this CPU has no kernels
of ours. Imports torch.
"""

import sys
from collections.abc import Callable

import torch

from heteroinfer_contract.calibration import ALL_NODES
from vllm_heteroinfer.calibration.hardware import round_bytes
from vllm_heteroinfer.calibration.timing import median_s, report, rounded
from vllm_heteroinfer.kernels import linear
from vllm_heteroinfer.kernels.library import KernelsUnavailableError

INPUTS, COLUMNS = 4096, 4096
MANY_ROWS = 512
"""Of a product that computes longer than it reads."""


def main(argv: list[str]) -> None:
    """Reports a reading for each number of threads, and with all nodes the operations of the most threads."""
    threads, node = [int(part) for part in argv[0].split(",")], int(argv[1])
    torch.set_num_threads(max(threads))
    weights = _weights()
    num_bytes = INPUTS * COLUMNS * 2 * len(weights)
    with torch.inference_mode():
        for count in threads:
            torch.set_num_threads(count)
            x = torch.randn((1, INPUTS)).to(torch.bfloat16)
            seconds = median_s([_call(product, x) for product in weights])
            report("readings", threads=count, node=node, bytes_per_s=rounded(num_bytes / seconds))
        if node == ALL_NODES:
            x = torch.randn((MANY_ROWS, INPUTS)).to(torch.bfloat16)
            dense = torch.randn((COLUMNS, INPUTS)).to(torch.bfloat16)
            seconds = median_s([lambda: torch.nn.functional.linear(x, dense)])
            operations = 2 * MANY_ROWS * INPUTS * COLUMNS / seconds
            report("operations", operations_per_s=rounded(operations))


WeightProduct = Callable[[torch.Tensor], torch.Tensor]


def _call(product: WeightProduct, x: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: product(x)


def _weights() -> list[WeightProduct]:
    """Returns products with weights that together no cache holds."""
    count = -(-round_bytes() // (INPUTS * COLUMNS * 2))
    dense = torch.randn((COLUMNS, INPUTS)).to(torch.bfloat16)
    try:
        linear.prepare()
    except KernelsUnavailableError:
        return [_torch_product(dense.clone()) for _ in range(count)]
    return [_our_product(linear.pack(dense)) for _ in range(count)]


def _torch_product(weight: torch.Tensor) -> WeightProduct:
    return lambda x: torch.nn.functional.linear(x, weight)


def _our_product(packed: torch.Tensor) -> WeightProduct:
    return lambda x: linear.linear(x, packed, None, COLUMNS)


if __name__ == "__main__":
    main(sys.argv[1:])
