"""Unpacks weights of every format on a GPU, and compares them with those of the checkpoint.

    python -m tests.gpu.unpacked_weights

Prints the error of each format as JSON, or "" without an error. Runs in the worker's Python.
"""

import json
from collections.abc import Callable
from functools import partial

import torch

from heteroinfer_contract.column_shares import Span
from tests.integration.kernels.coded_weights import FORMATS, draw_coded, widen
from vllm_heteroinfer.feed_forward import offered_weights
from vllm_heteroinfer.feed_forward.cuda_exchange import register_memory
from vllm_heteroinfer.feed_forward.gpu_layers import GpuLayer, Load, RankExperts
from vllm_heteroinfer.feed_forward.held import LoadedParts
from vllm_heteroinfer.feed_forward.held_experts import OwnPart, PackedMatrix
from vllm_heteroinfer.feed_forward.recipe import LayerRecipe
from vllm_heteroinfer.feed_forward.ring_slots import SlotContent
from vllm_heteroinfer.feed_forward.stream_times import StreamTimes
from vllm_heteroinfer.feed_forward.unpacking import Unpacker
from vllm_heteroinfer.feed_forward.weight_ring import WeightRing
from vllm_heteroinfer.kernels import linear, weight_memory
from vllm_heteroinfer.kernels.coded import Code, Format, register
from vllm_heteroinfer.kernels.coded_experts import allocate_part, pack_expert_into
from vllm_heteroinfer.kernels.experts import FP8, pack_experts
from vllm_heteroinfer.kernels.weight_memory import WeightMemory

EXPERTS, HIDDEN, INNER = 6, 256, 384


class Held:
    """Packed experts, as a feed-forward rank stores them. They cannot be computed."""

    def __init__(self, w13: PackedMatrix, w2: PackedMatrix) -> None:
        self.count, self.matrices = len(w13.packed), (w13, w2)


def offer(memory: WeightMemory, held: Held, columns: Span) -> offered_weights.OfferedWeights:
    own = OwnPart(columns=columns, experts=Span(total=EXPERTS, first=0, end=EXPERTS))
    parts = LoadedParts(parts={0: held}, own_parts={0: own}, own_experts=None, memory=memory)  # type: ignore[dict-item]
    return offered_weights.offer_weights(parts)


