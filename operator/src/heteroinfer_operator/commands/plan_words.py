"""Formats counts and times for the output of `heteroinfer plan` and `new`. Pure."""

from heteroinfer_operator.planning.prediction import Prediction

INDENT = "  "


def count(number: int, noun: str) -> str:
    """Returns a number with its noun: "1 pod", "1,024 tokens"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def duration(seconds: float) -> str:
    """Returns a time with about three digits: "2.10 ms", "373 ms", "11.2 s"."""
    return f"{three_digits(seconds * 1e3)} ms" if seconds < 0.9995 else f"{three_digits(seconds)} s"


def spread(prediction: Prediction) -> str:
    """Returns a predicted time with its range: "373 ms (115 ms to 1.20 s)"."""
    least, most = duration(prediction.least_s), duration(prediction.most_s)
    return f"{duration(prediction.step_s)} ({least} to {most})"


def three_digits(number: float) -> str:
    """Returns a number with about three digits: "2.68", "37.9", "1,234"."""
    if number < 9.995:
        return f"{number:.2f}"
    return f"{number:.1f}" if number < 99.95 else f"{number:,.0f}"
