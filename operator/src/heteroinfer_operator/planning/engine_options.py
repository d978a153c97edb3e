"""What a user's `engine.args` say to vLLM, as far as a plan counts with it. Pure."""

from collections.abc import Sequence


def option_value(args: Sequence[str], option: str, *short: str) -> str | None:
    """Returns the value of an option, or None where it is not given; the last one counts.

    Args:
        args: as given to vLLM: `--opt value`, `--opt=value`, underscores or hyphens.
        option: as vLLM spells it.
        short: other spellings.
    """
    found = None
    for index, arg in enumerate(args):
        name, has_value, value = arg.partition("=")
        if name.replace("_", "-") != option and name not in short:
            continue
        found = value if has_value else next(iter(args[index + 1 : index + 2]), "")
    return found


def has_flag(args: Sequence[str], flag: str) -> bool:
    """Returns whether a flag is given, and not taken back."""
    said = [
        name for arg in args if (name := arg.replace("_", "-")) in (flag, f"--no-{flag.removeprefix('--')}")
    ]
    return bool(said) and said[-1] == flag