def unpack(
    offers: list[offered_weights.OfferedWeights], first: int, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns w13 and w2 of some experts in bf16, as the GPU's ring unpacks them."""
    device = torch.device("cuda")
    layer_recipe = LayerRecipe(
        experts=EXPERTS, topk=2, hidden=HIDDEN, inner=INNER, activation="silu", method="", parameters={}
    )
    memories = [offered_weights.map_weights(each, rank) for rank, each in enumerate(offers)]
    for memory in memories:
        register_memory(memory)
    ranks = tuple(RankExperts(each.layers[0], memory) for each, memory in zip(offers, memories, strict=True))
    layer = GpuLayer(0, layer_recipe, ranks)
    ring = WeightRing([layer], 1 << 24, torch.bfloat16, Unpacker(device), StreamTimes())
    # A longer load that the ring has started early must work, too.
    early = Load(SlotContent(layer=0, first=first, experts=EXPERTS - first), ranks)
    ring.start_early_copy(early)
    load = Load(SlotContent(layer=0, first=first, experts=count), ranks)
    copied_bytes = ring.copied_bytes
    w13, w2 = (each[:count].clone() for each in ring.unpack(ring.start_copy(load), load, layer_recipe))
    assert ring.copied_bytes == copied_bytes
    again = ring.unpack(ring.start_copy(load), load, layer_recipe)
    assert ring.copied_bytes > copied_bytes
    assert all(torch.equal(one, other[:count]) for one, other in zip((w13, w2), again, strict=True))
    torch.cuda.synchronize()
    for memory in memories:
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
    return w13.cpu(), w2.cpu()


def check_format(name: str, lanes: int) -> None:
    """Raises AssertionError if unpacked weights differ from those of the checkpoint."""
    library, draw, form = register(), torch.Generator().manual_seed(7), FORMATS[name]
    inner = INNER // lanes
    gates, ups, downs, offers, memories = [], [], [], [], []
    for lane in range(lanes):
        memory = WeightMemory()
        memories.append(memory)
        with weight_memory.place_weights_in(memory):
            w13 = allocate_part(library, form, EXPERTS, 2 * inner, HIDDEN)
            w2 = allocate_part(library, form, EXPERTS, HIDDEN, inner)
            dense13, dense2 = [], []
            for expert in range(EXPERTS):
                both = draw_coded(draw, form, 2 * inner, HIDDEN)
                down = draw_coded(draw, form, HIDDEN, inner)
                pack_expert_into(library, w13, expert, both, gated=True)
                pack_expert_into(library, w2, expert, down, gated=False)
                dense13.append(widen(both))
                dense2.append(widen(down))
        matrices = [
            PackedMatrix(packed=p.packed, columns=p.columns, inputs=p.inputs, format=form, has_headers=True)
            for p in (w13, w2)
        ]
        offers.append(
            offer(memory, Held(*matrices), Span(total=INNER, first=lane * inner, end=(lane + 1) * inner))
        )
        gates.append(torch.stack(dense13)[:, :inner])
        ups.append(torch.stack(dense13)[:, inner:])
        downs.append(torch.stack(dense2))
    expected13 = torch.cat((*gates, *ups), 1)[1:4].float().to(torch.bfloat16)
    expected2 = torch.cat(downs, 2)[1:4].float().to(torch.bfloat16)
    got13, got2 = unpack(offers, 1, 3)
    rounded_twice = 1 / 128 if name == "nvfp4" else 0.0
    torch.testing.assert_close(got13, expected13, rtol=rounded_twice, atol=0)
    torch.testing.assert_close(got2, expected2, rtol=rounded_twice, atol=0)


def check_kernels_for_silu(dtype: torch.dtype) -> None:
    """Raises AssertionError if weights that `kernels.experts` packed differ from those of the checkpoint."""
    library, memory = linear.find(), WeightMemory()
    assert library is not None
    torch.manual_seed(3)
    w13, w2 = torch.randn(EXPERTS, 2 * INNER, HIDDEN).to(dtype), torch.randn(EXPERTS, HIDDEN, INNER).to(dtype)
    scales = [
        torch.rand(EXPERTS, 2 * INNER // 128, HIDDEN // 128) + 0.5,
        torch.rand(EXPERTS, HIDDEN // 128, INNER // 128) + 0.5,
    ]
    with weight_memory.place_weights_in(memory):
        packed = [pack_experts(library, weight, gates=gates) for weight, gates in ((w13, True), (w2, False))]
        kept = [weight_memory.empty(each.shape, each.dtype).copy_(each) for each in scales]
    form = Format(code=Code.BF16 if dtype == torch.bfloat16 else Code.FP8)
    matrices = [
        PackedMatrix(
            packed=p,
            columns=p.shape[1],
            inputs=p.shape[2],
            format=form,
            has_headers=False,
            block_scales=s if dtype == FP8 else None,
        )
        for p, s in zip(packed, kept, strict=True)
    ]
    got13, got2 = unpack([offer(memory, Held(*matrices), Span(total=INNER, first=0, end=INNER))], 2, 4)

    def widened(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        full = scale.repeat_interleave(128, 1).repeat_interleave(128, 2) if dtype == FP8 else 1.0
        return (weight.float() * full)[2:6].to(torch.bfloat16)

    assert torch.equal(got13, widened(w13, scales[0]))
    assert torch.equal(got2, widened(w2, scales[1]))


def main() -> None:
    """Prints the errors of all checks."""
    checks: dict[str, Callable[[], None]] = {
        **{
            f"{name}, {lanes} ranks": partial(check_format, name, lanes)
            for name in FORMATS
            for lanes in (1, 2)
        },
        "SiLU in bf16": partial(check_kernels_for_silu, torch.bfloat16),
        "SiLU in FP8": partial(check_kernels_for_silu, FP8),
    }
    answer = {}
    for name, check in checks.items():
        try:
            check()
            answer[name] = ""
        except AssertionError as error:
            answer[name] = str(error) or "differs"
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
