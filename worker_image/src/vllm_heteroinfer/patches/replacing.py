"""Replaces functions of vLLM. Checks each function, replaces it once and keeps the original. Imports vLLM."""

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

from vllm_heteroinfer.patches.registry import Patch, build_refusal

_ORIGINAL = "heteroinfer_original"
"""Attribute of a replacement that has the original function."""


def replace(patch: Patch, build_replacement: Callable[[Any], Callable[..., Any]]) -> None:
    """Replaces the function of vLLM that a patch targets. A second call does nothing.

    Args:
        build_replacement: takes vLLM's function, and returns the replacement.

    Raises:
        PatchError: vLLM's function is missing or differs from the verified version.
    """
    owner, name = _find_target(patch)
    original: Any = getattr(owner, name, None)
    if hasattr(original, _ORIGINAL):  # replaced already
        return
    check_target(patch, original)
    replacement = functools.wraps(original)(build_replacement(original))
    setattr(replacement, _ORIGINAL, original)
    setattr(owner, name, replacement)


def check_target(patch: Patch, target: Any) -> None:
    """Raises PatchError unless `target` is the function that the patch was written for.

    Compares the version of vLLM, too, because a function with the same parameters can have another body.
    """
    import vllm

    version = str(vllm.__version__)
    if not callable(target):
        raise build_refusal(patch, "nothing" if target is None else repr(target), version)
    parameters = tuple(inspect.signature(target).parameters)
    if parameters != patch.parameters:
        raise build_refusal(patch, f"parameters ({', '.join(parameters)})", version)
    if version.split("+", maxsplit=1)[0] not in patch.verified:
        raise build_refusal(patch, "an unverified version of the function", version)


def _find_target(patch: Patch) -> tuple[Any, str]:
    """Returns the module or class that contains the target, and the target's name there."""
    module, path = patch.target.split(":")
    *owners, name = path.split(".")
    return functools.reduce(getattr, owners, importlib.import_module(module)), name
