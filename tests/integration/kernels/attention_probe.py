"""Compares attention with the patch `cpu_attention` to vLLM's own attention. `layers_probe` calls it."""

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from tests.integration.kernels.reverting import revert
from vllm_heteroinfer.patches import cpu_attention

HEADS, KV_HEADS, SIZE, BLOCK, BLOCKS = 4, 2, 64, 32, 12
LENGTHS = ([1, 40, 33], [5], [17, 1])
"""Lengths of the sequences of three steps. Each step computes the last half of its sequences."""
_numbers = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The inputs of one step, and vLLM's context for it."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    metadata: Any
    mapping: torch.Tensor


def attention() -> Any:
    """Returns for each kind of layer the calls of vLLM's function, and whether all results are equal."""
    from vllm.model_executor.layers.attention.attention import Attention

    original = Attention.forward
    torch.manual_seed(0)
    found = {}
    for dtype in (torch.bfloat16, torch.float32):
        found[f"plain {dtype}"] = compared(dtype)
        found[f"window {dtype}"] = compared(dtype, per_layer_sliding_window=16)
        found[f"softcap {dtype}"] = compared(dtype, logits_soft_cap=30.0)
        found[f"sinks {dtype}"] = compared(dtype, sinks=torch.randn(HEADS).to(dtype))
    found["padded"] = compared(torch.bfloat16, padding=3)
    found["another cache"] = compared(torch.bfloat16, moves=bind_another)
    found["its memory elsewhere"] = compared(torch.bfloat16, moves=move_memory)
    found["no rows"] = compared(torch.bfloat16, lengths=([], [5], []))
    left = {
        "by name": compared(torch.bfloat16, direct=False),
        "transfers": compared(torch.bfloat16, transfers=True),
        "warm-up": compared(torch.bfloat16, warm_up=True),
        "slots alone": compared(torch.bfloat16, slots_alone=True),
    }
    cpu_attention.install()
    cpu_attention.install()
    applied = Attention.forward is not original
    revert("cpu_attention")
    return {
        "taken": found,
        "left": left,
        "given_back": gives_back(),
        "cast once": compared(torch.bfloat16, sinks=torch.randn(HEADS).half()),
        "applied": applied,
        "reverted": Attention.forward is original,
    }


def compared(
    dtype: torch.dtype,
    *,
    padding: int = 0,
    lengths: Iterable[list[int]] = LENGTHS,
    moves: Callable[[Any], None] | None = None,
    direct: bool = True,
    transfers: bool = False,
    warm_up: bool = False,
    slots_alone: bool = False,
    **options: Any,
) -> list[Any]:
    """Returns how many calls used vLLM's function, and whether all outputs and caches equal vLLM's."""
    from vllm.model_executor.layers.attention import attention as module

    layer = built(dtype, **options)
    layer.use_direct_call = direct
    steps = [drawn(layer, each, dtype, padding) for each in lengths]
    if slots_alone:
        steps = [replace(step, metadata=None) for step in steps]
    results: list[list[torch.Tensor]] = []
    original = module.Attention.forward
    with mock.patch.object(module.Attention, "forward", autospec=True, side_effect=original) as counted:
        for patched in (False, True):
            if patched:
                counted.reset_mock()
                module.Attention.forward = cpu_attention._with_direct_calls(counted)
            layer.impl.sinks = options.get("sinks")  # vLLM casts them in its first call
            layer.kv_cache = empty_cache(dtype)
            outputs = []
            for step in steps:
                outputs.append(asked(layer, step, transfers=transfers, warm_up=warm_up))
                if moves:
                    moves(layer)
            results.append([*outputs, layer.kv_cache])
    same = all(torch.equal(mine, theirs) for mine, theirs in zip(*results, strict=True))
    return [counted.call_count, same]


def gives_back() -> bool:
    """Returns whether a layer that stays alive frees the memory of a cache that it no longer uses."""
    from vllm.model_executor.layers.attention.attention import Attention
    from vllm.v1.worker.utils import clear_layer_kv_caches

    layer = built(torch.bfloat16)
    layer.use_direct_call, layer.kv_cache = True, empty_cache(torch.bfloat16)
    storage = layer.kv_cache.untyped_storage()._weak_ref()
    original = mock.Mock(wraps=Attention.forward)
    with mock.patch.object(Attention, "forward", cpu_attention._with_direct_calls(original)):
        asked(layer, drawn(layer, [5], torch.bfloat16, 0), transfers=False, warm_up=False)
    assert not original.called
    clear_layer_kv_caches([layer])
    return bool(torch.UntypedStorage._expired(storage))


