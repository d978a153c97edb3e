"""Assigns tensors to the parts of a model by their names. Stdlib only; pure.

The names are those of published checkpoints: with prefixes (`backbone.`, `llm.`, `thinker.`), with tensors of
encoders, and Mistral's own names.
"""

import re
from collections import Counter
from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from itertools import takewhile, zip_longest
from typing import Final

from heteroinfer_contract.word_table import word_set

INDEX_FILE: Final = "model.safetensors.index.json"
"""Lists the file of each tensor."""
_LAYER: Final = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
_ENCODERS: Final = word_set(
    """
    aligner audio audio_projection_layer audio_projector audio_tower connector embed_audio embed_vision
    image_newline mlp1 mm_projector modality_projection multi_modal_projector patch_merger
    pre_mm_projector_norm projector resampler vision vision_embed_tokens vision_encoder
    vision_language_adapter vision_model vision_projection vision_tower visual vpm
    """
)
"""Parts of a name that only an encoder or its projection has."""
_AUDIO: Final = word_set(
    """
    apm audio audio_projection_layer audio_projector audio_tower embed_audio whisper_encoder
    """
)
_DROPPED: Final = frozenset({"mtp", "mtp_block", "mtp_layers", "talker", "tts", "token2wav", "code2wav"})
"""Parts that vLLM omits when it serves text: layers for speculation, and speech (Qwen-Omni's talker)."""
_EMBEDDING: Final = re.compile(
    r"(?:^|\.)(?:embed|embed_tokens|word_embeddings|wte|tok_embeddings|embed_in)\.weight$|^backbone\.embeddings\.weight$"
)
_HEAD: Final = re.compile(
    r"^head\.weight$|(?:^|\.)(?:lm_head|embed_out|output_layer)\.|^(?:model\.)?output\.(?:weight|qweight)$"
)
_LAYER_TABLES: Final = re.compile(r"(?:^|\.)(?:embed_tokens_per_layer|per_layer_model_projection)\.")
"""Tables for all layers, in addition to the embedding (Gemma-3n, Gemma-4)."""
_HOST_TABLES: Final = re.compile(r"(?:^|\.)ngram_embedding\.|\.engram\.embed_tokens\.")
"""Tables of n-grams, which vLLM keeps in the host's memory (vllm/config/engram.py::EngramConfig@v0.32.0)."""
_SHARED: Final = re.compile(r"\.self_attn\.(?:k_proj|v_proj|k_norm)\.")
"""Tensors that some checkpoints contain for layers with shared keys and values, and vLLM does not load."""
EXPERT: Final = re.compile(
    r"\.experts\.|block_sparse_moe\.(?:input|output)_linear\.|\.moe\.(?:gate|up|down)_proj\."
)
"""Tensors of routed experts; names of shared experts contain `shared_expert(s)`."""
_EXPERT_NUMBER: Final = re.compile(r"\.experts\.(\d+)\.")
_DIMS_OF_ALL_EXPERTS: Final = 3
_DIMS_OF_TABLE: Final = 2
_ALL_DOWN: Final = re.compile(r"\.experts\.down_proj(?:\.weight)?$")
_GATE_UP_OF_EXPERTS: Final = re.compile(r"\.experts\.(?:\d+\.)?gate_up_proj(?:\.|$)")
_MLP: Final = re.compile(r"\.(?:mlp|feed_forward)\.(?:gate|up|down|gate_up)_proj\.|\.feed_forward\.w[123]\.")
"""Tensors of a dense feed-forward part; a mixture's tensors have `experts` or `shared` in the name."""
_SEPARATE_GATE_UP: Final = frozenset({"gate_proj", "up_proj", "w1", "w3"})
_JOINED_GATE_UP: Final = frozenset({"gate_up_proj", "input_linear"})
"""Tensors with the columns of gate and up."""
_OF_COLUMNS: Final = {"weight": -2, "weight_packed": -2, "scales": -1, "gate_up_proj_blocks": 1}
"""Tensor of a gate or up projection -> dimension of the intermediate columns, which is never packed."""
_COMPUTED: Final = re.compile(r"(?:rotary_emb|rope)\.(?:inv_freq|freqs)$|\.weight_shape$|\.g_idx$")
"""Tensors that some checkpoints store, but vLLM computes or ignores. Without act-order, vLLM empties `g_idx`,
too."""
_QUANTIZED_TYPES: Final = frozenset({"F8_E4M3", "F8_E5M2", "I8", "U8", "I32", "F4", "F8_E8M0", "I64"})
_SCALES: Final = re.compile(r"(?:scale|scales|scale_inv|zeros|zero_point|weight_scale_2|g_idx|blocks)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A tensor of a checkpoint, from the file's header.

    Attributes:
        dtype: safetensors' name: `BF16`, `F8_E4M3`, `I32`.
    """

    name: str
    dtype: str
    size_bytes: int
    shape: tuple[int, ...] = ()

    @property
    def is_quantized(self) -> bool:
        """Whether the tensor is a quantized weight or a part of one, such as its scales."""
        return self.dtype in _QUANTIZED_TYPES or bool(_SCALES.search(self.name))


@dataclass(slots=True, kw_only=True)
class LayerBytes:
    """Bytes of one layer.

    Attributes:
        quantized: quantized weights other than routed experts.
        numbered: numbers of the experts that have their own tensors; empty if one tensor has all experts.
        mlp_columns: intermediate columns of the dense feed-forward part; 0 if no tensor shows them.
        routed_columns: intermediate columns of one routed expert.
        routed_down: shape of the experts' down projection, if one tensor has gates and ups.
    """

    total: int = 0
    quantized: int = 0
    routed: int = 0
    routed_quantized: int = 0
    mlp: int = 0
    numbered: set[int] = field(default_factory=set)
    gates_together: bool = False
    mlp_columns: int = 0
    routed_columns: int = 0
    routed_down: tuple[int, ...] = ()

    def columns(self, hidden: int) -> int:
        """Returns the intermediate columns of an expert, or of the dense part; 0 if they are unknown.

        Args:
            hidden: width of the residual stream.
        """
        if not self.routed:
            return self.mlp_columns
        if self.routed_columns or len(self.routed_down) != _DIMS_OF_ALL_EXPERTS:
            return self.routed_columns
        # The name does not show the order of inputs and outputs. One of the two sizes is `hidden`.
        return next((size for size in self.routed_down[1:] if size != hidden), hidden)


@dataclass(slots=True, kw_only=True)
class Weights:
    """A model's weights by part, in bytes.

    Attributes:
        layers: weights of the served layers, by number.
        encoder: encoders of images or audio, with their projections.
        has_audio_encoder: whether an encoder is for audio.
        host_tables: tables that stay in the host's memory, on any device.
        other: everything else (final norm).
        dropped: weights that vLLM does not load.
    """

    layers: dict[int, LayerBytes] = field(default_factory=dict)
    embedding: int = 0
    head: int = 0
    encoder: int = 0
    has_audio_encoder: bool = False
    layer_tables: int = 0
    host_tables: int = 0
    other: int = 0
    dropped: int = 0


def is_of_encoder(name: str) -> bool:
    """Reports whether a tensor or module belongs to an encoder or its projection, by its name."""
    return bool(set(name.split(".")) & (_ENCODERS | _AUDIO))


def is_embedding(tensor: Tensor) -> bool:
    """Reports whether a tensor is the decoder's unquantized embedding."""
    is_table = bool(_EMBEDDING.search(tensor.name)) and len(tensor.shape) == _DIMS_OF_TABLE
    return is_table and not set(tensor.name.split(".")) & (_DROPPED | _ENCODERS | _AUDIO | {"layers"})


def is_expert_input(tensor: Tensor) -> bool:
    """Reports whether a tensor is the gate or up projection of one routed expert."""
    name_parts = set(tensor.name.split("."))
    return (
        bool(_EXPERT_NUMBER.search(tensor.name))
        and bool(name_parts & _SEPARATE_GATE_UP)
        and "weight" in name_parts
    )


def sum_weights(tensors: Iterable[Tensor], num_layers: int, shared: Container[int] = ()) -> Weights:
    """Returns the bytes of a model's tensors for each part: layers, embedding, head, encoders and tables.

    Args:
        num_layers: served layers; later layers are for speculation (multi-token prediction).
        shared: layers that read an earlier layer's keys and values.
    """
    tensors = tuple(tensors)
    encoder_prefixes = _encoder_prefixes(tensors, num_layers)
    weights = Weights()
    for tensor in tensors:
        _add_tensor(weights, tensor, num_layers, shared, encoder_prefixes)
    return weights


def _encoder_prefixes(tensors: Iterable[Tensor], num_layers: int) -> tuple[str, ...]:
    """Returns the name prefixes of encoders: stacks of numbered layers other than the decoder.

    The decoder is the stack with the most bytes among those that have at least `num_layers` layers.
    """
    bytes_of_stack: Counter[str] = Counter()
    last_number: dict[str, int] = {}
    for tensor in tensors:
        match = _LAYER.search(tensor.name)
        if match and not set(tensor.name.split(".")) & (_DROPPED | _ENCODERS):
            stack = tensor.name[: match.start(1)]
            bytes_of_stack[stack] += tensor.size_bytes
            last_number[stack] = max(last_number.get(stack, 0), int(match[1]))
    decoder = max(
        (stack for stack in bytes_of_stack if last_number[stack] >= num_layers - 1),
        key=bytes_of_stack.__getitem__,
        default=None,
    )
    if decoder is None:
        return ()
    return tuple(sorted(_encoder_prefix(stack, decoder) for stack in bytes_of_stack if stack != decoder))


def _encoder_prefix(stack: str, decoder: str) -> str:
    """Returns the shortest prefix of `stack`, in whole parts of the name, that `decoder` does not have."""
    pairs = zip_longest(stack.split("."), decoder.split("."))
    common_parts = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
    return ".".join(stack.split(".")[: common_parts + 1]) + "."


def _add_tensor(
    weights: Weights,
    tensor: Tensor,
    num_layers: int,
    shared: Container[int],
    encoder_prefixes: tuple[str, ...],
) -> None:
    """Adds a tensor's bytes to the part of the model to which its name belongs.

    A name can match several parts. The first match counts.

    Args:
        shared: layers that read an earlier layer's keys and values.
        encoder_prefixes: result of `_encoder_prefixes`.
    """
    name, size = tensor.name, tensor.size_bytes
    name_parts = set(name.split("."))
    if name_parts & _DROPPED or _COMPUTED.search(name):
        weights.dropped += size
    elif name_parts & _ENCODERS or (name.startswith(encoder_prefixes) and not _EMBEDDING.search(name)):
        weights.encoder += size
        weights.has_audio_encoder |= bool(name_parts & _AUDIO)
    elif _HOST_TABLES.search(name):
        weights.host_tables += size
    elif match := _LAYER.search(name):
        if int(match[1]) >= num_layers or (int(match[1]) in shared and _SHARED.search(name)):
            weights.dropped += size
        else:
            _add_to_layer(weights.layers.setdefault(int(match[1]), LayerBytes()), tensor)
    elif _LAYER_TABLES.search(name):
        weights.layer_tables += size
    elif _EMBEDDING.search(name):
        weights.embedding += size
    elif _HEAD.search(name):
        weights.head += size
    else:
        weights.other += size


def _add_to_layer(layer: LayerBytes, tensor: Tensor) -> None:
    """Adds a tensor's bytes and columns to its layer."""
    size = tensor.size_bytes
    layer.total += size
    if _MLP.search(tensor.name):
        layer.mlp += size
        layer.mlp_columns = layer.mlp_columns or _columns(tensor)
    if EXPERT.search(tensor.name):
        layer.routed += size
        layer.routed_quantized += size if tensor.is_quantized else 0
        layer.numbered.update(int(number) for number in _EXPERT_NUMBER.findall(tensor.name))
        layer.gates_together |= bool(_GATE_UP_OF_EXPERTS.search(tensor.name))
        layer.routed_columns = layer.routed_columns or _columns(tensor)
        layer.routed_down = tensor.shape if _ALL_DOWN.search(tensor.name) else layer.routed_down
    elif tensor.is_quantized:
        layer.quantized += size


def _columns(tensor: Tensor) -> int:
    """Returns the number of intermediate columns, read from a gate or up tensor of an expert or MLP.

    Returns 0 for other tensors, and for a tensor `gate_up_proj` of experts, because its name does not show
    which dimension has the columns.
    """
    *path, leaf = tensor.name.split(".")
    dim = _OF_COLUMNS.get(leaf)
    if dim is None or len(tensor.shape) < 2:
        return 0
    if _GATE_UP_OF_EXPERTS.search(tensor.name):  # `LayerBytes.columns` reads the down projection instead
        return 0
    # A tensor of gate and up has twice the columns.
    if leaf == "gate_up_proj_blocks" or _JOINED_GATE_UP & set(path):
        return tensor.shape[dim] // 2
    return tensor.shape[dim] if _SEPARATE_GATE_UP & set(path) else 0
