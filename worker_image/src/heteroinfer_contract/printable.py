"""Text for people: sizes, layers, and foreign text made safe for a terminal and a log.

Stdlib only; pure.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import Final

_SHOWN_RANGES: Final = 3
"""The most ranges of layers in a text. More would not fit a column of a table."""


def printable(text: str, *, keep: str = "") -> str:
    r"""Replaces each control character by its escaped form, such as `\x1b`.

    A terminal executes control characters: they can set the title, write the clipboard, or hide text. A line
    break can forge a line of a log. Bidirectional marks can reorder what a reader sees.

    Args:
        text: any text, lone surrogates included.
        keep: control characters that stay, such as a line break.
    """
    if text.isprintable():
        return text
    return "".join(
        character
        if character.isprintable() or character in keep
        else character.encode("unicode_escape").decode("ascii")
        for character in text
    )


def format_bytes(size: float) -> str:
    """Returns a size for people: GiB with two digits, MiB below 0.1 GiB."""
    return f"{size / 2**30:.2f} GiB" if abs(size) >= 2**30 // 10 else f"{size / 2**20:.1f} MiB"


def format_layers(layers: Sequence[int]) -> str:
    """Returns ascending layers as ranges, such as "0-3, 7"; as "spread over 3-47" if they are many ranges."""
    # Within a run of consecutive layers, a layer's number minus its position is the same.
    runs = [
        [layer for _, layer in run]
        for _, run in groupby(enumerate(layers), key=lambda numbered: numbered[1] - numbered[0])
    ]
    if len(runs) <= _SHOWN_RANGES:
        return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"spread over {layers[0]}-{layers[-1]}"
