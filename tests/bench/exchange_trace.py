"""Shows the parts of the time of long prompts, from timelines of traced_exchange/sitecustomize.py.

    python -m tests.bench.exchange_trace FILE

For each number of rows, the last step counts. Times are in ms per layer: the mean over all layers except the
first and the last. The columns:

- `gap`: from an answer to the next ask.
- `wait for copies`: the GPU only waits for experts.
- `answer`: the GPU waits for CPUs, and then reads their answer.
- `CPUs`: the slowest rank computes.
- `exchange`: the rest of the time from ask to answer, if the CPUs end after the GPU.
- `link idle`: nothing is copied.
"""

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

Span = tuple[float, float]
COLUMNS = (
    *("layer", "gap", "ask", "copy", "link idle", "wait for copies", "unpack", "compute", "answer"),
    *("CPUs", "exchange"),
)


def read_steps(file: Path) -> list[dict[str, Any]]:
    """Returns the last step for each number of rows."""
    steps = (json.loads(line) for line in file.read_text().splitlines())
    return [step for _, step in sorted({step["rows"]: step for step in steps}.items())]


def of_layers(spans: Iterable[Sequence[Any]]) -> dict[int, dict[str, list[Span]]]:
    """Returns the spans by layer and kind of work."""
    layers: dict[int, dict[str, list[Span]]] = {}
    for work, layer, begin, end in spans:
        layers.setdefault(layer, {}).setdefault(work, []).append((begin, end))
    return layers


def length(spans: Iterable[Span]) -> float:
    """Returns the sum of lengths."""
    return sum(end - begin for begin, end in spans)


def between(spans: Sequence[Span]) -> float:
    """Returns the time between spans, which must not overlap."""
    ordered = sorted(spans)
    return sum(max(0.0, after[0] - before[1]) for before, after in pairwise(ordered))


def summarize(step: Mapping[str, Any]) -> dict[str, float]:
    """Returns the mean of each column over the step's layers, without the first and the last."""
    layers = of_layers(step["spans"])
    numbers = sorted(layers)
    busy_ms = max(step["busy_ns"]) / 1e6 / len(numbers)
    sums = dict.fromkeys(COLUMNS, 0.0)
    counted = list(zip(numbers, numbers[1:-1] or numbers[1:], strict=False))
    for before, number in counted:
        layer = layers[number]
        streamed = {work: spans for work, spans in layer.items() if work != "copy"}
        on_gpu = [span for spans in streamed.values() for span in spans]
        previous_end = max(
            end for work, spans in layers[before].items() if work != "copy" for _, end in spans
        )
        begin, end = min(begin for begin, _ in on_gpu), max(end for _, end in on_gpu)
        copies = sorted(layer.get("copy", []))
        earlier = layers[before].get("copy", [])
        asked = layer.get("ask") or layer.get("answer") or on_gpu
        answered = layer.get("answer", [])
        sums["layer"] += end - previous_end
        sums["gap"] += begin - previous_end
        sums["ask"] += length(layer.get("ask", []))
        sums["copy"] += length(copies)
        sums["link idle"] += between([*earlier[-1:], *copies])
        sums["wait for copies"] += between(on_gpu)
        sums["unpack"] += length(layer.get("unpack", []))
        sums["compute"] += length(layer.get("compute", []))
        sums["answer"] += length(answered)
        sums["CPUs"] += busy_ms
        if answered:
            sums["exchange"] += max(0.0, answered[-1][1] - asked[0][1] - busy_ms)
    return {name: total / max(1, len(counted)) for name, total in sums.items()}


def to_table(steps: Iterable[Mapping[str, Any]]) -> str:
    """Returns a table with a row for each step."""
    lines = ["| rows | " + " | ".join(COLUMNS) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    for step in steps:
        cells = (f"{value:.2f}" for value in summarize(step).values())
        lines.append(f"| {step['rows']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(to_table(read_steps(Path(sys.argv[1]))))
