"""A model's KV cache as vLLM allocates it: blocks of one size, shared by groups of equal layers. Pure.

Source: vllm/v1/core/kv_cache_utils.py::get_kv_cache_groups, get_kv_cache_configs@v0.32.0. Layers of one kind
have one block table. If a model has several kinds, vLLM divides the layers of each kind into groups of equal
size. All groups take blocks from one pool, and a block is large enough for the largest group.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Final

from heteroinfer_contract.model import AttentionKind, LayerKind
from heteroinfer_contract.model_profile import ModelProfile
from heteroinfer_contract.plan import EngineSettings
from heteroinfer_operator.vllm_support.engine_options import ELEMENT_BYTES, EngineOptions

_GROUP_SLACK: Final = 1.5
"""Kinds whose numbers of layers differ by less than this factor are padded to the larger number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cache:
    """One cache of one layer.

    Attributes:
        kind: content of its blocks; caches of one kind and size share block tables.
        page_bytes: bytes of one block.
        copies: blocks of a sequence if their number is independent of its length; otherwise 0.
    """

    layer: int
    kind: AttentionKind
    window: int
    page_bytes: int
    copies: int = 0

    @property
    def key(self) -> tuple[AttentionKind, int, int]:
        return (self.kind, self.window, self.page_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCache:
    """The KV cache of one rank, by layers.

    Attributes:
        groups: for each group, the bytes of a block by layer.
        sequence_blocks: blocks of all groups that a full-length request takes.
        sequence_tokens: tokens of a full-length request.
        block_tokens: tokens of a block, in layers that keep tokens.
    """

    groups: tuple[Mapping[int, int], ...]
    sequence_blocks: int
    sequence_tokens: int
    block_tokens: int

    def block_bytes(self, first: int, end: int) -> int:
        """Returns the bytes of one block in layers first..end-1."""
        return max(
            (sum(size for layer, size in group.items() if first <= layer < end) for group in self.groups),
            default=0,
        )

    @property
    def least_blocks(self) -> int:
        """Blocks for one full-length request, plus the block that vLLM keeps for itself."""
        return self.sequence_blocks + 1

    def tokens(self, blocks: int) -> int:
        """Returns the tokens that this number of blocks holds, in full-length requests."""
        if len(self.groups) <= 1 and self.sequence_blocks == ceil(self.sequence_tokens / self.block_tokens):
            return blocks * self.block_tokens
        return max(blocks - 1, 0) * self.sequence_tokens // max(self.sequence_blocks, 1)


def build_kv_cache(profile: ModelProfile, engine: EngineSettings, *, tensor: int, batches: int) -> KvCache:
    """Returns the KV cache of one rank.

    Args:
        tensor: ranks of a stage, which share heads.
        batches: batches that may be scheduled at once; windows keep the tokens of all of them.
    """
    caches = [
        cache for index, kind in enumerate(profile.layers) for cache in _caches(index, kind, engine, tensor)
    ]
    tokens = engine.max_model_len
    in_flight = engine.max_num_batched_tokens * batches
    if len({(cache.kind, cache.window) for cache in caches}) <= 1:
        one: dict[int, int] = {}
        for cache in caches:
            one[cache.layer] = one.get(cache.layer, 0) + cache.page_bytes
        blocks = _blocks(caches[0], engine.block_size, tokens, in_flight) if caches else 0
        groups: tuple[Mapping[int, int], ...] = (one,) if one else ()
    else:
        groups, blocks = _several(caches, engine.block_size, tokens, in_flight)
    return KvCache(
        groups=groups, sequence_blocks=blocks, sequence_tokens=tokens, block_tokens=engine.block_size
    )


def _several(
    caches: Sequence[_Cache], block_tokens: int, tokens: int, in_flight: int
) -> tuple[tuple[Mapping[int, int], ...], int]:
    """Returns the groups for several kinds of layers, and the blocks of a full-length request."""
    page = max(cache.page_bytes for cache in caches)
    buckets: dict[tuple[AttentionKind, int, int], list[_Cache]] = {}
    for cache in caches:
        buckets.setdefault(cache.key, []).append(cache)
    least, most = min(map(len, buckets.values())), max(map(len, buckets.values()))
    size = most if most < least * _GROUP_SLACK else least
    groups: list[Mapping[int, int]] = []
    blocks = 0
    for layers in buckets.values():
        number = ceil(len(layers) / size)
        groups += [{cache.layer: page for cache in layers[i::number]} for i in range(number)]
        # Smaller pages get longer blocks if they divide the largest page, and are padded otherwise.
        own = layers[0].page_bytes
        longer = page // own if layers[0].kind is not AttentionKind.LINEAR and page % own == 0 else 1
        blocks += number * _blocks(layers[0], block_tokens * longer, tokens, in_flight)
    return tuple(groups), blocks


def _blocks(cache: _Cache, block_tokens: int, tokens: int, in_flight: int) -> int:
    """Returns the blocks of one sequence in one group (`max_memory_usage_bytes` of vLLM's specs)."""
    match cache.kind:
        case AttentionKind.LINEAR:
            return cache.copies
        case AttentionKind.WINDOW:
            return ceil(min(cache.window - 1 + in_flight, tokens) / block_tokens) + 1
        case AttentionKind.CHUNKED:
            return ceil(min(cache.window + in_flight, tokens) / block_tokens)
    return ceil(tokens / block_tokens)


def _caches(index: int, kind: LayerKind, engine: EngineSettings, tensor: int) -> list[_Cache]:
    caches = []
    if kind.kv_heads and not kind.shares_kv:
        attention = AttentionKind.LATENT if kind.attention is AttentionKind.SPARSE else kind.attention
        page = token_bytes(kind, engine, tensor) * engine.block_size
        caches.append(_Cache(layer=index, kind=attention, window=kind.window, page_bytes=page))
    if kind.index_bytes:
        page = kind.index_bytes * engine.block_size
        caches.append(_Cache(layer=index, kind=AttentionKind.LATENT, window=0, page_bytes=page))
    if kind.conv_elements or kind.state_elements:
        page = state_bytes(kind, engine, tensor)
        # vLLM pads a state to the size of an attention block. engine_settings chooses blocks that are large
        # enough for a state.
        copies = max(kind.state_copies, 1)
        linear = AttentionKind.LINEAR
        caches.append(_Cache(layer=index, kind=linear, window=0, page_bytes=page, copies=copies))
    return caches


def token_bytes(kind: LayerKind, engine: EngineSettings, tensor: int) -> int:
    """Returns the bytes that one rank keeps per token in a layer, without an index."""
    heads = max(1, kind.kv_heads // tensor)
    return heads * kind.kv_width * cache_element_bytes(engine.dtype, engine.extra_args)


def state_bytes(kind: LayerKind, engine: EngineSettings, tensor: int) -> int:
    """Returns the bytes of a layer's state that one rank keeps per sequence.

    Source: vllm/model_executor/layers/mamba/mamba_utils.py::MambaStateDtypeCalculator@v0.32.0.
    """
    options = EngineOptions.of(engine.extra_args)
    conv = ELEMENT_BYTES.get(options.convolution_dtype, ELEMENT_BYTES[engine.dtype])
    state = ELEMENT_BYTES.get(options.state_dtype or "float32", 4)
    return (kind.conv_elements * conv + kind.state_elements * state) // tensor


def cache_element_bytes(dtype: str, extra_args: Sequence[str]) -> int:
    """Returns the size of one element of the KV cache, in bytes, by `--kv-cache-dtype`."""
    asked = EngineOptions.of(extra_args).kv_cache_dtype
    return 1 if asked.startswith(("fp8", "int8")) else ELEMENT_BYTES.get(asked, ELEMENT_BYTES[dtype])
