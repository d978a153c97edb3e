"""The mode that the plan chose, with the predicted times of all modes, as text for users. Pure."""

from dataclasses import dataclass

from heteroinfer_operator.api import ChosenMode, LoadSpec
from heteroinfer_operator.planning.prediction import Prediction

_MAX_REASON = 240
"""Longest reason in a sentence, in characters; `heteroinfer plan` prints whole reasons."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadFigures:
    """The predicted times of a plan under a load.

    Attributes:
        step: time of a decode step with num_concurrent requests.
        num_concurrent: number of requests that run at the same time.
        first_token: time from a request to its first token, if no other request is being served.
        total_s: seconds until all requests of the load have all their output.
    """

    step: Prediction
    num_concurrent: int
    first_token: Prediction
    total_s: float

    def __str__(self) -> str:
        together = f" of {self.num_concurrent} requests" if self.num_concurrent > 1 else ""
        first = f"first token after {self.first_token.step_s * 1e3:.0f} ms"
        return f"{self.total_s:.3g} s (step{together} {self.step.step_s * 1e3:.3g} ms, {first})"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeOption:
    """A mode that the plan could choose.

    Attributes:
        title: name of the mode for users, such as "GPU only".
        figures: predicted times, or None if the mode does not fit.
        reason: why the mode does not fit, or why the plan ignored its figures; "" for neither.
    """

    title: str
    figures: LoadFigures | None = None
    reason: str = ""

    @property
    def short_reason(self) -> str:
        """First line of the reason, cut to a length for one sentence."""
        first_line = self.reason.partition("\n")[0]
        return first_line if len(first_line) <= _MAX_REASON else f"{first_line[: _MAX_REASON - 3]}..."


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeChoice:
    """The mode that the plan chose, and the other modes that it could choose.

    Attributes:
        load: load for which the modes were compared.
        options: all modes, the chosen mode first.
        gains: lines about modes that would be faster with more memory.
    """

    chosen: ChosenMode
    load: LoadSpec
    options: tuple[ModeOption, ...]
    gains: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Describes the chosen mode, then each other mode: its times, or why it does not fit."""
        chosen, *others = self.options
        if chosen.reason:  # the plan ignored the figures
            parts = [f"{chosen.title} chosen: {chosen.short_reason}"]
        else:
            parts = [f"{chosen.title} chosen by prediction for {describe_load(self.load)}: {chosen.figures}"]
        for other in others:
            if other.figures is None:
                parts.append(f"{other.title} does not fit: {other.short_reason}")
            else:
                parts.append(f"{other.title}: {other.figures}")
        return "; ".join([*parts, *self.gains])


def describe_load(load: LoadSpec) -> str:
    """Describes a load, such as "1 request of 1,024 prompt and 256 output tokens"."""
    requests = "1 request" if load.requests == 1 else f"{load.requests:,} requests"
    together = "" if load.requests == 1 else " at the same time"
    return f"{requests} of {load.prompt_tokens:,} prompt and {load.output_tokens:,} output tokens{together}"
