"""What the kernels make of experts: `python -m tests.integration.kernels.experts_probe [LIBRARY]`.

As `probe`, of which the questions `paths` and the arguments are.
"""

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tests.integration.kernels.answering import serve
from tests.integration.kernels.fp8_weights import draw_fp8, draw_scales, widen_experts
from tests.integration.kernels.tuning import tune
from vllm_heteroinfer.kernels import linear
from vllm_heteroinfer.kernels.experts import FP8, PackedExperts, experts, pack_experts
from vllm_heteroinfer.kernels.weight_memory import HUGE_PAGE, NAME, WeightMemory, place_weights_in

LIBRARY = Path(sys.argv[1]) if len(sys.argv) > 1 else None
ROUNDING = 2.0**-8
"""Of a value that becomes bf16."""


class Layer:
    """Inputs and weights of a case, at random but for its seed."""

    def __init__(self, case: dict[str, Any], seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        rows, hidden, inner = case["rows"], case["hidden"], case["inner"]
        self.experts, self.topk = case["experts"], case["topk"]

        def bf16(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return (torch.randn(*shape, generator=draw) * scale).to(torch.bfloat16)

        self.x = bf16(rows, hidden + case.get("stride", 0))[:, :hidden]
        if case.get("weights", "bf16") == "bf16":
            self.w13 = bf16(self.experts, 2 * inner, hidden, scale=hidden**-0.5)
            self.w2 = bf16(self.experts, hidden, inner, scale=inner**-0.5)
            self.scales = None
        else:
            self.w13 = draw_fp8(draw, self.experts, 2 * inner, hidden)
            self.w2 = draw_fp8(draw, self.experts, hidden, inner)
            halves = [draw_scales(draw, self.experts, inner, hidden) for _ in range(2)]
            self.scales = (torch.cat(halves, 1), draw_scales(draw, self.experts, hidden, inner))
        # Some experts are chosen more often, and some by no row; ids beyond both ends count nothing.
        odds = torch.rand(self.experts, generator=draw) ** 3 + 1e-3
        self.ids = odds.repeat(rows, 1).multinomial(self.topk, generator=draw).to(torch.int32)
        if case.get("lost"):
            lost = torch.rand(rows, self.topk, generator=draw)
            self.ids[lost < 0.2] = -1
            self.ids[lost > 0.9] = self.experts
        self.weights = torch.rand(rows, self.topk, generator=draw)

    def compute(self, case: dict[str, Any]) -> torch.Tensor:
        """Returns what the kernels make of it."""
        library = linear.prepare(LIBRARY)
        tune(library, case.get("path"), case.get("streams", -1), case.get("prefetch", -1))
        torch.set_num_threads(case["threads"])
        packed = PackedExperts(
            w13=pack_experts(library, self.w13, gates=True),
            w2=pack_experts(library, self.w2, gates=False),
            scales=self.scales,
        )
        rows, hidden = self.x.shape
        y = torch.full((rows, hidden + 8), 7.0, dtype=torch.bfloat16)
        experts(library, y[:, :hidden], self.x, packed, weights=self.weights, ids=self.ids)
        assert bool((y[:, hidden:] == 7.0).all()), "it wrote beside its rows"
        tune(library)
        return y[:, :hidden]

    def exact(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the layer in float64, and what rounding the activations to bf16 may change, at most."""
        rows, hidden = self.x.shape
        y, allowed = torch.zeros(rows, hidden).double(), torch.zeros(rows, hidden).double()
        inner = self.w2.shape[2]
        dense = [self.w13.double(), self.w2.double()]
        if self.scales:
            dense = widen_experts(self.w13, self.w2, self.scales)
        for row in range(rows):
            for j in range(self.topk):
                expert = int(self.ids[row, j])
                if not 0 <= expert < self.experts:
                    continue
                w13, w2 = dense[0][expert], dense[1][expert]
                sums = w13 @ self.x[row].double()
                gate, up = sums[:inner], sums[inner:]
                activated = gate * torch.sigmoid(gate) * up
                share = float(self.weights[row, j])
                y[row] += share * (w2 @ activated)
                allowed[row] += share * (w2.abs() @ activated.abs())
        return y, allowed


def products(question: dict[str, Any]) -> Any:
    """Returns the worst error of each case, as a share of what roundings to bf16 may make."""
    answers = []
    for seed, case in enumerate(question["cases"]):
        layer = Layer(case, seed)
        got, (exact, allowed) = layer.compute(case), layer.exact()
        limit = exact.abs() * ROUNDING + allowed * ROUNDING + 1e-5
        answers.append(float(((got.double() - exact).abs() / limit).max()))
    return {"errors": answers}


def bits(question: dict[str, Any]) -> Any:
    """Returns a digest of each case's outputs, bit by bit."""
    return {"digests": [digest(Layer(case, case["seed"]).compute(case)) for case in question["cases"]]}


def digest(y: torch.Tensor) -> str:
    """Returns a digest of outputs."""
    return hashlib.sha256(y.contiguous().view(torch.int16).numpy().tobytes()).hexdigest()


def not_numbers(question: dict[str, Any]) -> Any:
    """Returns which rows are not finite when one input is NaN, and whether the others are as without it."""
    case = question["case"]
    layer = Layer(case, 5)
    clean = layer.compute(case)
    layer.x[question["row"], 3] = float("nan")
    got = layer.compute(case)
    finite = got.isfinite().all(1)
    return {
        "rows": (~finite).nonzero().flatten().tolist(),
        "same": bool(torch.equal(got[finite], clean[finite])),
    }


def in_shared_memory(question: dict[str, Any]) -> Any:
    """Returns digests of outputs by weights in private memory and in a WeightMemory, and what others see."""
    layer = Layer(question["case"], 3)
    alone = digest(layer.compute(question["case"]))
    memory = WeightMemory()
    with place_weights_in(memory):
        shared = digest(layer.compute(question["case"]))
        packed = pack_experts(linear.prepare(LIBRARY), layer.w2, gates=False)
    first = memory.num_bytes - HUGE_PAGE * -(-packed.nbytes // HUGE_PAGE)
    read = (
        f"import hashlib; f = open('/proc/{os.getpid()}/fd/{memory.fd}', 'rb'); f.seek({first}); "
        f"print(hashlib.sha256(f.read({packed.nbytes})).hexdigest())"
    )
    seen = subprocess.run([sys.executable, "-c", read], check=True, capture_output=True, text=True)
    memory.move_to_huge_pages(packed)
    address = packed.data_ptr()
    return {
        "private": alone,
        "shared": shared,
        "packed": hashlib.sha256(packed.view(torch.uint8).numpy().tobytes()).hexdigest(),
        "seen by another": seen.stdout.strip(),
        "held": [memory.contains(packed), memory.contains(layer.w2)],
        "aligned": packed.data_ptr() % HUGE_PAGE,
        "mapped": in_maps(),
        "mapped when dropped": (packed := None, in_maps())[1],
        "held when dropped": memory.contains(SimpleNamespace(data_ptr=lambda: address)),
    }


def in_maps() -> int:
    """Returns how many mappings of weight memory this process has."""
    return Path("/proc/self/maps").read_text().count(f"/memfd:{NAME}")


def fp8_numbers(question: dict[str, Any]) -> Any:
    """Returns all 256 FP8 numbers, and what an expert makes of each as a weight, times 1, in each row."""
    case = {"rows": question["rows"], "hidden": 256, "inner": 32, "experts": 1, "topk": 1, "weights": "fp8"}
    layer = Layer(case, 0)
    assert layer.scales is not None
    layer.x.zero_()
    layer.x[:, 0] = 1.0
    layer.weights.fill_(1.0)
    numbers = torch.arange(256, dtype=torch.uint8).view(FP8)
    # Column 5 is silu(16) / 16, which is 1 in bf16; all others are 0.
    dense = torch.zeros(64, 256), torch.zeros(256, 32)
    dense[0][5, 0], dense[0][32 + 5, 0] = 16.0, 0.0625
    layer.w13, layer.w2 = (weight.to(FP8).unsqueeze(0).contiguous() for weight in dense)
    layer.w2[0, :, 5] = numbers
    for scale in layer.scales:
        scale.fill_(1.0)
    got = layer.compute({**case, "path": question["path"], "threads": 2})
    return {"numbers": numbers.float().tolist(), "got": got.float().tolist()}


def far_gates(question: dict[str, Any]) -> Any:
    """Returns what an expert makes of gates far from zero, times 1, and what torch's silu does."""
    gates = torch.tensor(question["gates"]).bfloat16()
    layer = Layer({"rows": len(gates), "hidden": 32, "inner": 32, "experts": 1, "topk": 1}, 0)
    for tensor in (layer.x, layer.w13, layer.w2):
        tensor.zero_()
    layer.x[:, 0], layer.x[:, 1] = gates, 1.0
    layer.w13[0, 5, 0], layer.w13[0, 32 + 5, 1], layer.w2[0, :, 5] = 1.0, 1.0, 1.0
    layer.weights.fill_(1.0)
    got = layer.compute({"path": question["path"], "threads": 2})
    return {"got": got[:, 3].tolist(), "exact": torch.nn.functional.silu(gates.float()).tolist()}


def refused(question: dict[str, Any]) -> Any:
    """Returns what is said to arguments that raw pointers must not be made of."""
    library = linear.prepare(LIBRARY)
    layer = Layer(
        {"rows": 2, "hidden": 64, "inner": 32, "experts": 4, "topk": 2, "weights": question["weights"]}, 0
    )
    given: dict[str, Any] = {
        "y": torch.empty_like(layer.x), "x": layer.x, "w13": pack_experts(library, layer.w13, gates=True),
        "w2": pack_experts(library, layer.w2, gates=False), "weights": layer.weights, "ids": layer.ids,
        "scales": layer.scales,
    }  # fmt: skip
    wrong = torch.ones(4, 2, 1)
    changes: dict[str, Callable[[Any], Any]] = {
        "y": lambda y: y[:1],
        "x": lambda x: x.float(),
        "w13": lambda w: w[:, :32],
        "w2": lambda w: w.transpose(1, 2),
        "weights": lambda w: w.double(),
        "ids": lambda ids: ids.long(),
        "scales": lambda scales: None if scales else (wrong, wrong),
        "shape of scales": lambda scales: (wrong, wrong),
        "dtype of scales": lambda scales: (wrong.double(), wrong[:, :1].double()),
    }
    said = {}
    for case, change in changes.items():
        argument = case.split()[-1]
        arguments = {**given, argument: change(given[argument])}
        try:
            y, x, weights, ids = (arguments.pop(name) for name in ("y", "x", "weights", "ids"))
            experts(library, y, x, PackedExperts(**arguments), weights=weights, ids=ids)
        except ValueError as error:
            said[case] = str(error)
    for name, weight in (("odd", layer.w2[:, :33]), ("dtype", layer.w2.float())):
        try:
            pack_experts(library, weight, gates=False)
        except ValueError as error:
            said[name] = str(error)
    return said


if __name__ == "__main__":
    serve(
        {
            f.__name__: f
            for f in (products, bits, not_numbers, in_shared_memory, fp8_numbers, far_gates, refused)
        }
    )
