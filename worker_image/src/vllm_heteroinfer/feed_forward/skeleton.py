"""A model with only the feed-forward parts of some layers. Imports vLLM; for CPU ranks only.

vLLM builds the model on the meta device, in a private world of one rank. Experts and MLPs of the planned
layers get memory for this rank's columns or whole experts. The model's own `load_weights` then reads their
tensors from the checkpoint, cut to this rank's parts, and vLLM packs them for its kernels.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.model_executor.layers.fused_moe.config import RoutingMethodType
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.offloader import set_offloader
from vllm.utils.torch_utils import set_default_torch_dtype

from heteroinfer_contract.column_shares import Span, share_experts, share_out, unit_of
from heteroinfer_contract.errors import ContractError
from heteroinfer_contract.model.config import EXPERT_COUNTS
from heteroinfer_contract.model.scheme import find_quantization
from heteroinfer_contract.plan import FeedForwardShare
from vllm_heteroinfer.feed_forward import columns, holes, remote
from vllm_heteroinfer.feed_forward.columns import Part
from vllm_heteroinfer.feed_forward.holes import ExpertNumbers
from vllm_heteroinfer.feed_forward.remote_parts import (
    MLP_NAMES,
    RemoteParts,
    check_found,
    check_one_size,
    layer_of,
)
from vllm_heteroinfer.kernels import weight_memory
from vllm_heteroinfer.kernels.weight_bytes import weight_bytes
from vllm_heteroinfer.kernels.weight_memory import HUGE_PAGE, WeightMemory

_logger = logging.getLogger(__name__)

DUMMY_BLOCK, DUMMY_SPREAD = 1 << 20, 1e-3
"""Dummy weights (`--load-format dummy`): number of elements that repeat, and their range."""
_NEEDS_AMX = (
    "those in FP8, int4 and MXFP4 need AMX (Intel Xeon of the 4th generation or later); put the role on "
    "nodes that have it (roles[].template.nodeSelector), or take the model in bf16"
)
_MOST_BYTES_OF_LOADED = 1.8
"""Limit of packed bytes per checkpoint byte of quantized weights; more means that vLLM widened them.

Weights of 4 bits in groups of 16 are packed to 1.7 times their size; FP8 in bf16 doubles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Skeleton:
    """The parts of a model that this rank computes.

    Attributes:
        parts: layer -> its RoutedExperts, or its MLP.
        experts: layers whose part is RoutedExperts.
        hidden: elements per row.
        topk: experts per row; 0 without experts.
        stored_bytes: bytes of all weights in the kernels' format.
        loaded_bytes: bytes of this rank's part of their tensors in the checkpoint; 0 for dummy weights.
        own_experts: this rank's experts in each layer; None if it has a part of each expert.
        method: name of vLLM's method that holds the weights, and of its kernels.
    """

    parts: Mapping[int, Any]
    experts: frozenset[int]
    hidden: int
    topk: int
    stored_bytes: int
    loaded_bytes: int
    own_experts: Span | None
    method: str
    memory: WeightMemory


