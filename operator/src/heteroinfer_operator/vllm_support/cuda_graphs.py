"""The steps for which vLLM captures CUDA graphs, as `engine.args` set them. Pure.

Source: vllm/config/vllm.py::VllmConfig._set_cudagraph_sizes@v0.32.0.
"""

import json
from collections.abc import Mapping
from functools import lru_cache
from itertools import takewhile
from typing import Any, Final

from heteroinfer_contract.given_options import given_options

_CONFIG: Final = "--compilation-config"
_SIZES: Final = "--cudagraph-capture-sizes"
_MOST: Final = "--max-cudagraph-capture-size"
_LEVEL: Final = "--optimization-level"
_DEFAULT_MOST: Final = 512
"""vLLM's own limit. The limit is 1,024 on GPUs of compute capability 10, but plans have at most 256 requests
in a step, and vLLM captures at most two rows for each."""


def most_captured_rows(args: tuple[str, ...], max_num_seqs: int, max_num_batched_tokens: int) -> int:
    """Returns the rows of the largest CUDA graph that vLLM captures; 0 if the arguments switch graphs off."""
    config = _read_config(args)
    if config.get("cudagraph_mode") in ("NONE", 0):  # name and value of the mode without graphs
        return 0
    sizes, most = config.get("cudagraph_capture_sizes"), config.get("max_cudagraph_capture_size")
    if isinstance(sizes, list):  # the user listed all sizes
        numbers = (size for size in sizes if isinstance(size, int))
        return max((size for size in numbers if size <= max_num_batched_tokens), default=0)
    if not isinstance(most, int):
        most = min(2 * max_num_seqs, _DEFAULT_MOST)
    if most >= max_num_batched_tokens:  # vLLM then also captures a step with all its tokens
        return max_num_batched_tokens
    return _floor_to_captured(most)


def _floor_to_captured(rows: int) -> int:
    """Returns the largest number of rows, at most `rows`, that vLLM captures by default.

    These numbers are 1, 2, 4, then multiples of 8 below 256, then multiples of 16.
    """
    if rows < 8:
        return max((size for size in (1, 2, 4) if size <= rows), default=0)
    return rows // 8 * 8 if rows < 256 else rows // 16 * 16


@lru_cache(maxsize=256)
def _read_config(args: tuple[str, ...]) -> Mapping[str, Any]:
    """Returns the settings of CUDA graphs in the arguments, as keys of --compilation-config.

    If several arguments set a key, the last argument counts.
    """
    config: dict[str, Any] = {}
    for option in given_options(args):
        if option.may_mean(_SIZES):
            sizes = [int(text) for text in takewhile(str.isdecimal, option.values)]
            config["cudagraph_capture_sizes"] = sizes or None  # None: the option has no sizes
        elif option.may_mean(_MOST):
            config["max_cudagraph_capture_size"] = _read_json(option.value)
        elif option.may_mean(_LEVEL) and option.value == "0":
            config["cudagraph_mode"] = "NONE"
        elif option.may_mean(_CONFIG):
            value = _read_json(option.value)
            if option.path:  # --compilation-config.KEY=VALUE
                config[option.path[0]] = value
            elif isinstance(value, dict):
                config |= value
    return config


def _read_json(text: str | None) -> Any:
    """Returns the value of a JSON text; the text itself if it is not JSON."""
    try:
        return json.loads(text or "null")
    except ValueError:
        return text
