"""Options of vLLM in a user's `engine.args`, as far as a plan counts with them. Pure."""

from collections.abc import Sequence


def option_value(args: Sequence[str], option: str, *short: str) -> str | None:
    """Returns the value of an option, or None if it is not given; the last one counts.

    Args:
        args: as given to vLLM, in any spelling that its parser takes: `--opt value`, `--opt=value`,
            underscores or hyphens, a prefix such as `--quant`, and `-q value`, `-q=value` or `-qvalue`.
        option: as vLLM spells it.
        short: other spellings.
    """
    found = None
    for index, arg in enumerate(args):
        name, has_value, value = arg.partition("=")
        following = next(iter(args[index + 1 : index + 2]), "")
        attached = next((arg[2:] for form in short if len(form) == 2 and arg.startswith(form)), "")
        if _means(name, option) or name in short:
            found = value if has_value else following
        elif attached:
            found = attached
    return found


def has_flag(args: Sequence[str], flag: str) -> bool:
    """Returns whether a flag is given and no later argument takes it back."""
    negated = f"--no-{flag.removeprefix('--')}"
    given = False
    for arg in args:
        if _means(arg, flag):
            given = True
        elif _means(arg, negated) and len(arg) > len("--no-"):
            given = False
    return given


def _means(name: str, option: str) -> bool:
    """Returns whether vLLM's parser takes a name for an option: argparse accepts prefixes.

    Source: vllm/utils/argparse_utils.py::FlexibleArgumentParser@v0.32.0. It refuses an ambiguous prefix.
    """
    return name.startswith("--") and len(name) > len("--") and option.startswith(name.replace("_", "-"))
