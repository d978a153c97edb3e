"""Compares our kernels for experts on CPUs with vLLM's, in bf16 and FP8 in blocks, in GB/s of chosen experts.

    python -m tests.bench.cpu_experts [--weights bf16,fp8] [--layers 3] [--rows 1,4,16,64,512] [--rounds 30]
        [--threads N] [--against LIBRARY | --against-private]

The layers have the sizes of Qwen3-30B-A3B's experts, random weights and uniform routing. In each turn, both
kernels compute the same layer with the same inputs, one after the other. The ratio is the median of vLLM's
time divided by ours. `stream` is a sum over all weights. Needs the worker's Python and a CPU with AVX-512;
vLLM's kernel for FP8 needs AMX. `--against` compares with another build of our own kernels instead of vLLM's.
`--against-private` compares weights in a memfd, as feed-forward ranks have them, with weights in private
memory, both with our kernels, and prints how long packing took.
"""

import argparse
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.bench.model_shapes import SHAPES

SHAPE = SHAPES["qwen3-30b-a3b"]
EXPERTS, TOPK = SHAPE["num_experts"], SHAPE["num_experts_per_tok"]
DRAWS = 16
"""Random draws of inputs and experts, which are used in turn."""


def draw_rows(rows: int) -> list[tuple[Any, ...]]:
    """Draws inputs, experts and weights of calls, and counts the experts that each call reads."""
    import torch

    draw = torch.Generator().manual_seed(rows)
    drawn = []
    for _ in range(DRAWS):
        ids = torch.rand(rows, EXPERTS, generator=draw).topk(TOPK, -1).indices.to(torch.int32)
        x = torch.randn(rows, SHAPE["hidden_size"], generator=draw).to(torch.bfloat16)
        weights = torch.full((rows, TOPK), 1 / TOPK)
        drawn.append((x, ids.contiguous(), weights, len(ids.unique())))
    return drawn


