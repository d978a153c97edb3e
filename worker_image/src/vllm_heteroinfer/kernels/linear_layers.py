"""vLLM's linear layers, embeddings and heads on our kernels. Imports torch; vLLM when a layer comes."""

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


def is_wanted(env: Mapping[str, str]) -> bool:
    """Returns whether our kernels shall serve where they can.

    Raises:
        ContractError: the setting is neither `auto` nor `onednn`.
    """
    value = env.get(names.ENV_CPU_LINEAR, AUTO)
    if value not in (AUTO, ONEDNN):
        raise ContractError(f"got {names.ENV_CPU_LINEAR}={value!r}, expected {AUTO} or {ONEDNN}")
    return value == AUTO


class LinearLayers:
    """Takes the layers that the kernels can compute, and says once why it leaves others."""

    def __init__(self) -> None:
        self._library: KernelLibrary | None = None
        self._said: set[str] = set()

    def take(self, layer: torch.nn.Module, *, remove_weight: bool) -> bool:
        """Packs a layer's weight and sets its `cpu_linear`; returns False where vLLM shall do it.

        `layer.weight` becomes the packed weight: vLLM passes it to `cpu_linear` at each call.
        An embedding keeps its table, and packs a copy once it is really used as a head.

        Args:
            layer: with a loaded `weight`.
            remove_weight: whether nothing but `cpu_linear` reads the weight, says vLLM.
        """
        problem = self._find_problem(layer)
        if problem:
            self._say(logging.INFO, f"CPU linear layers with {problem}: left to vLLM (oneDNN)")
        if problem is not None:
            return False
        weight = layer.weight.data
        columns = weight.shape[0]
        if remove_weight or _is_head(layer):
            layer.weight = torch.nn.Parameter(linear.pack(weight), requires_grad=False)
            layer.cpu_linear = _product(columns)
        else:
            layer.cpu_linear = _lazy_product(weight)
        return True

    def _find_problem(self, layer: torch.nn.Module) -> str | None:
        """Returns why a layer is not for the kernels, None if it is; "" where no word is due."""
        weight = layer.weight
        if weight.is_meta or weight.ndim != 2 or weight.device.type != "cpu":
            return ""  # a layer of another stage, or no linear layer
        if weight.dtype != torch.bfloat16:
            return f"{weight.dtype} weights"
        bias = getattr(layer, "bias", None)
        if bias is not None and bias.dtype != torch.bfloat16:
            return f"a {bias.dtype} bias"
        if _is_head(layer) and _head_dtype() not in (None, weight.dtype):
            return f"a head computed in {_head_dtype()}"
        return None if self._prepare() else ""

    def _prepare(self) -> bool:
        if self._library is not None:
            return True
        try:
            self._library = linear.prepare()
        except KernelsUnavailableError as error:
            self._say(logging.WARNING, f"CPU linear layers: vLLM's own (oneDNN), reads slower; {error}")
            return False
        paths, threads = ", ".join(self._library.paths), self._library.calls.heteroinfer_threads()
        self._say(logging.INFO, f"CPU linear layers: HeteroInfer's bf16 kernels ({paths}), {threads} threads")
        return True

    def _say(self, level: int, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            _logger.log(level, text)


def _product(columns: int) -> Product:
    def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return linear.linear(x, weight, bias, columns)

    return product


def _lazy_product(weight: torch.Tensor) -> Product:
    """Returns the product with an embedding's table, packed when it is first asked for.

    Most embeddings are only looked up, and would be kept twice for nothing. A model that uses
    one as its head does so in the warm-up, before the headroom for the KV cache is measured.
    """
    packed: list[torch.Tensor] = []

    def product(x: torch.Tensor, _: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if not packed:
            packed.append(linear.pack(weight))
        return linear.linear(x, packed[0], bias, weight.shape[0])

    return product


def _is_head(layer: torch.nn.Module) -> bool:
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    return isinstance(layer, ParallelLMHead)


def _head_dtype() -> torch.dtype | None:
    """Returns what vLLM computes logits in; with another dtype it reads the head's weight itself.

    Source: vllm/model_executor/layers/logits_processor.py::LogitsProcessor._apply_head@v0.32.0.
    """
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    return None if config is None or config.model_config is None else config.model_config.head_dtype