class SkeletonBuilder:
    """Builds and loads a skeleton; use once."""

    def __init__(self, config: Any, own: FeedForwardShare, shares: tuple[int, ...], lane: int) -> None:
        """Takes the agreed shares of the stage's feed-forward ranks, and the number of this rank."""
        self._config, self._layers = config, frozenset(own.layers)
        self._by_experts = own.by_experts
        self._shares, self._lane = shares, lane
        whole, text = config.model_config.hf_config, config.model_config.hf_text_config
        self._unit = unit_of(find_quantization(vars(whole), vars(text)))
        self._experts: Span | None = None
        self._found = RemoteParts()
        self._totals: dict[int, Span] = {}
        self._parts: dict[int, Any] = {}
        self._loaded_bytes = 0
        self._loaded: set[int] = set()
        self._numbers = ExpertNumbers()
        self._memory = WeightMemory()

    def build(self) -> Skeleton:
        """Builds the skeleton, loads its weights and packs them.

        Raises:
            ContractError: feed-forward ranks cannot compute the model or its format.
        """
        _private_world(self._config)
        self._plan_mlps()
        if self._by_experts:
            self._plan_experts()
        if torch.cpu._is_amx_tile_supported():
            torch.cpu._init_amx()  # without it vLLM's expert kernels end with SIGILL
        with set_current_vllm_config(self._config):
            model = self._build_model()
            self._check_parts()
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

    def _plan_experts(self) -> None:
        """Reduces the model to this rank's experts by their number in the configuration."""
        text = self._config.model_config.hf_text_config
        counts = {name: getattr(text, name, None) for name in EXPERT_COUNTS}
        known = {name: count for name, count in counts.items() if isinstance(count, int) and count > 0}
        if len(set(known.values())) != 1:
            raise ContractError(
                f"{self._config.model_config.model}: got {counts} for the experts of a layer, expected one "
                "number; set feedForward.ranks: 1, with the cores and memory of all"
            )
        self._experts = share_experts(next(iter(known.values())), self._shares)[self._lane]
        for name in known:
            setattr(text, name, self._experts.count)

    def _build_model(self) -> Any:
        builder = self

        class WithOwnExperts:
            def __init__(
                self, layer_name: str, params_dtype: Any, moe_config: Any, *args: Any, **kwargs: Any
            ) -> None:
                layer = layer_of(layer_name)
                held = layer is not None and layer in builder._layers
                if held:
                    builder.narrow(moe_config, layer)
                with torch.device("cpu") if held else nullcontext():
                    super().__init__(layer_name, params_dtype, moe_config, *args, **kwargs)  # type: ignore[call-arg]

            def _get_quant_method(self, prefix: str, quant_config: Any, moe_config: Any) -> Any:
                layer = layer_of(prefix)
                if layer is None or layer not in builder._layers:
                    return remote.RemoteMethod(moe_config, -1)
                builder.take(layer, self)
                return super()._get_quant_method(prefix, quant_config, moe_config)  # type: ignore[misc]

        self._leave_linears_alone()
        dtype = self._config.model_config.dtype
        set_offloader(remote.VisitingOffloader(self._materialize))
        try:
            with set_default_torch_dtype(dtype), torch.device("meta"), remote.registered(WithOwnExperts):
                return initialize_model(self._config)
        finally:
            set_offloader(None)

    def narrow(self, moe_config: Any, layer: int | None) -> None:
        """Narrows a layer's experts to this rank's columns, unless ranks share whole experts."""
        assert layer is not None
        if self._experts is None:
            own = share_out(moe_config.intermediate_size, self._shares, self._unit)[self._lane]
            self._totals[layer] = own
            moe_config.intermediate_size = own.count
            moe_config.intermediate_size_per_partition = own.count
            moe_config.intermediate_size_per_partition_unpadded = own.count
        # Other routing methods only choose kernels that route themselves, but asks are already routed.
        moe_config.routing_method = RoutingMethodType.Default

    def take(self, layer: int, part: Any) -> None:
        """Records a layer's experts."""
        self._found.add_experts(layer)
        self._parts[layer] = part

    def _materialize(self, layer: int, module: torch.nn.Module) -> None:
        """Gives memory to a dense layer's MLP, if this rank computes it."""
        name = remote.mlp_name(module) if layer in self._layers else ""
        if not name or layer in self._found.experts:
            return
        if self._dense is None:
            raise ContractError(
                f"layer {layer}: got an MLP in a model with experts, expected experts: leave it to the GPU"
            )
        self._found.mlps.add(layer)
        self._totals[layer] = self._dense
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

    def _check_parts(self) -> None:
        check_found(self._found, self._layers, self._config.model_config.model)
        for layer, part in self._parts.items():
            if not isinstance(part, RoutedExperts):
                continue
            part.apply_router_weight_on_input = False  # the asking rank applies it (remote.py)
            method = part.quant_method
            if (
                getattr(method, "experts_cls", part) is None
            ):  # vLLM found no kernel, but reports that only later
                raise ContractError(
                    f"layer {layer}: vLLM has no kernel on this CPU for experts of {type(method).__name__}; "
                    f"{_NEEDS_AMX}"
                )
            if method.is_monolithic:
                raise ContractError(
                    f"layer {layer}: got experts of {type(method).__name__}, which "
                    "route by themselves, expected kernels for chosen experts: bf16, FP8 block, int4, MXFP4"
                )

    # Loading

    def _load(self, model: Any) -> None:
        config = self._config.model_config
        loader = get_model_loader(self._config.load_config)
        if isinstance(loader, DummyModelLoader):
            for part in self._parts.values():
                _fill(part)
            return
        filled = model.load_weights(self._own(loader.get_all_weights(config, model)))
        holes.check(config.model, self._numbers.lacking(self._expert_totals()))
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

    def _expert_totals(self) -> dict[int | None, int]:
        """Returns the number of experts of each layer in the checkpoint."""
        whole = self._experts
        return {
            layer: whole.total if whole else int(self._parts[layer].global_num_experts)
            for layer in self._found.experts
        }

    def _own(self, weights: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields this rank's parts of tensors; skips tensors without a part of this rank."""
        for name, tensor in weights:
            if not self._found.has(name):
                continue
            layer = layer_of(name)
            assert layer is not None
            self._numbers.add(name)
            found = self._part_of(name, tuple(tensor.shape), layer)
            if found is None:
                continue
            self._loaded.add(layer)
            renamed, part = found
            own = _cut(tensor, part)
            if part.zero:
                own = torch.zeros_like(own)
            elif part.dim is not None and name.endswith(".g_idx"):
                own = own - own[0]
            self._loaded_bytes += own.nbytes
            yield renamed, own

    def _part_of(self, name: str, shape: tuple[int, ...], layer: int) -> tuple[str, Part] | None:
        """Returns a tensor's name on this rank, and this rank's part of it; None if it has no part."""
        if self._experts is not None:
            return columns.experts_of(name, shape, self._experts)
        return name, columns.part_of(name, shape, self._totals[layer])

    # The result

    def _result(self) -> Skeleton:
        stored = sum(weight_bytes(part) for part in self._parts.values())
        hidden = {int(self._hidden(part)) for part in self._parts.values()}
        topk = {int(part.top_k) if isinstance(part, RoutedExperts) else 0 for part in self._parts.values()}
        check_one_size(hidden, topk)
        methods = {_method(part) for part in self._parts.values()}
        self._check_format(methods, stored)
        return Skeleton(
            parts=dict(sorted(self._parts.items())),
            experts=frozenset(self._found.experts),
            hidden=hidden.pop(),
            topk=topk.pop(),
            stored_bytes=stored,
            loaded_bytes=self._loaded_bytes,
            own_experts=self._experts,
            method=", ".join(sorted(methods)),
            memory=self._memory,
        )

    def _hidden(self, part: Any) -> int:
        if isinstance(part, RoutedExperts):
            return int(part.hidden_size)
        return int(self._config.model_config.get_hidden_size())

    def _check_format(self, methods: set[str], stored: int) -> None:
        """Raises ContractError if a quantized checkpoint was silently widened."""
        if self._config.quant_config is None or not self._loaded_bytes:
            return
        if stored > _MOST_BYTES_OF_LOADED * self._loaded_bytes:
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
    if not isinstance(part, RoutedExperts):
        kinds = {type(m.quant_method).__name__ for m in part.modules() if hasattr(m, "quant_method")}
        return "+".join(sorted(kinds))
    kernel = part.quant_method.moe_kernel
    name = type(part.quant_method).__name__
    return name if kernel is None else f"{name} ({type(kernel.fused_experts).__name__})"