class Contenders:
    """The same layers for our kernels and for the compared ones.

    Args:
        weights: "bf16" or "fp8".
        count: number of layers.
        against: another build of our library, which replaces vLLM's kernels.
        private: whether the comparison is between weights in a memfd and in private memory, both with our
            kernels.
    """

    def __init__(
        self, weights: str, count: int, against: Path | None = None, *, private: bool = False
    ) -> None:
        import torch
        from vllm.platforms.cpu import CpuPlatform

        torch.cpu._init_amx()
        CpuPlatform.import_kernels()  # also if vLLM's build is for GPUs
        import vllm._custom_ops as ops

        from vllm_heteroinfer.kernels import library, linear
        from vllm_heteroinfer.kernels.experts import FP8, SCALED, PackedExperts, experts, pack_experts

        self._torch, self._ops, self._library, self._experts = torch, ops, linear.prepare(), experts
        from vllm_heteroinfer.kernels.weight_memory import WeightMemory, place_weights_in

        self._against = library.load(against) if against else self._library if private else None
        self._memory = WeightMemory() if private else None
        self.packing_s = [0.0, 0.0]
        self.weights, self.fp8, self.isa = weights, weights == "fp8", "vec"
        if torch.cpu._is_amx_tile_supported():
            self.isa = "amx"
        hidden, width = SHAPE["hidden_size"], SHAPE["moe_intermediate_size"]
        shapes = ((EXPERTS, 2 * width, hidden), (EXPERTS, hidden, width))
        self.bytes = 3 * hidden * width * (1 if self.fp8 else 2)
        draw = torch.Generator().manual_seed(0)
        self.ours: list[Any] = []
        self.theirs: list[Any] = []
        for _ in range(count):
            # Small numbers, because FP8 has scales.
            dense = [
                (torch.randn(shape, generator=draw) * (16 if self.fp8 else 0.02)).to(
                    FP8 if self.fp8 else torch.bfloat16
                )
                for shape in shapes
            ]
            scales = [
                torch.rand(count, columns // SCALED, inputs // SCALED, generator=draw) * 0.0025
                for count, columns, inputs in shapes
            ]
            both = (scales[0], scales[1]) if self.fp8 else None

            def packed(dense: list[Any] = dense, scales: Any = both) -> PackedExperts:
                w13, w2 = (pack_experts(self._library, w, gates=not i) for i, w in enumerate(dense))
                return PackedExperts(w13=w13, w2=w2, scales=scales)

            if self._memory is not None:
                start = time.perf_counter()
                with place_weights_in(self._memory):
                    self.ours.append(packed())
                for weight in (self.ours[-1].w13, self.ours[-1].w2):
                    self._memory.move_to_huge_pages(weight)
                self.packing_s[0] += time.perf_counter() - start
                self.packing_s[1] += timed(lambda: self.theirs.append(packed()))
                continue
            self.ours.append(packed())
            if self._against:
                self.theirs.append(self.ours[-1])
                continue
            if self.fp8:
                self.theirs.append([*map(torch.ops._C.convert_weight_packed, dense), *scales])
            else:
                self.theirs.append([ops.cpu_prepack_moe_weight(w, self.isa) for w in dense])

    def run_ours(self, layer: int, y: Any, x: Any, ids: Any, weights: Any) -> None:
        """Computes a layer with our kernels."""
        self._experts(self._library, y, x, self.ours[layer], weights=weights, ids=ids)

    def run_theirs(self, layer: int, y: Any, x: Any, ids: Any, weights: Any) -> None:
        """Computes a layer with the compared kernels."""
        if self._against:
            self._experts(self._against, y, x, self.theirs[layer], weights=weights, ids=ids)
            return
        w13, w2, *scales = self.theirs[layer]
        if not self.fp8:
            self._ops.cpu_fused_moe(y, x, w13, w2, None, None, weights, ids, "silu", self.isa)
            return
        # As CPUExpertsFp8.apply.
        method = self._ops.CPUQuantMethod.FP8_W8A16
        self._ops.fused_experts_cpu(
            *(y, x, w13, w2, weights, ids, method, *scales, None, None, [128, 128]),
            *(None, None, None, None, True),
        )

    def stream(self) -> float:
        """Returns GB/s of a sum over all our weights, the best of three."""
        words = [w.view(-1).view(self._torch.int64) for layer in self.ours for w in (layer.w13, layer.w2)]
        return max(
            sum(w.nbytes for w in words) / 1e9 / timed(lambda: [w.sum() for w in words]) for _ in range(3)
        )


def timed(call: Callable[[], object]) -> float:
    """Returns the seconds of a call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def compare(both: Contenders, rows: int, rounds: int) -> str:
    """Measures both kernels in turn, and returns a line of the table."""
    torch = both._torch
    drawn = draw_rows(rows)
    rates: list[list[float]] = [[], []]
    ratios, gap = [], 0.0
    for number in range(rounds + 2):
        x, ids, weights, count = drawn[number % DRAWS]
        outputs = [torch.empty_like(x), torch.empty_like(x)]
        layer = number % len(both.ours)
        runs = list(zip((both.run_ours, both.run_theirs), outputs, strict=True))
        taken = [0.0, 0.0]
        for which in (0, 1) if number % 2 else (1, 0):
            run, y = runs[which]
            given = x.clone()  # a copy, because vLLM's kernels may overwrite it
            taken[which] = timed(functools.partial(run, layer, y, given, ids, weights))
        if number < 2:  # the first calls start threads and allocate buffers
            continue
        largest = outputs[1].float().abs().max()
        gap = max(gap, float((outputs[0].float() - outputs[1].float()).abs().max() / largest))
        ratios.append(taken[1] / taken[0])
        for rate, seconds in zip(rates, taken, strict=True):
            rate.append(count * both.bytes / seconds / 1e9)
    ours, theirs = (statistics.median(rate) for rate in rates)
    spread = statistics.quantiles(ratios, n=4)
    return (
        f"{both.weights:>7} {rows:5} {ours:9.1f} {theirs:9.1f} {statistics.median(ratios):6.2f} "
        f"({spread[0]:.2f} to {spread[2]:.2f}) {gap:8.4f}"
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--weights", default="bf16,fp8")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--rows", default="1,4,16,64,512")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--against", type=Path, help="compare with this build of our own library")
    parser.add_argument(
        "--against-private",
        action="store_true",
        help="compare weights in a memfd with weights in private memory",
    )
    options = parser.parse_args(argv)
    import torch

    from vllm_heteroinfer.kernels import linear

    if options.threads:
        torch.set_num_threads(options.threads)
    library = linear.prepare()
    print(f"{torch.get_num_threads()} threads, ours of {library.paths}")
    print("weights  rows  ours GB/s  theirs    ratio (quartiles)  largest gap")
    for weights in options.weights.split(","):
        both = Contenders(weights, options.layers, options.against, private=options.against_private)
        theirs = options.against.name if options.against else f"vLLM's kernel for {both.isa}"
        if options.against_private:
            gib = options.layers * EXPERTS * both.bytes / 2**30
            memfd, alone = both.packing_s
            theirs = (
                f"private memory, packed in {alone:.2f} s where {gib:.1f} GiB in a memfd took {memfd:.2f}"
            )
        print(f"{weights}: against {theirs}, stream {both.stream():.1f} GB/s")
        for rows in map(int, options.rows.split(",")):
            rounds = max(4, options.rounds if rows < 256 else options.rounds // 4)
            print(compare(both, rows, rounds), flush=True)


if __name__ == "__main__":
    main()