def built(dtype: torch.dtype, **options: Any) -> Any:
    """Builds a layer of vLLM's attention."""
    from vllm.config import get_current_vllm_config
    from vllm.model_executor.layers.attention.attention import Attention
    from vllm.utils.torch_utils import set_default_torch_dtype

    model: Any = SimpleNamespace(dtype=dtype, use_mla=False, is_mm_prefix_lm=False, rswa_window=None)
    with set_default_torch_dtype(dtype), mock.patch.object(get_current_vllm_config(), "model_config", model):
        prefix = f"layers.{next(_numbers)}.attn"
        return Attention(HEADS, SIZE, SIZE**-0.5, KV_HEADS, prefix=prefix, **options)


def empty_cache(dtype: torch.dtype) -> torch.Tensor:
    """Builds an empty cache for a layer."""
    return torch.zeros(BLOCKS, KV_HEADS, BLOCK, 2 * SIZE, dtype=dtype)


def bind_another(layer: Any) -> None:
    """Gives a layer a copy of its cache."""
    layer.kv_cache = layer.kv_cache.clone()


def move_memory(layer: Any) -> None:
    """Moves a layer's cache to other memory, and keeps the tensor object."""
    layer.kv_cache.set_(layer.kv_cache.clone())


def drawn(layer: Any, lengths: list[int], dtype: torch.dtype, padding: int) -> Step:
    """Draws a step of sequences with these lengths. Rows of padding follow the rows of tokens."""
    import vllm._custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadata, _get_attn_isa

    layer.isa = _get_attn_isa(dtype, BLOCK, SIZE, "auto")
    news = [length - length // 2 for length in lengths]
    total = sum(news)
    starts = torch.tensor([0, *torch.tensor(news).cumsum(0).tolist()], dtype=torch.int32)
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    table = torch.arange(1, 1 + 2 * len(lengths), dtype=torch.int32).view(len(lengths), 2)
    mapping = [
        int(table[sequence, at // BLOCK]) * BLOCK + at % BLOCK
        for sequence, length in enumerate(lengths)
        for at in range(length // 2, length)
    ]
    scheduled = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=len(lengths),
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=SIZE,
        seq_lens=seq_lens,
        dtype=dtype,
        query_start_loc=starts,
        causal=True,
        sliding_window_size=layer.impl.sliding_window,
        isa=layer.isa,
        enable_kv_split=True,
        dynamic_causal=None,
        kv_cache_dtype="auto",
    )
    metadata = CPUAttentionMetadata(
        num_actual_tokens=total,
        max_query_len=max(news, default=0),
        query_start_loc=starts,
        max_seq_len=max(lengths, default=0),
        seq_lens=seq_lens,
        block_table=table,
        slot_mapping=torch.tensor(mapping + [-1] * padding, dtype=torch.int64),
        scheduler_metadata=scheduled,
        causal=True,
    )
    rows = total + padding
    qkv = torch.randn(rows, (HEADS + 2 * KV_HEADS) * SIZE).to(dtype)
    query, key, value = qkv.split([HEADS * SIZE, KV_HEADS * SIZE, KV_HEADS * SIZE], -1)
    return Step(query=query, key=key, value=value, metadata=metadata, mapping=metadata.slot_mapping)


def asked(layer: Any, step: Step, *, transfers: bool, warm_up: bool) -> torch.Tensor:
    """Computes a step with a layer, and returns the rows without padding."""
    from vllm import forward_context

    name = layer.layer_name
    context = forward_context.ForwardContext(
        no_compile_layers={name: layer},
        attn_metadata=None if warm_up else {name: step.metadata},
        slot_mapping={} if warm_up else {name: step.mapping},
    )
    known = mock.patch.object(cpu_attention, "has_kv_transfer_group", return_value=transfers)
    with forward_context.override_forward_context(context), known, torch.inference_mode():
        output = layer(step.query, step.key, step.value)
    return output[: 0 if warm_up or step.metadata is None else step.metadata.num_actual_tokens]
