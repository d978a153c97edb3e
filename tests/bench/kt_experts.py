"""Measures KTransformers' expert kernels (kt-kernel) with the shape and rows of `cpu_experts`.

    python -m tests.bench.kt_experts [--weights bf16,int8] [--layers 3] [--rows 1,4,16,64] [--rounds 30]
        [--threads N]

Run it just after `tests.bench.cpu_experts` on the same machine, for a table with both. The rate is in GB/s of
the chosen experts' bytes, with one byte per element if kt-kernel stores them as int8 when it loads them. The
pool of threads is that of one NUMA node. kt-kernel is not a dependency of the project. Install it on the
machine that runs this program: `pip install --no-deps kt-kernel gguf` (the torch that it pins is not needed).
"""

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from typing import Any

from tests.bench.cpu_experts import DRAWS, EXPERTS, SHAPE, TOPK, draw_rows, timed

HIDDEN, WIDTH = SHAPE["hidden_size"], SHAPE["moe_intermediate_size"]
MAX_ROWS = 512


class Layers:
    """Layers with random weights in kt-kernel's form.

    Args:
        weights: "bf16" or "int8".
        count: number of layers.
        threads: number of threads of its pool.
    """

    def __init__(self, weights: str, count: int, threads: int) -> None:
        import kt_kernel
        import torch

        self._ext = kt_kernel.kt_kernel_ext
        config = self._ext.WorkerPoolConfig()
        config.subpool_count, config.subpool_numa_map, config.subpool_thread_count = 1, [0], [threads]
        self._pool = self._ext.CPUInfer(config)
        self._mask = torch.zeros(EXPERTS, dtype=torch.bool)
        self._map = torch.arange(EXPERTS, dtype=torch.int64)
        self._kept: list[Any] = []
        self.bytes = 3 * HIDDEN * WIDTH * (2 if weights == "bf16" else 1)
        self.layers = [self._load(weights, number) for number in range(count)]

    def _load(self, weights: str, number: int) -> Any:
        """Draws the weights of a layer, and loads them into a kt-kernel layer for bf16 or int8."""
        import torch

        draw = torch.Generator().manual_seed(number)
        shapes = ((EXPERTS, WIDTH, HIDDEN), (EXPERTS, WIDTH, HIDDEN), (EXPERTS, HIDDEN, WIDTH))
        gate, up, down = (
            (torch.randn(shape, generator=draw) * 0.02).to(torch.bfloat16).contiguous() for shape in shapes
        )
        config = self._ext.moe.MOEConfig(EXPERTS, TOPK, HIDDEN, WIDTH, self._mask.data_ptr())
        config.layer_idx, config.pool, config.max_len = number, self._pool.backend_, MAX_ROWS
        if weights == "bf16":
            config.gate_projs, config.up_projs, config.down_projs = (
                [[expert.data_ptr() for expert in part]] for part in (gate, up, down)
            )
            none = [[0] * EXPERTS]
            config.gate_scales, config.up_scales, config.down_scales = none, none, none
            moe = self._ext.moe.AMXBF16_MOE(config)
        else:
            config.save, config.load, config.path = False, False, tempfile.gettempdir()
            config.gate_proj, config.up_proj, config.down_proj = (
                gate.data_ptr(),
                up.data_ptr(),
                down.data_ptr(),
            )
            moe = self._ext.moe.AMXInt8_MOE(config)
        self._pool.submit(moe.load_weights_task(self._map.data_ptr()))
        self._pool.sync()
        return moe

    def run(self, layer: int, y: Any, x: Any, ids: Any, weights: Any, rows: Any) -> None:
        """Computes a layer."""
        task = self.layers[layer].forward_task(
            *(rows.data_ptr(), TOPK, ids.data_ptr(), weights.data_ptr(), x.data_ptr(), y.data_ptr(), False)
        )
        self._pool.submit(task)
        self._pool.sync()


def measure(layers: Layers, rows: int, rounds: int) -> float:
    """Returns GB/s of the chosen experts, as the median of the rounds."""
    import torch

    drawn, count, rates = draw_rows(rows), torch.tensor([rows], dtype=torch.int32), []
    for number in range(rounds + 2):
        x, ids, weights, chosen = drawn[number % DRAWS]
        ids, y = ids.to(torch.int64).contiguous(), torch.empty_like(x)
        given = (number % len(layers.layers), y, x, ids, weights.contiguous(), count)
        seconds = timed(lambda given=given: layers.run(*given))  # type: ignore[misc]
        if number >= 2:  # the first calls start threads and allocate buffers
            rates.append(chosen * layers.bytes / seconds / 1e9)
    return statistics.median(rates)


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--weights", default="bf16,int8")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--rows", default="1,4,16,64")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=13)
    options = parser.parse_args(argv)
    import kt_kernel

    print(f"kt-kernel {kt_kernel.__version__}, {kt_kernel.__cpu_variant__}, {options.threads} threads")
    print("weights  rows      GB/s")
    for weights in options.weights.split(","):
        layers = Layers(weights, options.layers, options.threads)
        for rows in map(int, options.rows.split(",")):
            print(f"{weights:>7} {rows:5} {measure(layers, rows, options.rounds):9.1f}", flush=True)


if __name__ == "__main__":
    main()
