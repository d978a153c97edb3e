"""The patch `cpu_attention`: eager CPU ranks write the KV cache and attend without looking anything up twice.

The same two operations of vLLM are called with the same arguments. What is left out is Python: both times
the layer is found by its name, the cache is cut into keys and values, and hooks are asked, which takes longer
than attention of few rows. Encoders, caches that another layer owns, transfers of the KV cache, other
backends and compiled models go vLLM's way. Imports vLLM.
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
from vllm_heteroinfer.patches.replacing import replace, restore

_HELD: Final = "heteroinfer_attention"
"""Attribute of a layer."""
_CACHE_AXES: Final = 4


def install() -> None:
    """Has this process's attention computed so from now on, unless the user chose vLLM's way.

    To be called in a CPU rank; twice is a no-op.

    Raises:
        ContractError: HETEROINFER_CPU_LINEAR is neither `auto` nor `onednn`.
        PatchError: this vLLM is another one than the patch was written for.
    """
    if is_wanted(os.environ):
        replace(CPU_ATTENTION, _attending)


def revert() -> None:
    """Puts vLLM's own function back; a no-op where the patch is not applied."""
    restore(CPU_ATTENTION)


@dataclass(frozen=True, slots=True, kw_only=True)
class _CacheHalves:
    """A layer's KV cache, and its parts as vLLM's operations take them.

    Attributes:
        cache: [blocks, KV heads, block size, 2 * head size], what the layer had when it was cut.
        keys: [blocks, KV heads, block size, head size], a view; None where vLLM is to attend.
        values: the same.
    """

    cache: torch.Tensor
    keys: torch.Tensor | None = None
    values: torch.Tensor | None = None


def _attending(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
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
        plain = output_shape is None and output_dtype is None and key is not None and value is not None
        if not plain or not self.use_direct_call or torch.compiler.is_compiling():
            return original(self, query, key, value, output_shape, output_dtype)
        held = self.__dict__.get(_HELD)
        if held is None or held.cache is not self.kv_cache:
            held = self.__dict__[_HELD] = _cut(self)
        context = get_forward_context()
        metadata, slots = context.attn_metadata, context.slot_mapping
        if held.keys is None or type(metadata) is not dict or has_kv_transfer_group():
            return original(self, query, key, value)
        mapping = slots.get(self.layer_name)
        if mapping is None:
            return original(self, query, key, value)
        batch, impl, rows = metadata[self.layer_name], self.impl, len(query)
        scales = (self._k_scale_float, self._v_scale_float, impl.kv_cache_dtype)
        size = self.head_size
        output = query.new_empty((rows, self.num_heads, size))
        update(
            *(key.view(-1, self.num_kv_heads, size), value.view(-1, self.num_kv_heads, size)),
            *(held.keys, held.values, mapping, self.isa, *scales),
        )
        query, answered, used = query.view(rows, self.num_heads, size), output, batch.num_actual_tokens
        if used != rows:  # the others pad the batch
            query, answered = query[:used], output[:used]
        attend(
            *(query, held.keys, held.values, answered),
            *(batch.query_start_loc, batch.seq_lens, impl.scale, batch.causal, impl.alibi_slopes),
            *(impl.sliding_window, batch.block_table, impl.logits_soft_cap, batch.scheduler_metadata),
            *(impl.sinks, batch.dynamic_causal, *scales),
        )
        return output.view(rows, -1)

    return forward


def _cut(layer: Any) -> _CacheHalves:
    """Returns a layer's cache in halves, or whole where the patch is not for the layer."""
    cache, impl = layer.kv_cache, layer.impl
    ours = (
        type(impl) is CPUAttentionBackendImpl
        and impl.attn_type == AttentionType.DECODER
        and layer.kv_sharing_target_layer_name is None
        and layer.query_quant is None
        and layer.head_size_v == layer.head_size
        and (impl.sinks is None or impl.sinks.dtype in {torch.bfloat16, torch.float32})
        and cache.ndim == _CACHE_AXES
    )
    if not ours:
        return _CacheHalves(cache=cache)
    blocks, heads, block_size, _ = cache.size()
    keys, values = cache.view((blocks, heads, block_size * 2, -1)).chunk(2, dim=2)
    return _CacheHalves(cache=cache, keys=keys, values=values)
