"""What the kernels make of experts with coded weights; as `coded_probe`, of which the argument is."""

from typing import Any

import torch

from tests.integration.kernels.answering import serve
from tests.integration.kernels.coded_probe import ROUNDING, TYPES, prepare, tune
from tests.integration.kernels.coded_weights import FORMATS, draw_coded, widen
from vllm_heteroinfer.kernels.coded_experts import (
    Activation,
    ActivationKind,
    CodedExperts,
    empty_part,
    put,
)

ACTIVATIONS = {
    "silu": Activation(),
    "gelu": Activation(kind=ActivationKind.GELU),
    "gelu_tanh": Activation(kind=ActivationKind.GELU_TANH),
    "gpt-oss": Activation(alpha=1.702, limit=7.0, offset=1.0),
    "limited": Activation(limit=0.5),
    "relu2": Activation(kind=ActivationKind.RELU2, gated=False),
}


def exact_activation(sums: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Returns the inputs of w2 in float64; `sums` are gates, then ups."""
    gate, up = sums.chunk(2) if activation.gated else (sums, None)
    gate = gate.clamp(max=activation.limit)
    match activation.kind:
        case ActivationKind.SWISH:
            made = gate * torch.sigmoid(activation.alpha * gate)
        case ActivationKind.GELU:
            made = torch.nn.functional.gelu(gate)
        case ActivationKind.GELU_TANH:
            made = torch.nn.functional.gelu(gate, approximate="tanh")
        case _:
            made = gate.relu() ** 2
    if up is None:
        return made
    return made * (up.clamp(-activation.limit, activation.limit) + activation.offset)


def error(case: dict[str, Any], seed: int) -> float:
    """Returns the worst error, as a share of what roundings may make."""
    draw = torch.Generator().manual_seed(seed)
    library, dtype, form = prepare(), TYPES[case["dtype"]], FORMATS[case["format"]]
    activation, experts = ACTIVATIONS[case["activation"]], case["experts"]
    rows, hidden, inner, topk = (case[name] for name in ("rows", "hidden", "inner", "topk"))
    wide = 2 * inner if activation.gated else inner
    w13 = [draw_coded(draw, form, wide, hidden) for _ in range(experts)]
    w2 = [draw_coded(draw, form, hidden, inner) for _ in range(experts)]
    parts = [empty_part(library, form, experts, *shape) for shape in ((wide, hidden), (hidden, inner))]
    for expert in range(experts):
        put(library, parts[0], expert, w13[expert], gated=activation.gated)
        put(library, parts[1], expert, w2[expert], gated=False)
    biases = [None, None]
    if case["bias"]:
        biases = [torch.randn(experts, columns, generator=draw) for columns in (wide, hidden)]
    size = widen(w13[0]).std() * hidden**0.5
    x = (torch.randn(rows, hidden, generator=draw) / size).to(dtype)
    ids = torch.rand(rows, experts, generator=draw).topk(topk, -1).indices.to(torch.int32).contiguous()
    ids[torch.rand(rows, topk, generator=draw) < 0.1] = -1
    weights, y = torch.rand(rows, topk, generator=draw), torch.empty(rows, hidden, dtype=dtype)
    layer = CodedExperts(library, parts[0], parts[1], activation, dtype=dtype, biases=biases)
    torch.set_num_threads(case["threads"])
    tune(case)
    layer.compute(y, x, weights, ids)
    tune({})
    exact, allowed = torch.zeros(rows, hidden).double(), torch.zeros(rows, hidden).double()
    dense = [(widen(a), widen(b)) for a, b in zip(w13, w2, strict=True)]
    for row in range(rows):
        for j in range(topk):
            expert = int(ids[row, j])
            if expert < 0:
                continue
            added = [0 if each is None else each[expert].double() for each in biases]
            inputs = exact_activation(dense[expert][0] @ x[row].double() + added[0], activation)
            share = float(weights[row, j])
            exact[row] += share * (dense[expert][1] @ inputs + added[1])
            allowed[row] += share * (dense[expert][1].abs() @ (inputs.abs() + 2.0**-10))
    rounding = ROUNDING[case["dtype"]]
    limit = exact.abs() * rounding + allowed * (rounding + 2.0**-14) + 1e-5
    return float(((y.double() - exact).abs() / limit).nan_to_num(torch.inf).max())


def products(question: dict[str, Any]) -> Any:
    """Returns the worst error of each case."""
    return {"errors": [error(case, seed) for seed, case in enumerate(question["cases"])]}


if __name__ == "__main__":
    serve({f.__name__: f for f in (products,)})
