"""Text for people: sizes, and foreign text made safe for a terminal and a log. Stdlib only; pure."""


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
