"""Times on the GPU, measured with events in its streams. Imports torch."""

import contextlib
from collections import deque
from collections.abc import Iterator

import torch

from vllm_heteroinfer.feed_forward.stream_balance import Gaps

Events = tuple[torch.cuda.Event, torch.cuda.Event]
"""Begin and end of a piece of work in a stream."""


class StreamTimes:
    """Records how long work takes in a stream. Records nothing outside of `recording`."""

    def __init__(self) -> None:
        self._spans: dict[str, list[Events]] | None = None

    @contextlib.contextmanager
    def recording(self) -> Iterator[dict[str, list[Events]]]:
        """Turns the recording on in this context. Yields the events of the recorded work, by its name."""
        self._spans = {}
        try:
            yield self._spans
        finally:
            self._spans = None

    @contextlib.contextmanager
    def span(self, work: str, stream: torch.cuda.Stream) -> Iterator[None]:
        """Records begin and end of the work that this context puts into `stream`, if `recording` is on.

        Args:
            work: name of the work.
        """
        if self._spans is None:
            yield
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record(stream)
        yield
        end.record(stream)
        self._spans.setdefault(work, []).append((begin, end))


def total_s(spans: list[Events]) -> float:
    """Returns the seconds of all spans together. The device must have reached their ends."""
    return sum(begin.elapsed_time(end) for begin, end in spans) / 1e3


class GapTimes:
    """Measures the time between a layer's answer and the next layer's ask on the device.

    In this time the GPU computes attention, and layers whose experts stay on the GPU. Events are read only
    after the device has reached them, so no host thread waits.
    """

    def __init__(self) -> None:
        self._gaps = Gaps()
        self._last_answer: tuple[int, int, torch.cuda.Event] | None = None
        self._unread: deque[tuple[int, Events]] = deque()

    def gap_s(self, rows: int) -> float:
        """Returns the expected gap in seconds for a step with `rows` rows; 0 before the first measurement."""
        return self._gaps.gap_s(rows)

    def note_ask(self, layer: int, rows: int) -> None:
        """Ends a gap at this place of the stream, and reads the gaps whose end the device has reached.

        Ignores the gap between two steps: the layers of a step ascend and have the same number of rows.
        """
        if self._last_answer is not None:
            answered_layer, answered_rows, answer_event = self._last_answer
            self._last_answer = None
            is_same_step = answered_layer < layer and answered_rows == rows
            if is_same_step:
                self._unread.append((rows, (answer_event, _record_event())))
        while self._unread:
            measured_rows, (begin, end) = self._unread[0]
            if not end.query():  # the device has not reached the end of this gap yet
                break
            self._unread.popleft()
            self._gaps.note(measured_rows, begin.elapsed_time(end) / 1e3)

    def note_answer(self, layer: int, rows: int) -> None:
        """Begins a gap at this place of the stream, after the answer for a layer."""
        self._last_answer = (layer, rows, _record_event())


def _record_event() -> torch.cuda.Event:
    """Returns an event that the current stream records once it has done its work so far."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
