"""The options among vLLM's arguments, told from values as its parser does; nothing else reads `engine.args`.

Stdlib only; pure. Source: vllm/utils/argparse_utils.py::FlexibleArgumentParser.parse_args@v0.32.0.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
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
"""Short form -> option. Those of one letter take a value behind them without a blank, too."""
_NUMBER: Final = re.compile(r"-\d+(\.\d*)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenOption:
    """An option as it was given.

    Attributes:
        arg: the argument as the user wrote it.
        name: the option with hyphens, of a short form in full; an abbreviation stays one.
        path: keys inside its JSON, of `--option.key.key`.
        value: the first one, or None.
    """

    arg: str
    name: str
    path: tuple[str, ...]
    value: str | None

    @property
    def is_taken_back(self) -> bool:
        """Whether a flag is given with `no-`."""
        return self.name.startswith("--no-")

    @property
    def option(self) -> str:
        """The name, of a flag without `no-`."""
        return self.name.replace("--no-", "--", 1) if self.is_taken_back else self.name

    def may_be(self, option: str) -> bool:
        """Whether vLLM's parser may take this for an option: by its name, or by its beginning.

        A beginning counts for every option that has it: of several the parser refuses it.
        """
        if not self.name.strip("-"):
            return False
        if self.name.startswith("--"):
            return option.startswith(self.name)
        return any(long == option and short.startswith(self.name) for short, long in SHORT.items())


def given_options(args: Sequence[str]) -> tuple[GivenOption, ...]:
    """Finds the options among arguments.

    Whatever looks like an option counts, behind `--` and as the value of `--option.key`, too:
    vLLM looks for `--config` everywhere.
    """
    return _read(tuple(args))


@lru_cache(maxsize=256)
def _read(args: tuple[str, ...]) -> tuple[GivenOption, ...]:
    pairs = zip(args, (*args[1:], None), strict=False)
    return tuple(_given(arg, following) for arg, following in pairs if _is_option(arg))


def _is_option(arg: str) -> bool:
    return arg.startswith("-") and arg != "-" and not _NUMBER.fullmatch(arg)


def _given(arg: str, following: str | None) -> GivenOption:
    head, equals, text = arg.partition("=")
    name, *path = head.split(".")
    # An option may be the value: vLLM takes dotted ones out first, and what is behind them moves up.
    value = text if equals else following
    if path:
        path[-1] = path[-1].removesuffix("+")
    if name.startswith("--"):
        name = name.replace("_", "-")
    elif name not in SHORT and arg[:2] in SHORT:
        name, path, value = arg[:2], [], arg[2:]
    return GivenOption(arg=arg, name=SHORT.get(name, name), path=tuple(path), value=value)
