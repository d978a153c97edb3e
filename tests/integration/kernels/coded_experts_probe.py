"""What the kernels make of experts with coded weights; as `coded_probe`, of which the argument is."""

import itertools
from typing import Any

import torch

from tests.integration.kernels.answering import serve
from tests.integration.kernels.coded_probe import ROUNDING, TYPES, prepare, tune
from tests.integration.kernels.coded_weights import FORMATS, draw_coded, widen
from vllm_heteroinfer.kernels.coded_experts import (
    Activation,
    ActivationKind,
    CodedExperts,
    allocate_part,
    pack_expert_into,
)

ACTIVATIONS = {
    "silu": Activation(),
    "gelu": Activation(kind=ActivationKind.GELU),
    "gelu_tanh": Activation(kind=ActivationKind.GELU_TANH),
    "gpt-oss": Activation(alpha=1.702, limit=7.0, offset=1.0),
    "limited": Activation(limit=0.5),
    "limited after": Activation(kind=ActivationKind.SWISH_LIMITED, limit=0.5),
    "relu2": Activation(kind=ActivationKind.RELU2, gated=False),
}


def exact_activation(sums: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Returns the inputs of w2 in float64; `sums` are gates, then ups."""
    gate, up = sums.chunk(2) if activation.gated else (sums, None)
    if activation.kind is not ActivationKind.SWISH_LIMITED:
        gate = gate.clamp(max=activation.limit)
    match activation.kind:
        case ActivationKind.SWISH:
            made = gate * torch.sigmoid(activation.alpha * gate)
        case ActivationKind.SWISH_LIMITED:
            made = (gate * torch.sigmoid(activation.alpha * gate)).clamp(max=activation.limit)
        case ActivationKind.GELU:
            made = torch.nn.functional.gelu(gate)
        case ActivationKind.GELU_TANH:
            made = torch.nn.functional.gelu(gate, approximate="tanh")
        case _:
            made = gate.relu() ** 2
    if up is None:
        return made
    return made * (up.clamp(-activation.limit, activation.limit) + activation.offset)


class Layer:
    """A layer of experts, its inputs and its routing, at random but for the seed."""

    def __init__(self, case: dict[str, Any], seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        library, form = prepare(), FORMATS[case["format"]]
        self.case, self.dtype, self.activation = case, TYPES[case["dtype"]], ACTIVATIONS[case["activation"]]
        rows, hidden, inner, topk, experts = (
            case[name] for name in ("rows", "hidden", "inner", "topk", "experts")
        )
        wide = 2 * inner if self.activation.gated else inner
        self.w13 = [draw_coded(draw, form, wide, hidden) for _ in range(experts)]
        self.w2 = [draw_coded(draw, form, hidden, inner) for _ in range(experts)]
        self.parts = [
            allocate_part(library, form, experts, *shape) for shape in ((wide, hidden), (hidden, inner))
        ]
        for expert in range(experts):
            pack_expert_into(library, self.parts[0], expert, self.w13[expert], gated=self.activation.gated)
            pack_expert_into(library, self.parts[1], expert, self.w2[expert], gated=False)
        self.biases: list[torch.Tensor | None] = [None, None]
        if case["bias"]:
            self.biases = [torch.randn(experts, columns, generator=draw) for columns in (wide, hidden)]
        size = widen(self.w13[0]).std() * hidden**0.5
        self.x = (torch.randn(rows, hidden, generator=draw) / size).to(self.dtype)
        self.ids = (
            torch.rand(rows, experts, generator=draw).topk(topk, -1).indices.to(torch.int32).contiguous()
        )
        self.ids[torch.rand(rows, topk, generator=draw) < 0.1] = -1
        self.weights = torch.rand(rows, topk, generator=draw)
        self.y = torch.empty(rows, hidden, dtype=self.dtype)

    def compute(self) -> torch.Tensor:
        """Returns what the kernels make of it, in `y`."""
        layer = CodedExperts(
            prepare(), self.parts[0], self.parts[1], self.activation, dtype=self.dtype, biases=self.biases
        )
        torch.set_num_threads(self.case["threads"])
        tune(self.case)
        layer.compute(self.y, self.x, self.weights, self.ids)
        tune({})
        return self.y

    def errors(self) -> torch.Tensor:
        """Returns the worst error of each row of `y`, as a share of what roundings may make."""
        exact = torch.zeros(self.y.shape, dtype=torch.float64)
        allowed = torch.zeros(self.y.shape, dtype=torch.float64)
        dense = [(widen(a), widen(b)) for a, b in zip(self.w13, self.w2, strict=True)]
        for row, choice in itertools.product(*map(range, self.ids.shape)):
            expert = int(self.ids[row, choice])
            if expert < 0:
                continue
            added = [0 if each is None else each[expert].double() for each in self.biases]
            inputs = exact_activation(dense[expert][0] @ self.x[row].double() + added[0], self.activation)
            share = float(self.weights[row, choice])
            exact[row] += share * (dense[expert][1] @ inputs + added[1])
            allowed[row] += share * (dense[expert][1].abs() @ (inputs.abs() + 2.0**-10))
        rounding = ROUNDING[self.case["dtype"]]
        limit = exact.abs() * rounding + allowed * (rounding + 2.0**-14) + 1e-5
        errors = ((self.y.double() - exact).abs() / limit).nan_to_num(torch.inf)
        # A value beyond the largest number of the type must become infinite.
        is_too_large = exact.abs() + limit >= torch.finfo(self.dtype).max
        errors[is_too_large & (self.y == exact.sign() * torch.inf)] = 0
        return errors.max(1).values


def error(case: dict[str, Any], seed: int) -> float:
    """Returns the worst error, as a share of what roundings may make."""
    layer = Layer(case, seed)
    layer.compute()
    return float(layer.errors().max())


def products(question: dict[str, Any]) -> Any:
    """Returns the worst error of each case."""
    return {"errors": [error(case, seed) for seed, case in enumerate(question["cases"])]}


if __name__ == "__main__":
    serve({f.__name__: f for f in (products,)})
