"""Runs vLLM's linear layers, embeddings and heads on our kernels. Imports torch; vLLM only in functions."""

import logging
from collections.abc import Callable, Mapping

import torch

from heteroinfer_contract import names
from heteroinfer_contract.errors import ContractError
from vllm_heteroinfer.kernels import linear
from vllm_heteroinfer.kernels.library import KernelLibrary, KernelsUnavailableError

_logger = logging.getLogger(__name__)

AUTO = "auto"
ONEDNN = "onednn"

Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""The `cpu_linear` of a layer: takes the input, `layer.weight` and the bias, and returns the output."""


def is_wanted(env: Mapping[str, str]) -> bool:
    """Returns whether the user's setting selects our kernels.

    Raises:
        ContractError: the setting is neither `auto` nor `onednn`.
    """
    value = env.get(names.ENV_CPU_LINEAR, AUTO)
    if value not in (AUTO, ONEDNN):
        raise ContractError(
            f"{names.ENV_CPU_LINEAR} must be {AUTO} or {ONEDNN} (got {value!r}). Change engine.env"
        )
    return value == AUTO


class LinearLayers:
    """Makes vLLM's layers use our kernels. If vLLM must compute layers, logs each reason once."""

    def __init__(self) -> None:
        self._library: KernelLibrary | None = None
        self._logged: set[str] = set()

    def pack_layer(self, layer: torch.nn.Module, *, remove_weight: bool) -> bool:
        """Packs a layer's weight and sets its `cpu_linear`. Returns False if vLLM must compute the layer.

        `layer.weight` becomes the packed weight, which vLLM passes to `cpu_linear` at each call.
        An embedding keeps its table, and packs a copy when it is first used as a head.

        Args:
            layer: a layer with a loaded `weight`.
            remove_weight: whether only `cpu_linear` reads the weight. vLLM sets this argument.
        """
        problem = self._find_problem(layer)
        if problem:
            self._log_once(logging.INFO, f"CPU linear layers with {problem}: vLLM computes them (oneDNN)")
        if problem is not None:
            return False
        weight = layer.weight.data
        columns = weight.shape[0]
        if remove_weight or _is_head(layer):
            layer.weight = torch.nn.Parameter(linear.pack(weight), requires_grad=False)
            layer.cpu_linear = _multiplier(columns)
        else:
            layer.cpu_linear = _lazy_multiplier(weight)
        return True

    def _find_problem(self, layer: torch.nn.Module) -> str | None:
        """Returns why the kernels cannot compute a layer; None if they can.

        Returns "" if no reason must be logged for this layer.
        """
        weight = layer.weight
        if weight.is_meta or weight.ndim != 2 or weight.device.type != "cpu":
            return ""  # a layer of another stage, or not a linear layer
        if weight.dtype != torch.bfloat16:
            return f"{weight.dtype} weights"
        bias = getattr(layer, "bias", None)
        if bias is not None and bias.dtype != torch.bfloat16:
            return f"a {bias.dtype} bias"
        if _is_head(layer) and _head_dtype() not in (None, weight.dtype):
            return f"a head computed in {_head_dtype()}"
        return None if self._load_kernels() else ""  # `_load_kernels` logs the reason itself

    def _load_kernels(self) -> bool:
        """Loads the kernels once. If that fails, logs a warning and returns False."""
        if self._library is not None:
            return True
        try:
            self._library = linear.prepare()
        except KernelsUnavailableError as error:
            self._log_once(
                logging.WARNING, f"CPU linear layers: vLLM's slower kernels (oneDNN) compute them: {error}"
            )
            return False
        paths, threads = ", ".join(self._library.paths), self._library.calls.heteroinfer_threads()
        self._log_once(
            logging.INFO, f"CPU linear layers: HeteroInfer's bf16 kernels ({paths}), {threads} threads"
        )
        return True

    def _log_once(self, level: int, text: str) -> None:
        """Logs a text, if it was not logged before."""
        if text not in self._logged:
            self._logged.add(text)
            _logger.log(level, text)


def _multiplier(columns: int) -> Product:
    """Returns the `cpu_linear` of a layer whose packed weight has `columns` columns."""

    def multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Multiplies the input by the packed weight, and adds the bias."""
        return linear.linear(x, weight, bias, columns)

    return multiply


def _lazy_multiplier(weight: torch.Tensor) -> Product:
    """Returns the `cpu_linear` of an embedding. Its first call packs a copy of the table.

    vLLM only looks up rows in most embeddings, so a packed copy would waste memory. A model that uses an
    embedding as its head makes the first call in the warm-up, before the worker measures the headroom for the
    KV cache.
    """
    packed: list[torch.Tensor] = []

    def multiply(x: torch.Tensor, _: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Multiplies the input by the table, and adds the bias."""
        if not packed:
            packed.append(linear.pack(weight))
        return linear.linear(x, packed[0], bias, weight.shape[0])

    return multiply


def _is_head(layer: torch.nn.Module) -> bool:
    """Returns whether a layer computes logits."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    return isinstance(layer, ParallelLMHead)


def _head_dtype() -> torch.dtype | None:
    """Returns the type in which vLLM computes logits, or None without a model's configuration.

    If this type differs from the type of the head's weight, vLLM reads the weight itself, so the weight must
    not be packed.
    Source: vllm/model_executor/layers/logits_processor.py::LogitsProcessor._apply_head@v0.32.0.
    """
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    return None if config is None or config.model_config is None else config.model_config.head_dtype
