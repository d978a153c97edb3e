"""Writes a timeline of each long step into the file EXCHANGE_TRACE. For the PYTHONPATH of a group's pods.

A line is one step: its rows, the nanoseconds that each rank computed, and spans [work, layer, begin, end] in
ms by the GPU's clock. tests/bench/exchange_trace.py reads the file.
"""

import json
import os
import runpy
import threading
from pathlib import Path
from typing import Any

SHARED = "vllm_heteroinfer.feed_forward.shared_exchange"


class TracedSends:
    """An exchange that also records its asks and answers as spans."""

    def __init__(self, exchange: Any, times: Any) -> None:
        self._exchange, self._times, self.slab = exchange, times, exchange.slab

    def ask(self, *arguments: Any) -> Any:
        import torch

        with self._times.span("answer", torch.cuda.current_stream()):
            return self._exchange.ask(*arguments)

    def send(self, *arguments: Any, **options: Any) -> Any:
        import torch

        with self._times.span("ask", torch.cuda.current_stream()):
            receive = self._exchange.send(*arguments, **options)

        def traced_receive() -> Any:
            with self._times.span("answer", torch.cuda.current_stream()):
                return receive()

        return traced_receive


class Steps:
    """The steps of a process. A step begins at its first layer, and ends after its last one."""

    def __init__(self) -> None:
        self.recording: Any = None
        self.spans: dict[str, list[Any]] = {}
        self.counts: list[tuple[int, dict[str, int]]] = []
        self.busy_ns: list[int] = []

    def before(self, exchange: Any, layer: int) -> None:
        """Begins a step at its first layer."""
        if layer == exchange._first_layer.number:
            self.busy_ns = exchange._read_busy_ns()
            self.counts = []
            self.recording = exchange.times.recording()
            self.spans = self.recording.__enter__()

    def after(self, exchange: Any, layer: int, rows: int) -> None:
        """Ends a step after its last layer."""
        if self.recording is None:
            return
        self.counts.append((layer, {work: len(spans) for work, spans in self.spans.items()}))
        if layer == exchange._last_layer.number:
            self.recording.__exit__(None, None, None)
            self.recording = None
            given = (exchange, rows, self.spans, self.counts, self.busy_ns)
            threading.Thread(target=write, args=given, daemon=True).start()


def write(exchange: Any, rows: int, spans: Any, counts: Any, busy_ns: list[int]) -> None:
    """Writes a step after the GPU has reached its end."""
    import torch

    with torch.cuda.device(exchange._device):
        begins = [begin for found in spans.values() for begin, _ in found]
        for found in spans.values():
            found[-1][1].synchronize()
        first = spans["ask"][0][0] if "ask" in spans else begins[0]
        lines, before = [], dict.fromkeys(spans, 0)
        for layer, after in counts:
            for work, end in after.items():
                lines += [
                    [work, layer, first.elapsed_time(a), first.elapsed_time(b)]
                    for a, b in spans[work][before.get(work, 0) : end]
                ]
                before[work] = end
        # Copies for the next step come after the last layer.
        spent = [b - a for a, b in zip(busy_ns, exchange._read_busy_ns(), strict=True)]
    step = {"rows": rows, "busy_ns": spent, "spans": lines}
    with Path(os.environ["EXCHANGE_TRACE"]).open("a") as file:
        file.write(json.dumps(step) + "\n")


def change(module: Any) -> None:
    """Makes the exchange record the asks of each long step."""
    steps, original, start = Steps(), module.SharedExchange.ask, module.SharedExchange.__init__

    def init(exchange: Any, *arguments: Any, **options: Any) -> None:
        start(exchange, *arguments, **options)
        exchange._exchange = TracedSends(exchange._exchange, exchange.times)

    def ask(exchange: Any, layer: int, x: Any, *others: Any) -> Any:
        is_short = len(x) <= max(exchange._captured_rows, 64)
        if is_short or layer not in exchange._layers:
            return original(exchange, layer, x, *others)
        steps.before(exchange, layer)
        answer = original(exchange, layer, x, *others)
        steps.after(exchange, layer, len(x))
        return answer

    module.SharedExchange.__init__ = init
    module.SharedExchange.ask = ask


if "EXCHANGE_TRACE" in os.environ:
    runpy.run_path(str(Path(__file__).parents[2] / "changed_module.py"))["change_on_import"](SHARED, change)
