"""Replaces experts and MLPs that feed-forward ranks compute. Imports vLLM.

Routed experts keep vLLM's class, but with a method that has no weights and asks feed-forward ranks. The
method is called inside vLLM's op `torch.ops.vllm.moe_forward`, which torch.compile does not look into (an
opaque op). So routing, shared experts and compilation stay unchanged. An MLP is replaced by a module whose
forward pass is HeteroInfer's opaque op.

Source: vllm/model_executor/layers/fused_moe/routed_experts.py::RoutedExperts._get_quant_method,
vllm/model_executor/models/utils.py::make_layers@v0.32.0.
"""

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.offloader import NoopOffloader, get_offloader, set_offloader
from vllm.utils.torch_utils import direct_register_custom_op

from heteroinfer_contract.errors import ContractError
from vllm_heteroinfer.feed_forward.mlps import RecordedMlp
from vllm_heteroinfer.feed_forward.recording import RemoteExperts
from vllm_heteroinfer.feed_forward.remote_parts import RemotePart, layer_of


class Asks(Protocol):
    """Sends asks: requests to the feed-forward ranks to compute one layer for some rows."""

    def ask(
        self,
        layer: int,
        x: torch.Tensor,
        ids: torch.Tensor | None,
        weights: torch.Tensor | None,
        padding: torch.Tensor | None,
    ) -> torch.Tensor:
        """Returns the output of a layer's experts or MLP for the rows `x`.

        Args:
            x: [rows, hidden], contiguous.
            ids: [rows, topk] int32, experts of each row; None for an MLP.
            weights: [rows, topk] float32, weights of these experts.
            padding: [rows] bool, marks padding rows, which come last and need no answer; None for none.
        """


_asks_of_process: Asks | None = None
"""Sends the asks of this process. It is global, because an op of torch cannot refer to an object."""


def connect(asks: Asks) -> None:
    """Makes all replaced experts and MLPs of this process send their asks by `asks`."""
    global _asks_of_process  # noqa: PLW0603 - an op of torch cannot refer to an object
    _asks_of_process = asks


def _ask_feed_forward_ranks(
    layer: int, x: torch.Tensor, ids: torch.Tensor | None, weights: torch.Tensor | None
) -> torch.Tensor:
    """Sends a layer's rows to the feed-forward ranks, without padding rows, and returns the answer."""
    padding = get_forward_context().is_padding if is_forward_context_available() else None
    assert _asks_of_process is not None
    return _asks_of_process.ask(layer, x, ids, weights, padding)


class RemoteMethod(FusedMoEMethodBase):
    """vLLM's method of a layer whose routed experts are computed by feed-forward ranks."""

    def __init__(self, moe: Any, layer: int, experts: RemoteExperts, *, records: bool) -> None:
        super().__init__(moe)
        self._layer, self._experts, self._records = layer, experts, records

    def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        """Creates parameters without memory, for which the recording finds the places in the files.

        If no recording follows, removes the parameters immediately.
        """
        self._experts.create(*args, **kwargs)
        if not self._records:
            self._experts.end()

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        """Returns None, because this rank has no weights of the experts."""

    @property
    def topk_indices_dtype(self) -> torch.dtype:
        """The type that CPU kernels need: int32."""
        return torch.int32

    def apply(
        self,
        layer: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any,
        shared_experts_input: torch.Tensor | None,
    ) -> torch.Tensor:
        """Returns the sum of the chosen experts' answers, [rows, hidden], without shared experts."""
        del shared_experts, shared_experts_input  # vLLM's runner computes shared experts on another stream
        weights = topk_weights.to(torch.float32)
        if layer.apply_router_weight_on_input:
            x = (x * weights).to(x.dtype)  # each row of such a layer has one expert, and so one weight
            weights = torch.ones_like(weights)
        return _ask_feed_forward_ranks(
            self._layer, x.contiguous(), topk_ids.to(torch.int32).contiguous(), weights.contiguous()
        )


def _compute_mlp(hidden_states: torch.Tensor, layer: int) -> torch.Tensor:
    """The opaque op `heteroinfer_feed_forward`: computes a layer's MLP on feed-forward ranks."""
    return _ask_feed_forward_ranks(layer, hidden_states.contiguous(), None, None)


def _fake_mlp(hidden_states: torch.Tensor, layer: int) -> torch.Tensor:
    """Returns an empty tensor with the shape of the op's result, for torch's tracing."""
    del layer
    return torch.empty_like(hidden_states, memory_format=torch.contiguous_format)


