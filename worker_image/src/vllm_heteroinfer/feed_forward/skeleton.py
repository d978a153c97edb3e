"""A dense model with only the MLPs of some layers. Imports vLLM; for CPU ranks only.

vLLM builds the model on the meta device, in a private world of one rank. The MLPs of the planned layers get
memory for this rank's columns. The model's own `load_weights` then reads their tensors from the checkpoint,
cut to this rank's columns, and vLLM packs them for its kernels. Experts need no model (`held_experts.py`).
"""

import logging
from collections.abc import Iterator
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.offloader import set_offloader
from vllm.utils.torch_utils import set_default_torch_dtype

from heteroinfer_contract.column_shares import Span, share_out
from heteroinfer_contract.errors import ContractError
from heteroinfer_contract.plan import FeedForwardShare
from vllm_heteroinfer.feed_forward import columns, holes, remote
from vllm_heteroinfer.feed_forward.columns import Part
from vllm_heteroinfer.feed_forward.expert_reader import DUMMY_BLOCK, DUMMY_SPREAD
from vllm_heteroinfer.feed_forward.held import HeldParts, column_unit
from vllm_heteroinfer.feed_forward.remote_parts import MLP_NAMES, RemoteParts, check_found, layer_of
from vllm_heteroinfer.kernels import weight_memory
from vllm_heteroinfer.kernels.weight_bytes import weight_bytes
from vllm_heteroinfer.kernels.weight_memory import HUGE_PAGE, WeightMemory

_logger = logging.getLogger(__name__)

_MAX_STORED_TO_LOADED = 1.8
"""Limit of packed bytes per checkpoint byte of quantized weights; more means that vLLM widened them.

Weights of 4 bits in groups of 16 are packed to 1.7 times their size; FP8 in bf16 doubles."""


