"""The patch `cpu_attention`: a faster path to vLLM's attention operations for eager CPU ranks.

The patch calls the same two operations of vLLM with the same arguments. It skips Python code that vLLM runs
before each operation: looking up the layer by name, cutting the cache into keys and values, and calling
hooks. That code takes longer than attention for few rows. vLLM's own function still serves encoders, caches
that another layer owns, KV cache transfers, other backends and compiled models. Imports vLLM.
Source: vllm/model_executor/layers/attention/attention.py::Attention.forward and
vllm/v1/attention/backends/cpu_attn.py::CPUAttentionBackendImpl@v0.32.0.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from vllm.distributed.kv_transfer import has_kv_transfer_group
from vllm.forward_context import get_forward_context
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

from vllm_heteroinfer.kernels.linear_layers import is_wanted
from vllm_heteroinfer.patches.registry import CPU_ATTENTION
from vllm_heteroinfer.patches.replacing import replace

_HALVES: Final = "heteroinfer_halves"
"""Attribute of a KV cache tensor that holds its `_CacheHalves`, so that both are freed at the same time."""
_DECODER: Final = AttentionType.DECODER


def install() -> None:
    """Replaces vLLM's attention forward in this process.

    Does nothing if HETEROINFER_CPU_LINEAR=onednn.
    """
    if is_wanted(os.environ):
        replace(CPU_ATTENTION, _with_direct_calls)


@dataclass(frozen=True, slots=True, kw_only=True)
class _CacheHalves:
    """Keys and values of a KV cache, in the form that vLLM's operations expect.

    Attributes:
        address: address of the cache when these views were made; another address makes them invalid.
        keys: [blocks, KV heads, block size, head size], a view of the cache's memory.
        values: same shape, also a view.
    """

    address: int
    keys: torch.Tensor
    values: torch.Tensor


def _with_direct_calls(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Returns a forward() that calls vLLM's two operations directly. It calls `original` in unusual cases."""
    update = torch.ops._C.cpu_attn_reshape_and_cache.default
    attend = torch.ops._C.cpu_attention_with_kv_cache.default

    def forward(
        self: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output_shape: torch.Size | None = None,
        output_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Writes keys and values into the cache, then computes attention, by one operation each.

        Calls `original` in all unusual cases. Usual is a decoder's layer with a KV cache of its own.
        """
        has_usual_arguments = (
            output_shape is None and output_dtype is None and key is not None and value is not None
        )
        if not has_usual_arguments or not self.use_direct_call or torch.compiler.is_compiling():
            return original(self, query, key, value, output_shape, output_dtype)
        slots_and_batch = _find_slots_and_batch(self)
        if slots_and_batch is None:
            return original(self, query, key, value)
        slots, batch = slots_and_batch
        halves, impl = _halves_of(self.kv_cache), self.impl
        keys, values = halves.keys, halves.values
        rows, size = query.shape[0], self.head_size
        scales_and_type = (self._k_scale_float, self._v_scale_float, impl.kv_cache_dtype)
        output = query.new_empty((rows, self.num_heads, size))
        update(
            key.view(-1, self.num_kv_heads, size),
            value.view(-1, self.num_kv_heads, size),
            keys,
            values,
            slots,
            self.isa,
            *scales_and_type,
        )
        query, output_rows, num_rows = query.view(rows, self.num_heads, size), output, batch.num_actual_tokens
        if num_rows != rows:  # the remaining rows are padding
            query, output_rows = query[:num_rows], output[:num_rows]
        attend(
            query,
            keys,
            values,
            output_rows,
            batch.query_start_loc,
            batch.seq_lens,
            impl.scale,
            batch.causal,
            impl.alibi_slopes,
            impl.sliding_window,
            batch.block_table,
            impl.logits_soft_cap,
            batch.scheduler_metadata,
            impl.sinks,
            batch.dynamic_causal,
            *scales_and_type,
        )
        return output.view(rows, self.num_heads * size)

    return forward


def _find_slots_and_batch(layer: Any) -> tuple[Any, Any] | None:
    """Returns a layer's slots in the KV cache and its batch, for the present step.

    Returns None in unusual cases, which only vLLM's own function handles.
    """
    context, name = get_forward_context(), layer.layer_name
    batches = context.attn_metadata
    if (
        type(batches) is not dict
        or has_kv_transfer_group()
        or not _needs_only_two_operations(layer, layer.impl)
    ):
        return None
    slots, batch = context.slot_mapping.get(name), batches.get(name)
    return None if slots is None or batch is None else (slots, batch)


def _needs_only_two_operations(layer: Any, impl: Any) -> bool:
    """Returns whether the layer has a cache of its own, and vLLM would only call its two operations."""
    return (
        type(impl) is CPUAttentionBackendImpl
        and impl.attn_type == _DECODER
        and layer.kv_sharing_target_layer_name is None
        and layer.query_quant is None
        and layer.head_size_v == layer.head_size
        and (impl.sinks is None or impl.sinks.dtype in {torch.bfloat16, torch.float32})
    )


def _halves_of(cache: torch.Tensor) -> _CacheHalves:
    """Returns the keys and values of a cache, [blocks, KV heads, block size, 2 * head size].

    Stores them on the cache, and cuts the cache again only if it has moved.
    """
    stored: _CacheHalves | None = getattr(cache, _HALVES, None)
    if stored is not None and stored.address == cache.data_ptr():
        return stored
    blocks, heads, block_size, _ = cache.size()
    # The views become an attribute of the cache. Without `detach`, the views would refer to the cache, and
    # this cycle of references would keep the cache's memory.
    keys, values = cache.detach().view((blocks, heads, block_size * 2, -1)).chunk(2, dim=2)
    halves = _CacheHalves(address=cache.data_ptr(), keys=keys, values=values)
    setattr(cache, _HALVES, halves)
    return halves