@contextmanager
def replace_remote_parts(
    layers: frozenset[int], *, records: bool, first_layer: int = 0
) -> Iterator[dict[int, RemotePart]]:
    """Replaces the experts and MLPs of `layers` in a model that vLLM builds inside the context.

    Args:
        records: whether `recording.record` follows, which needs the parameters in the model.
        first_layer: number of the first decoder layer that this rank's stage has.

    Yields:
        The replaced parts by layer; complete once the model is built.

    Raises:
        ContractError: the user enabled an offloader of vLLM, or feed-forward ranks cannot compute a layer.
    """
    _register_op()
    remote_parts: dict[int, RemotePart] = {}
    default_offloader, original = _get_default_offloader(), RoutedExperts._get_quant_method
    replace_mlp = partial(
        _replace_mlp, remote_parts=remote_parts, layers=layers, records=records, first_layer=first_layer
    )
    set_offloader(VisitingOffloader(replace_mlp))
    RoutedExperts._get_quant_method = _with_remote_methods(original, remote_parts, layers, records=records)
    try:
        yield remote_parts
    finally:
        RoutedExperts._get_quant_method = original
        set_offloader(default_offloader)


def _with_remote_methods(
    original: Callable[..., FusedMoEMethodBase],
    remote_parts: dict[int, RemotePart],
    layers: frozenset[int],
    *,
    records: bool,
) -> Callable[..., FusedMoEMethodBase]:
    """Returns a replacement of vLLM's choice of methods, `original`. It adds experts to `remote_parts`."""

    def choose_method(module: Any, prefix: str, quant_config: Any, moe_config: Any) -> FusedMoEMethodBase:
        """Returns a `RemoteMethod` for the experts of a remote layer, and vLLM's method for other experts."""
        method = original(module, prefix, quant_config, moe_config)
        layer = layer_of(prefix)
        if layer not in layers or layer is None:
            return method
        # An ask contains only the layer's number, so ranks could not distinguish two sets of experts.
        if layer in remote_parts:
            raise ContractError(
                f"layer {layer}: a layer of feed-forward ranks must have one set of routed experts (got "
                "two). Lower feedForward.layers, or use parallelism.mode: Pipeline"
            )
        experts = remote_parts[layer] = RemoteExperts(module, method)
        return RemoteMethod(moe_config, layer, experts, records=records)

    return choose_method


def _replace_mlp(
    index_in_stage: int,
    layer: torch.nn.Module,
    *,
    remote_parts: dict[int, RemotePart],
    layers: frozenset[int],
    records: bool,
    first_layer: int,
) -> None:
    """Replaces the MLP of a remote layer that has no experts, and adds the MLP to `remote_parts`."""
    index = first_layer + index_in_stage
    # If a layer has experts, too (Gemma-4), its MLP stays in this rank.
    if index not in layers or index in remote_parts:
        return
    mlp = RecordedMlp.find(index, layer)
    if mlp is None:  # for example a layer of an encoder, which has the number of a decoder's layer
        return
    remote_parts[index] = mlp
    if not records:
        mlp.end()


def _get_default_offloader() -> NoopOffloader:
    """Returns vLLM's offloader; raises ContractError if the user enabled one that does something."""
    offloader = get_offloader()
    if type(offloader) is not NoopOffloader:
        raise ContractError(
            f"engine.args: vLLM's {type(offloader).__name__} cannot be used in mode FeedForward. Remove "
            "--cpu-offload-gb and --offload-group-size"
        )
    return offloader


class VisitingOffloader(NoopOffloader):
    """Visits each layer right after its construction. vLLM passes all layers to its offloader.

    So at most one MLP that will be removed uses memory at a time. vLLM builds only the layers of the rank's
    own stage.
    """

    def __init__(self, visit: Callable[[int, torch.nn.Module], None]) -> None:
        self._visit = visit

    def wrap_modules(
        self, modules_generator: Generator[torch.nn.Module, None, None], prefix: str = ""
    ) -> list[torch.nn.Module]:
        """Visits each layer as soon as vLLM has built it. Returns all layers."""
        built: list[torch.nn.Module] = []
        for index, layer in enumerate(modules_generator):
            self._visit(index, layer)
            built.append(layer)
        return built


def _register_op() -> None:
    """Registers the op `heteroinfer_feed_forward` once in this process."""
    if not hasattr(torch.ops.vllm, "heteroinfer_feed_forward"):
        direct_register_custom_op(
            op_name="heteroinfer_feed_forward", op_func=_compute_mlp, fake_impl=_fake_mlp
        )
