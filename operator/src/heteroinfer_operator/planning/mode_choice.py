"""The result of a choice between modes, with the figures of each mode, for people. Pure."""

from dataclasses import dataclass

from heteroinfer_operator.api import ChosenMode, LoadSpec
from heteroinfer_operator.planning.prediction import Prediction

_MAX_REASON = 240
"""Characters of a reason in a sentence; `heteroinfer plan` prints whole reasons."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadFigures:
    """The predicted times of a plan under a load.

    Attributes:
        step: a decode step with as many requests as run at once.
        at_once: requests that run at once.
        first_token: from a request to its first token, without waiting for other requests.
        total_s: seconds for all prompts and all output of the load.
    """

    step: Prediction
    at_once: int
    first_token: Prediction
    total_s: float

    def __str__(self) -> str:
        together = f" of {self.at_once} requests" if self.at_once > 1 else ""
        first = f"first token after {self.first_token.step_s * 1e3:.0f} ms"
        return f"{self.total_s:.3g} s (step{together} {self.step.step_s * 1e3:.3g} ms, {first})"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeOption:
    """A mode that the plan could choose.

    Attributes:
        figures: predicted times, or None if the mode does not fit.
        reason: why the mode does not fit, or why its figures do not count; "" for a mode that fits.
    """

    title: str
    figures: LoadFigures | None = None
    reason: str = ""

    @property
    def short_reason(self) -> str:
        """The first line of the reason, shortened."""
        line = self.reason.partition("\n")[0]
        return line if len(line) <= _MAX_REASON else f"{line[: _MAX_REASON - 3]}..."


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeChoice:
    """A mode that the plan chose, and the others.

    Attributes:
        options: all modes, the chosen mode first.
        gains: what more memory would gain, one line each.
    """

    chosen: ChosenMode
    load: LoadSpec
    options: tuple[ModeOption, ...]
    gains: tuple[str, ...] = ()

    def __str__(self) -> str:
        own, *others = self.options
        words = [f"{own.title} chosen by prediction for {describe_load(self.load)}: {own.figures}"]
        if own.reason:
            words = [f"{own.title} chosen: {own.short_reason}"]
        for each in others:
            found = f"does not fit: {each.short_reason}" if each.figures is None else str(each.figures)
            words.append(f"{each.title}: {found}" if each.figures else f"{each.title} {found}")
        return "; ".join([*words, *self.gains])


def describe_load(load: LoadSpec) -> str:
    """Returns the load in words."""
    requests = "1 request" if load.requests == 1 else f"{load.requests:,} requests at once"
    return f"{requests} of {load.prompt_tokens:,} prompt and {load.output_tokens:,} output tokens"