class SkeletonBuilder:
    """Builds and loads a skeleton; use once."""

    def __init__(self, config: Any, own: FeedForwardShare, shares: tuple[int, ...], lane: int) -> None:
        """Takes the agreed shares of the stage's feed-forward ranks, and the number of this rank."""
        self._config, self._layers = config, frozenset(own.layers)
        self._shares, self._lane = shares, lane
        self._unit = column_unit(config)
        self._found = RemoteParts()
        self._parts: dict[int, Any] = {}
        self._loaded_bytes = 0
        self._loaded: set[int] = set()
        self._memory = WeightMemory()

    def build(self) -> HeldParts:
        """Builds the model, loads its weights and packs them.

        Raises:
            ContractError: feed-forward ranks cannot compute the model or its format.
        """
        _private_world(self._config)
        self._plan_mlps()
        with set_current_vllm_config(self._config):
            model = self._build_model()
            check_found(self._found, self._layers, self._config.model_config.model)
            self._load(model)
            with set_default_torch_dtype(self._config.model_config.dtype), weight_memory.used(self._memory):
                for part in self._parts.values():
                    _process(part)
                    _share(part, self._memory)
        return self._result()

    # Building

    def _plan_mlps(self) -> None:
        """Narrows the MLPs of dense models by their width in the configuration."""
        text = self._config.model_config.hf_text_config
        width = getattr(text, "intermediate_size", None)
        self._dense: Span | None = None
        if self._config.model_config.is_moe or not isinstance(width, int):
            return
        self._dense = share_out(width, self._shares, self._unit)[self._lane]
        text.intermediate_size = self._dense.count

    def _build_model(self) -> Any:
        self._leave_linears_alone()
        dtype = self._config.model_config.dtype
        set_offloader(remote.VisitingOffloader(self._materialize))
        try:
            with set_default_torch_dtype(dtype), torch.device("meta"):
                return initialize_model(self._config)
        finally:
            set_offloader(None)

    def _materialize(self, layer: int, module: torch.nn.Module) -> None:
        """Gives memory to a dense layer's MLP, if this rank computes it."""
        name = remote.mlp_name(module) if layer in self._layers else ""
        if not name:
            return
        if self._dense is None:
            raise ContractError(
                f"layer {layer}: got an MLP in a model with experts, expected experts: leave it to the GPU"
            )
        self._found.mlps.add(layer)
        mlp = getattr(module, name)
        with torch.device("cpu"):
            for child in mlp.modules():
                for key, parameter in list(child.named_parameters(recurse=False)):
                    setattr(child, key, materialize_meta_tensor(parameter))
        self._parts[layer] = mlp

    def _leave_linears_alone(self) -> None:
        """Removes the format of linear layers that stay on the meta device; some formats fail on a CPU."""
        quantization = self._config.quant_config
        if quantization is None:
            return
        choose = quantization.get_quant_method
        layers, is_moe = self._layers, self._config.model_config.is_moe

        def method(layer: torch.nn.Module, prefix: str) -> Any:
            held = not is_moe and layer_of(prefix) in layers and any(f".{n}." in prefix for n in MLP_NAMES)
            if isinstance(layer, LinearBase) and not held:
                return UnquantizedLinearMethod()
            return choose(layer, prefix)

        quantization.get_quant_method = method

    # Loading

    def _load(self, model: Any) -> None:
        config = self._config.model_config
        loader = get_model_loader(self._config.load_config)
        if isinstance(loader, DummyModelLoader):
            for part in self._parts.values():
                _fill(part)
            return
        filled = model.load_weights(self._own(loader.get_all_weights(config, model)))
        missing = sorted(set(self._parts) - self._loaded)
        if missing:
            raise ContractError(
                f"{config.model}: got no weights of the experts or MLPs of layers {missing} under the "
                "names that are known; use spec.parallelism.mode: Pipeline"
            )
        # vLLM also checks only unquantized weights
        # (vllm/model_executor/model_loader/default_loader.py::DefaultModelLoader.load_weights@v0.32.0).
        if self._config.quant_config is None and filled is not None:
            holes.check(config.model, holes.unfilled(model, self._parts.values(), filled))

    def _own(self, weights: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields this rank's parts of the MLPs' tensors."""
        for name, tensor in weights:
            if not self._found.has(name):
                continue
            layer = layer_of(name)
            assert layer is not None
            assert self._dense is not None
            part = columns.part_of(name, tuple(tensor.shape), self._dense)
            self._loaded.add(layer)
            own = _cut(tensor, part)
            if part.zero:
                own = torch.zeros_like(own)
            elif part.dim is not None and name.endswith(".g_idx"):
                own = own - own[0]
            self._loaded_bytes += own.nbytes
            yield name, own

    # The result

    def _result(self) -> HeldParts:
        stored = sum(weight_bytes(part) for part in self._parts.values())
        methods = {_method(part) for part in self._parts.values()}
        self._check_format(methods, stored)
        return HeldParts(
            parts=dict(sorted(self._parts.items())),
            experts=0,
            hidden=int(self._config.model_config.get_hidden_size()),
            topk=0,
            stored_bytes=stored,
            own_experts=None,
            method=", ".join(sorted(methods)),
            memory=self._memory,
        )

    def _check_format(self, methods: set[str], stored: int) -> None:
        """Raises ContractError if a quantized checkpoint was silently widened."""
        if self._config.quant_config is None or not self._loaded_bytes:
            return
        if stored > _MAX_STORED_TO_LOADED * self._loaded_bytes:
            raise ContractError(
                f"{self._config.model_config.model}: got {stored} bytes of weights by {', '.join(methods)} "
                f"from {self._loaded_bytes} of the checkpoint ({self._config.model_config.quantization}), "
                "expected them to stay as they are: this format has no CPU kernels; use bf16 or int4"
            )


def _cut(tensor: torch.Tensor, part: Part) -> torch.Tensor:
    """Cuts a part from a tensor: a view, or a copy if the part has several blocks."""
    if part.dim is None:
        return tensor
    own = [block.narrow(part.dim, part.start, part.length) for block in tensor.chunk(part.blocks, part.dim)]
    return own[0] if len(own) == 1 else torch.cat(own, part.dim)


def _private_world(config: Any) -> None:
    """Creates process groups with this process only, because vLLM's layers need groups."""
    if not torch.distributed.is_initialized():
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, "unused://", 0, "gloo")
        initialize_model_parallel(1, 1)


def _fill(part: Any) -> None:
    """Fills a part with small random numbers that repeat, because drawing 30 GB takes minutes."""
    block = (torch.rand(DUMMY_BLOCK) * 2 - 1) * DUMMY_SPREAD
    for tensor in part.parameters():
        flat = tensor.data.view(-1)
        if not tensor.is_floating_point():
            flat.zero_()
            continue
        own = block.to(tensor.dtype)
        for start in range(0, flat.numel(), DUMMY_BLOCK):
            piece = flat[start : start + DUMMY_BLOCK]
            piece.copy_(own[: piece.numel()])


def _process(part: Any) -> None:
    """Packs a part's weights for vLLM's kernels."""
    for module in part.modules():
        method = getattr(module, "quant_method", None)
        if method is not None:
            method.process_weights_after_loading(module)


def _share(part: Any, memory: WeightMemory) -> None:
    """Moves vLLM's packed weights of a part into a memory; weights inside oneDNN stay there."""
    for parameter in part.parameters():
        if parameter.is_meta:  # the router's, which stays with the asking rank
            continue
        if parameter.nbytes and not memory.holds(parameter):
            parameter.data = memory.copy(parameter.data)
        if parameter.nbytes >= HUGE_PAGE:
            memory.gather_pages(parameter)


def _method(part: Any) -> str:
    kinds = {type(m.quant_method).__name__ for m in part.modules() if hasattr(m, "quant_method")}
    return "+".join(sorted(kinds))
