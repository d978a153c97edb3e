"""Checks for experts on a GPU that need no GPU: choices, layouts, memory. Runs in the worker's Python."""

import json
import os
import signal
import subprocess
import sys
from typing import Any

import torch

from heteroinfer_contract.errors import ContractError
from tests.integration.kernels.coded_weights import FORMATS, draw_coded
from vllm_heteroinfer.feed_forward.gpu_experts import ExpertChoices
from vllm_heteroinfer.feed_forward.offered_weights import OfferedWeights, map_weights
from vllm_heteroinfer.kernels.coded import SHARED_COLUMNS, Code, code_places, pack, packed_layout, register
from vllm_heteroinfer.kernels.weight_memory import WeightMemory

SPANS = {
    "one": ((0, 8),),
    "two": ((0, 4), (4, 8)),
    "unequal": ((0, 5), (5, 6), (6, 13)),
    "each": tuple((number, number + 1) for number in range(4)),
}
PER_SLOT = 3


def wrong_choices(spans: tuple[tuple[int, int], ...]) -> list[str]:
    """Returns the errors in the choices for each number of experts."""
    total, wrong = spans[-1][1], []
    before: set[int] = set()
    choices = ExpertChoices(spans, PER_SLOT, torch.device("cpu"))
    ids = torch.tensor([[-1, *range(total)]], dtype=torch.int32)
    for number in range(total + 1):
        ranges = choices.ranges(number)
        taken = {expert for first, end in ranges for expert in range(first, end)}
        left = choices.left(ids, number)
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
        for count in range(1, min(PER_SLOT, total - first) + 1):
            found = choices.expert_map(first, count).tolist()
            if found != [
                expert - first if first <= expert < first + count else -1 for expert in range(total)
            ]:
                wrong.append(f"map of {count} from {first}: {found}")
    return wrong


def misplaced_codes(name: str) -> int:
    """Returns how many codes of a packed weight are not at the place that `code_places` gives."""
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
    """Maps another process's memory, and reads it after that process has ended; another name is refused."""
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


def main(_: str) -> None:
    """Answers all checks."""
    assert WeightMemory().name != WeightMemory().name
    answer = {
        "choices": {name: wrong_choices(spans) for name, spans in SPANS.items()},
        "misplaced": {name: misplaced_codes(name) for name in FORMATS},
        "memory": offer_from_a_process(),
    }
    print(json.dumps(answer), flush=True)
