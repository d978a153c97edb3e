"""Finds the options in vLLM's arguments, as vLLM's parser does; only this module reads `engine.args`.

Stdlib only; pure. Source: vllm/utils/argparse_utils.py::FlexibleArgumentParser.parse_args@v0.32.0.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import takewhile
from typing import Final

from heteroinfer_contract.word_table import word_pairs

SHORT: Final[Mapping[str, str]] = word_pairs(
    """
    -ac --attention-config -asc --api-server-count -cc --compilation-config -dc --diffusion-config
    -dcp --decode-context-parallel-size -dp --data-parallel-size -dpa --data-parallel-address
    -dpb --data-parallel-backend -dpe --data-parallel-external-lb -dph --data-parallel-hybrid-lb
    -dpl --data-parallel-size-local -dpm --data-parallel-multi-port-external-lb -dpn --data-parallel-rank
    -dpp --data-parallel-rpc-port -dpr --data-parallel-start-rank -ep --enable-expert-parallel -n --nnodes
    -O --optimization-level -pcp --prefill-context-parallel-size -pp --pipeline-parallel-size
    -q --quantization -r --node-rank -sc --speculative-config -tp --tensor-parallel-size
    """
)
"""Short form -> option. A value may follow a short form of one letter directly (`-O3`)."""
_NUMBER: Final = re.compile(r"-\d+(\.\d*)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenOption:
    """An option as the user gave it.

    Attributes:
        arg: the argument as the user wrote it.
        name: the option with hyphens. Short forms are expanded, abbreviations are not.
        path: keys inside the option's JSON, from `--option.key.key`.
        value: the first value, or None.
        values: all values, of an option that takes several.
    """

    arg: str
    name: str
    path: tuple[str, ...]
    value: str | None
    values: tuple[str, ...] = field(default=(), compare=False)

    @property
    def is_negated(self) -> bool:
        """Whether the flag has the prefix `no-`."""
        return self.name.startswith("--no-")

    @property
    def option(self) -> str:
        """The name without the prefix `no-` of a flag."""
        return self.name.replace("--no-", "--", 1) if self.is_negated else self.name

    def may_mean(self, option: str) -> bool:
        """Whether vLLM's parser may read this argument as `option`, by its full name or an abbreviation.

        An abbreviation matches every option that begins with it; the parser refuses ambiguous abbreviations.
        """
        if not self.name.strip("-"):
            return False
        if self.name.startswith("--"):
            return option.startswith(self.name)
        return any(long == option and short.startswith(self.name) for short, long in SHORT.items())


def given_options(args: Sequence[str]) -> tuple[GivenOption, ...]:
    """Finds the options among arguments.

    Every argument that looks like an option counts, even after `--` or as the value of `--option.key`,
    because vLLM looks for `--config` everywhere.
    """
    return _find_options(tuple(args))


@lru_cache(maxsize=256)
def _find_options(args: tuple[str, ...]) -> tuple[GivenOption, ...]:
    """Finds the options among vLLM's arguments; caches its results."""
    return tuple(_parse_option(arg, args[end:]) for end, arg in enumerate(args, 1) if _is_option(arg))


def _is_option(arg: str) -> bool:
    return arg.startswith("-") and arg != "-" and not _NUMBER.fullmatch(arg)


def _parse_option(arg: str, following: Sequence[str]) -> GivenOption:
    """Parses one option of the arguments.

    Args:
        arg: the option, such as `--port`, `--port=80`, `--option.key` or `-O3`.
        following: all arguments after the option.
    """
    full_name, equals, value_after_equals = arg.partition("=")
    name, *path = full_name.split(".")
    value: str | None = value_after_equals
    values: tuple[str, ...] = (value_after_equals,)
    if not equals:
        # `value` is the next argument, even if it begins with "-": vLLM takes any argument as the value of a
        # dotted option. vLLM removes dotted options with their values before it parses the others: in
        # `--port --option.key 1 80`, the value of --port is 80. So `value` can be the name of an option.
        value = following[0] if following else None
        # Several values end before the next option.
        values = tuple(takewhile(lambda text: not _is_option(text), following))
    if path:  # `--option.list+ VALUE` appends a value to a list
        path[-1] = path[-1].removesuffix("+")
    if name.startswith("--"):
        name = name.replace("_", "-")
    elif name not in SHORT and arg[:2] in SHORT:
        name, path, value = arg[:2], [], arg[2:]  # such as -O3
        values = (value,)
    return GivenOption(arg=arg, name=SHORT.get(name, name), path=tuple(path), value=value, values=values)
