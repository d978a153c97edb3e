"""Computes products with coded (quantized) weights with our kernels.

Run `python -m tests.integration.kernels.coded_probe [LIBRARY]`. It has the arguments of `probe`.
"""

import hashlib
import sys
from pathlib import Path
from typing import Any

import torch

from tests.integration.kernels.answering import serve
from tests.integration.kernels.coded_weights import FORMATS, draw_coded, widen
from vllm_heteroinfer.kernels import coded
from vllm_heteroinfer.kernels.library import CODED_PATHS

LIBRARY = Path(sys.argv[1]) if len(sys.argv) > 1 else None
TYPES = {"bf16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
ROUNDING = {"bf16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-23}
SUMS = 2.0**-20
"""Limit of the error of float32 sums, as a share of the sum of the absolute values of all products."""


def prepare() -> Any:
    """Loads the library once, and returns it."""
    return coded.register(LIBRARY)


def tune(case: dict[str, Any]) -> None:
    """Sets a case's path, streams and prefetch distance. Restores the defaults for missing settings."""
    path = case.get("path")
    index = -1 if path is None else CODED_PATHS.index(path)
    done = prepare().calls.heteroinfer_tune(index, case.get("streams", -1), case.get("prefetch", -1))
    assert done, case


class Product:
    """The inputs and the weight of a case, drawn from its seed."""

    def __init__(self, case: dict[str, Any], seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.case, dtype = case, TYPES[case["dtype"]]
        rows, columns, inputs = case["rows"], case["columns"], case["inputs"]
        self.weight = draw_coded(draw, FORMATS[case["format"]], columns, inputs)
        stride = inputs + case.get("stride", 0)
        self.x = torch.randn(rows, stride, generator=draw).mul_(inputs**-0.5).to(dtype)[:, :inputs]
        self.bias = torch.randn(columns, generator=draw).to(dtype) if case.get("bias") else None

    def compute(self) -> torch.Tensor:
        """Computes the product with our kernels."""
        packed = coded.pack(prepare(), self.weight)
        torch.set_num_threads(self.case.get("threads", 2))
        tune(self.case)
        y = coded.linear(self.x, packed, self.bias)
        tune({})
        return y

    def spoil(self, place: str) -> bool:
        """Puts a NaN or an infinity at a place. Returns False if the format has no such place."""
        weight, form = self.weight, self.weight.format
        if place.startswith("x"):
            self.x[0, 37] = float(place.split()[1])
        elif place == "code":
            weight.codes[40, 37] = 255
            return form.code == coded.Code.FP8
        else:
            assert weight.scales is not None
            floats = weight.scales.is_floating_point()
            weight.scales[-1, 0] = torch.nan if floats else {5: 255, 6: 127}[form.scale]
        return True

    def error(self, got: torch.Tensor | None = None) -> float:
        """Returns the worst error of `got`, or of the product itself if `got` is None.

        The error is a share of the largest possible rounding error.
        """
        y, dense = (self.compute() if got is None else got).double(), widen(self.weight)
        exact = self.x.double() @ dense.T
        sizes = self.x.double().abs() @ dense.abs().T
        if self.weight.zeros is not None:  # sums of codes and sums of inputs are computed separately
            apart = self.weight.format, self.weight.columns, self.weight.inputs
            sizes = sizes + self.x.double().abs() @ self._spread_scales(*apart).T * 16
        if self.bias is not None:
            exact, sizes = exact + self.bias.double(), sizes + self.bias.double().abs()
        # Before they are scaled, sums of codes that are denormal in float32 are rounded to multiples of
        # 2^-149.
        least = self.case["inputs"] * self._largest_scale() * 2.0**-140
        limit = exact.abs() * ROUNDING[self.case["dtype"]] + sizes * SUMS + least
        limit += {"float16": 2.0**-24, "bf16": 2.0**-133, "float32": 2.0**-149}[self.case["dtype"]]
        return float(((y - exact).abs() / limit).nan_to_num(torch.inf).max())

    def is_number_where_exact(self, got: torch.Tensor) -> bool:
        """Returns whether exactly the outputs that are NaN or infinite in float64 are so."""
        exact = self.x.double() @ widen(self.weight).T
        if self.bias is not None:
            exact += self.bias.double()
        y = got.double()
        return bool((y.isnan() == exact.isnan()).all() and (y.isfinite() == exact.isfinite()).all())

    def _largest_scale(self) -> float:
        weight = self.weight
        if weight.scales is None:
            return 1.0
        if weight.scales.is_floating_point():
            return float(weight.scales.float().max())
        if weight.format.scale == coded.Scale.COLUMN_E8M0:
            return 2.0 ** (int(weight.scales.max()) - 127)
        assert weight.factors is not None
        return 448.0 * float(weight.factors.max())

    def _spread_scales(self, form: coded.Format, _: int, inputs: int) -> torch.Tensor:
        assert self.weight.scales is not None
        return self.weight.scales.double().repeat_interleave(form.group or inputs, 1)[:, :inputs]


def products(question: dict[str, Any]) -> Any:
    """Returns the worst error of each case, as a share of the largest possible rounding error."""
    return {"errors": [Product(case, seed).error() for seed, case in enumerate(question["cases"])]}


def bits(question: dict[str, Any]) -> Any:
    """Returns a digest of each case's outputs, bit by bit."""
    outputs = [Product(case, case["seed"]).compute() for case in question["cases"]]
    return {"digests": [hashlib.sha256(y.view(torch.uint8).numpy().tobytes()).hexdigest() for y in outputs]}


def not_numbers(question: dict[str, Any]) -> Any:
    """Returns for each place of a NaN or infinity whether the outputs are as in float64."""
    answers = {}
    for name in ("fp8 block", "fp8 channel", "int8 128", "int4 32 zeros", "mxfp4", "mxfp8", "nvfp4"):
        case = {
            "format": name,
            "path": question["path"],
            "rows": question["rows"],
            "dtype": "bf16",
            "columns": 70,
            "inputs": 256,
        }
        for place in ("x nan", "x inf", "scale", "code"):
            product = Product(case, 3)
            if not product.spoil(place):
                continue
            y = product.compute().double()
            exact = product.x.double() @ widen(product.weight).T
            same = y.isnan() == exact.isnan(), y.isfinite() == exact.isfinite()
            # Two results of an infinite input may be NaN: with zero points, because their sums are separate,
            # and with groups of 16 on AMX, because its tiles multiply the input by zeros of another group.
            apart = ("zeros" in name or name == "nvfp4") and place == "x inf"
            answers[f"{name}: {place}"] = bool((apart or same[0].all()) and same[1].all())
    return answers


if __name__ == "__main__":
    serve({f.__name__: f for f in (products, bits, not_numbers)})
