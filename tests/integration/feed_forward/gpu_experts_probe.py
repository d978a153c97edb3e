"""Checks the code for experts on a GPU that runs without a GPU. Runs in the worker's Python."""

import io
import json
import logging
import os
import signal
import subprocess
import sys
from dataclasses import replace
from typing import Any

import torch

from heteroinfer_contract.errors import ContractError
from tests.integration.kernels.coded_weights import FORMATS, draw_coded
from vllm_heteroinfer.feed_forward.cuda_exchange import SOURCE as KERNELS
from vllm_heteroinfer.feed_forward.cuda_exchange import compile_source
from vllm_heteroinfer.feed_forward.expert_choices import ExpertChoices
from vllm_heteroinfer.feed_forward.gpu_layers import find_gpu_layers
from vllm_heteroinfer.feed_forward.offered_weights import (
    OfferedLayer,
    OfferedMatrix,
    OfferedWeights,
    map_weights,
)
from vllm_heteroinfer.feed_forward.recipe import LayerRecipe, Recipe
from vllm_heteroinfer.feed_forward.shared_exchange import let_gpu_compute_experts
from vllm_heteroinfer.feed_forward.unpacking import SOURCE as UNPACK
from vllm_heteroinfer.kernels.coded import SHARED_COLUMNS, Code, code_places, pack, packed_layout, register
from vllm_heteroinfer.kernels.weight_memory import WeightMemory

SPANS = {
    "one": ((0, 8),),
    "two": ((0, 4), (4, 8)),
    "unequal": ((0, 5), (5, 6), (6, 13)),
    "each": tuple((number, number + 1) for number in range(4)),
}
SLOT_EXPERTS = 3


def wrong_choices(spans: tuple[tuple[int, int], ...]) -> list[str]:
    """Returns the errors in the choices for each number of experts."""
    total, wrong = spans[-1][1], []
    before: set[int] = set()
    choices = ExpertChoices(spans, SLOT_EXPERTS, torch.device("cpu"))
    ids = torch.tensor([[-1, *range(total)]], dtype=torch.int32)
    for number in range(total + 1):
        ranges = choices.gpu_ranges(number)
        taken = {expert for first, end in ranges for expert in range(first, end)}
        left = choices.mask_gpu_experts(ids, number)
        expected = [-1, *(-1 if expert in taken else expert for expert in range(total))]
        if left.tolist() != [expected] or left.dtype != torch.int32 or not left.is_contiguous():
            wrong.append(f"{number}: left {left.tolist()}")
        if len(taken) != number or not before <= taken:
            wrong.append(f"{number}: takes {sorted(taken)} after {sorted(before)}")
        uneven = max(
            abs(end - first - number * (b - a) / total)
            for (first, end), (a, b) in zip(ranges, spans, strict=True)
        )
        if uneven >= 1:
            wrong.append(f"{number}: takes {ranges} of {spans}")
        before = taken
    for first in range(total):
        for count in range(1, min(SLOT_EXPERTS, total - first) + 1):
            found = choices.expert_map(first, count).tolist()
            if found != [
                expert - first if first <= expert < first + count else -1 for expert in range(total)
            ]:
                wrong.append(f"map of {count} from {first}: {found}")
    return wrong


