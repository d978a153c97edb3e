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

_PADDING_LIMIT: Final = 1.5
"""If the numbers of layers of the kinds differ by less than this factor, vLLM pads all groups to the largest
number. Otherwise it divides the layers into groups of the smallest number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cache:
    """The keys and values, the index or the state that one layer stores.

    Attributes:
        kind: content of its blocks; caches of equal kind, window and page_bytes share a block table.
        window: tokens that a sliding window or a chunk covers; 0 for none.
        page_bytes: bytes of one block.
        fixed_blocks: blocks of a sequence if their number does not depend on its length; otherwise 0.
    """

    layer: int
    kind: AttentionKind
    window: int
    page_bytes: int
    fixed_blocks: int = 0

    @property
    def key(self) -> tuple[AttentionKind, int, int]:
        """Identity of the block table. Caches with equal keys share a table."""
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
        """Returns the bytes that one block takes on a rank with layers first..end-1.

        A block belongs to one group at a time, so the largest group decides.
        """
        return max(
            (sum(size for layer, size in group.items() if first <= layer < end) for group in self.groups),
            default=0,
        )

    @property
    def min_blocks(self) -> int:
        """Blocks for one full-length request, plus the block that vLLM keeps for itself."""
        return self.sequence_blocks + 1

    def tokens(self, blocks: int) -> int:
        """Returns the number of tokens that these blocks hold, if all requests have full length."""
        is_plain = len(self.groups) <= 1 and self.sequence_blocks == ceil(
            self.sequence_tokens / self.block_tokens
        )
        if is_plain:
            # Each block holds tokens, as in most models. The result includes the block that vLLM keeps for
            # itself (`min_blocks`), like the size that vLLM logs.
            return blocks * self.block_tokens
        # With several groups, a token takes blocks of each group. With windows or states, the number of
        # blocks of a request does not follow from its tokens. So this counts whole requests, without the
        # block that vLLM keeps for itself.
        return max(blocks - 1, 0) * self.sequence_tokens // max(self.sequence_blocks, 1)


def build_kv_cache(
    profile: ModelProfile, engine: EngineSettings, *, ranks_of_stage: int, batches_at_once: int
) -> KvCache:
    """Returns the KV cache of one rank.

    Args:
        ranks_of_stage: number of ranks of a stage, which share heads.
        batches_at_once: batches that may be scheduled at the same time; sliding windows keep the tokens of
            all these batches.
    """
    caches = [
        cache
        for index, kind in enumerate(profile.layers)
        for cache in _layer_caches(index, kind, engine, ranks_of_stage)
    ]
    tokens = engine.max_model_len
    batch_tokens = engine.max_num_batched_tokens * batches_at_once
    # vLLM keeps caches of one kind and window in one group, even if their pages have different sizes:
    # vllm/v1/kv_cache_interface.py::UniformTypeKVCacheSpecs@v0.32.0.
    if len({(cache.kind, cache.window) for cache in caches}) <= 1:
        bytes_by_layer: dict[int, int] = {}
        for cache in caches:
            bytes_by_layer[cache.layer] = bytes_by_layer.get(cache.layer, 0) + cache.page_bytes
        blocks = _sequence_blocks(caches[0], engine.block_size, tokens, batch_tokens) if caches else 0
        groups: tuple[Mapping[int, int], ...] = (bytes_by_layer,) if bytes_by_layer else ()
    else:
        groups, blocks = _group_kinds(caches, engine.block_size, tokens, batch_tokens)
    return KvCache(
        groups=groups, sequence_blocks=blocks, sequence_tokens=tokens, block_tokens=engine.block_size
    )


def _group_kinds(
    caches: Sequence[_Cache], block_tokens: int, tokens: int, batch_tokens: int
) -> tuple[tuple[Mapping[int, int], ...], int]:
    """Divides the caches of a model with several kinds into groups of equal size.

    Returns:
        The bytes of a block by layer for each group, and the blocks of a full-length request in all groups.
    """
    block_bytes = max(cache.page_bytes for cache in caches)
    caches_by_key: dict[tuple[AttentionKind, int, int], list[_Cache]] = {}
    for cache in caches:
        caches_by_key.setdefault(cache.key, []).append(cache)
    numbers_of_layers = [len(same_kind) for same_kind in caches_by_key.values()]
    min_layers, max_layers = min(numbers_of_layers), max(numbers_of_layers)
    group_size = max_layers if max_layers < min_layers * _PADDING_LIMIT else min_layers
    groups: list[Mapping[int, int]] = []
    blocks = 0
    for same_kind in caches_by_key.values():
        # Like vLLM, deals the layers of a kind out among its groups.
        num_groups = ceil(len(same_kind) / group_size)
        groups += [
            {cache.layer: block_bytes for cache in same_kind[i::num_groups]} for i in range(num_groups)
        ]
        example = same_kind[0]  # caches of one kind differ only in their layers
        # Smaller pages of attention get longer blocks if they divide the largest page. All other pages are
        # padded to the largest page.
        gets_longer_blocks = (
            example.kind is not AttentionKind.LINEAR and block_bytes % example.page_bytes == 0
        )
        length_factor = block_bytes // example.page_bytes if gets_longer_blocks else 1
        blocks += num_groups * _sequence_blocks(example, block_tokens * length_factor, tokens, batch_tokens)
    return tuple(groups), blocks


def _sequence_blocks(cache: _Cache, block_tokens: int, tokens: int, batch_tokens: int) -> int:
    """Returns the number of blocks that one sequence takes in one group.

    The same number follows from `max_memory_usage_bytes` of vLLM's specs of the KV cache. The additional
    block of a window is for a window that begins inside a block.

    Args:
        block_tokens: tokens of a block.
        tokens: tokens of the sequence.
        batch_tokens: tokens that may be scheduled at the same time.
    """
    match cache.kind:
        case AttentionKind.LINEAR:
            return cache.fixed_blocks
        case AttentionKind.WINDOW:
            return ceil(min(cache.window - 1 + batch_tokens, tokens) / block_tokens) + 1
        case AttentionKind.CHUNKED:
            return ceil(min(cache.window + batch_tokens, tokens) / block_tokens)
    return ceil(tokens / block_tokens)


def _layer_caches(index: int, kind: LayerKind, engine: EngineSettings, tensor: int) -> list[_Cache]:
    """Returns the caches of one layer on one rank: keys and values, an index and a state, if it has them."""
    caches = []
    if kind.kv_heads and not kind.shares_kv:
        # Sparse attention stores latents, beside the index below.
        attention = AttentionKind.LATENT if kind.attention is AttentionKind.SPARSE else kind.attention
        page_bytes = token_bytes(kind, engine, tensor) * engine.block_size
        caches.append(_Cache(layer=index, kind=attention, window=kind.window, page_bytes=page_bytes))
    if kind.index_bytes:
        page_bytes = kind.index_bytes * engine.block_size
        caches.append(_Cache(layer=index, kind=AttentionKind.LATENT, window=0, page_bytes=page_bytes))
    if kind.conv_elements or kind.state_elements:
        page_bytes = state_bytes(kind, engine, tensor)
        # vLLM pads a state to the size of an attention block. engine_settings.py chooses blocks that are
        # large enough for a state.
        fixed_blocks = max(kind.state_copies, 1)
        linear = AttentionKind.LINEAR
        caches.append(
            _Cache(layer=index, kind=linear, window=0, page_bytes=page_bytes, fixed_blocks=fixed_blocks)
        )
    return caches


def token_bytes(kind: LayerKind, engine: EngineSettings, tensor: int) -> int:
    """Returns the bytes that one rank keeps for each token in a layer, without an index."""
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
    """Returns the bytes of one element of the KV cache; `--kv-cache-dtype` overrides the engine's dtype."""
    cache_dtype = EngineOptions.of(extra_args).kv_cache_dtype
    return (
        1 if cache_dtype.startswith(("fp8", "int8")) else ELEMENT_BYTES.get(cache_dtype, ELEMENT_BYTES[dtype])
    )
