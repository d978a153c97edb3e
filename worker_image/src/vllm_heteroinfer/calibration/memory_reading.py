"""Measures the speed at which threads read memory.

Run as `python -m vllm_heteroinfer.calibration.memory_reading THREADS,... NODE`. Imports torch.
"""

import sys

import torch

from heteroinfer_contract.calibration import ALL_NODES
from vllm_heteroinfer.calibration.process_output import report, rounded
from vllm_heteroinfer.kernels.memory_stream import COLUMNS, INPUTS, PRODUCT_BYTES, memory_stream
from vllm_heteroinfer.kernels.rounds import median_s

MANY_ROWS = 512
"""Rows of a matrix product that spends more time on computing than on reading."""


def main(argv: list[str]) -> None:
    """Reports the rate of reading memory for each number of threads.

    For all NUMA nodes together, also reports the operations per second with the largest number of threads.

    Args:
        argv: numbers of threads, ascending and separated by commas; number of the NUMA node, or ALL_NODES.
    """
    threads, node = [int(part) for part in argv[0].split(",")], int(argv[1])
    torch.set_num_threads(max(threads))
    products = memory_stream()
    num_bytes = PRODUCT_BYTES * len(products)
    with torch.inference_mode():
        for count in threads:
            torch.set_num_threads(count)
            seconds = median_s(products)
            report("readings", threads=count, node=node, bytes_per_s=rounded(num_bytes / seconds))
        if node == ALL_NODES:
            x = torch.randn((MANY_ROWS, INPUTS)).to(torch.bfloat16)
            dense = torch.randn((COLUMNS, INPUTS)).to(torch.bfloat16)
            seconds = median_s([lambda: torch.nn.functional.linear(x, dense)])
            operations = 2 * MANY_ROWS * INPUTS * COLUMNS / seconds
            report("operations", operations_per_s=rounded(operations))


if __name__ == "__main__":
    main(sys.argv[1:])