def misplaced_codes(name: str) -> int:
    """Returns how many codes of a packed weight are not at the place that `code_places` returns."""
    library, form = register(), FORMATS[name]
    weight = draw_coded(torch.Generator().manual_seed(5), form, 2 * SHARED_COLUMNS, 4 * SHARED_COLUMNS)
    packed = pack(library, weight).packed
    layout = packed_layout(library, form, weight.columns, weight.inputs)
    blocks = packed.view(-1, layout.block_bytes)[:, layout.header :].reshape(-1, 4, layout.unit_bytes)
    places, wide = code_places(library, form.code).long(), form.code <= Code.F16
    found = blocks[:, :, places // 2].long()  # [blocks, units, columns, inputs]
    codes = weight.codes.view(torch.uint8).long()
    if wide:
        found += blocks[:, :, places // 2 + 1].long() << 8
        codes = codes[:, 0::2] + (codes[:, 1::2] << 8)
    elif form.code >= Code.INT4:
        found = found >> places % 2 * 4 & 15
        codes = torch.stack((codes & 15, codes >> 4), -1).flatten(1)
    expected = codes.view(2, SHARED_COLUMNS, 4, SHARED_COLUMNS).transpose(1, 2)
    return int((found != expected).sum())


def offer_from_a_process() -> dict[str, Any]:
    """Maps another process's memory, and reads it after that process has ended.

    A wrong name must be refused.
    """
    script = "\n".join(
        (
            "import sys, torch",
            "from vllm_heteroinfer.kernels.weight_memory import WeightMemory",
            "memory = WeightMemory()",
            "tensor = memory.copy(torch.arange(5000, dtype=torch.int32))",
            "print(memory.fd, memory.name, memory.num_bytes, memory.offset_of(tensor[7:]), flush=True)",
            "sys.stdin.read()",
        )
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        fd, name, num_bytes, offset = owner.stdout.readline().split()
        offer = OfferedWeights(pid=owner.pid, fd=int(fd), name=name, num_bytes=int(num_bytes), layers=())
        mapped = map_weights(OfferedWeights.from_json(offer.to_json()), 1)
        try:
            map_weights(OfferedWeights(pid=owner.pid, fd=int(fd), name="other", num_bytes=1, layers=()), 1)
            refused = ""
        except ContractError as error:
            refused = str(error)
        owner.send_signal(signal.SIGKILL)
    values = mapped[int(offset) : int(offset) + 12].view(torch.int32).tolist()
    return {"values": values, "refused": refused, "gone": not os.path.exists(f"/proc/{owner.pid}")}


def offered(**changes: Any) -> OfferedMatrix:
    """Returns an offer of w13: 6 unpacked experts of 64 columns and 64 inputs in bf16.

    `changes` replace fields.
    """
    values = {
        "offset": 0,
        "expert_bytes": 64 * 64 * 2,
        "columns": 64,
        "inputs": 64,
        "has_headers": False,
        "block_scales_offset": None,
        "scale_shape": None,
        "dtype": "bfloat16",
        "code": -1,
    }
    return OfferedMatrix(**{**values, **changes})


def errors_in_offers() -> dict[str, str]:
    """Returns the error of each wrong matrix in an offer, and "" for correct ones."""
    memory = WeightMemory()
    memory.copy(torch.zeros(6 * 64 * 64 * 2, dtype=torch.uint8))
    scaled = {"code": 2, "expert_bytes": 64 * 64, "dtype": "float8_e4m3fn", "block_scales_offset": 0}
    matrices = {
        "plain": offered(),
        "scaled": offered(**scaled, scale_shape=(2, 1)),
        "type": offered(dtype="float32"),
        "scales": offered(**scaled, scale_shape=(1, 1)),
        "end": offered(offset=1 << 21),
        "no offset": offered(scale_shape=(2, 1)),
    }
    found = {}
    for name, matrix in matrices.items():
        layer = OfferedLayer(layer=3, first_expert=0, experts=6, first_column=0, w13=matrix, w2=matrix)
        offer = OfferedWeights(
            pid=os.getpid(), fd=memory.fd, name=memory.name, num_bytes=memory.num_bytes, layers=(layer,)
        )
        offer = OfferedWeights.from_json(offer.to_json())
        try:
            map_weights(replace(offer, layers=(replace(layer, w2=offered()),)), 1)
            found[name] = ""
        except ContractError as error:
            found[name] = str(error)
    return found


def found_layers() -> dict[str, Any]:
    """Returns the layers that a GPU finds in the offers of two ranks, which share columns or experts."""
    layer = LayerRecipe(experts=6, topk=2, hidden=64, inner=64, activation="silu", method="", parameters={})
    layers = {
        0: layer,
        1: layer,
        2: replace(layer, inner=128),
        3: replace(layer, activation="swigluoai"),
        4: replace(layer, topk=0, experts=1),
        5: layer,
        6: layer,
    }
    recipe = Recipe(layers=layers, dtype="bfloat16", max_rows=8, unit=32)

    def offer(rank: int, *, by_experts: bool) -> OfferedWeights:
        """Returns a rank's offer of five layers, with half of the columns or of the experts."""
        parts = []
        for number in (0, 1, 2, 3, 6):
            inner = layers[number].inner if by_experts else layers[number].inner // 2
            dtype = "float32" if number == 6 else "bfloat16"
            matrix = offered(
                offset=number << 20, columns=2 * inner, expert_bytes=2 * inner * 64 * 2, dtype=dtype
            )
            parts.append(
                OfferedLayer(
                    layer=number,
                    first_expert=3 * rank if by_experts else 0,
                    experts=3 if by_experts else 6,
                    first_column=0 if by_experts else rank * inner,
                    w13=matrix,
                    w2=replace(matrix, columns=64, inputs=inner, expert_bytes=inner * 64 * 2),
                )
            )
        return OfferedWeights(pid=1, fd=1, name="", num_bytes=1 << 30, layers=tuple(parts))

    answer: dict[str, Any] = {}
    for by_experts in (False, True):
        offers = {1 + rank: offer(rank, by_experts=by_experts) for rank in range(2)}
        found = find_gpu_layers(recipe, offers, lambda _: torch.empty(0))
        loads = list(found[0].split_into_loads([(0, 5)] if not by_experts else [(0, 3), (3, 5)], 2))
        answer["experts" if by_experts else "columns"] = {
            "layers": sorted(found),
            "kinds": [found[number].kind == found[0].kind for number in sorted(found)],
            "spans": found[0].spans,
            "expert_bytes": found[0].expert_bytes,
            "loads": [(load.content.first, load.content.experts, len(load.ranks)) for load in loads],
            "offsets": loads[-1].slot_offsets(2),
        }
    return answer


class NoMeter:
    """Replaces `GpuExpertMeter`, and counts nothing."""

    is_users_step = False

    def count(self, rows: int, copied_bytes: int) -> None:
        """See `GpuExpertMeter`."""


def fallback() -> dict[str, Any]:
    """Computes on a GPU after a feed-forward rank has ended, so that the rank's memory cannot be mapped."""
    with subprocess.Popen(["true"]) as ended:
        ended.wait()
    offer = OfferedWeights(pid=ended.pid, fd=3, name="weights", num_bytes=1 << 20, layers=())
    recipe = Recipe(layers={}, dtype="bfloat16", max_rows=8, unit=32)
    messages, reported = io.StringIO(), list[int]()
    handler = logging.StreamHandler(messages)
    logger = logging.getLogger("vllm_heteroinfer.feed_forward.shared_exchange")
    logger.addHandler(handler)
    exchange = object()
    used = let_gpu_compute_experts(
        exchange,
        recipe,
        {1: offer},
        reported.append,
        ring_bytes=1 << 20,
        captured_rows=0,
        device=torch.device("cuda", 0),
        meter=NoMeter(),
    )
    logger.removeHandler(handler)
    return {"uses ranks only": used is exchange, "reported": reported, "log": messages.getvalue()}


def compiled_sources() -> dict[str, int]:
    """Compiles the CUDA sources, which needs no GPU. Returns the number of bytes."""
    return {source.name: len(compile_source(source, "sm_80")) for source in (KERNELS, UNPACK)}


def main(_: str) -> None:
    """Prints the results of all checks."""
    assert WeightMemory().name != WeightMemory().name
    answer = {
        "choices": {name: wrong_choices(spans) for name, spans in SPANS.items()},
        "misplaced": {name: misplaced_codes(name) for name in FORMATS},
        "memory": offer_from_a_process(),
        "offers": errors_in_offers(),
        "layers": found_layers(),
        "fallback": fallback(),
        "compiled": compiled_sources(),
    }
    print(json.dumps(answer), flush=True)
