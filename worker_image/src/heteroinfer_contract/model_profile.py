"""Sizes of a model, as far as a plan needs them. Stdlib only; pure.

Read from a model's own files by `heteroinfer_contract.model_files`. It travels as a pod's termination
message, of which Kubernetes keeps 4096 bytes, and in the status.
"""

import dataclasses
import json
from dataclasses import dataclass
from typing import Final

from heteroinfer_contract import codec
from heteroinfer_contract.errors import ContractError
from heteroinfer_contract.model import AttentionKind, LayerKind, Routing, Scheme

MOST_LAYERS: Final = 4096
"""As many as a role may have (`roles[].layers`); published models have up to 126."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelProfile(codec.JsonValue):
    """A model's sizes in the dtype that its config names.

    A profile of version 0.1.0 ends at `quantization`; what follows is then at its default, and every layer
    is taken for one with full attention and without experts.

    Attributes:
        architecture: first of config.json's `architectures`.
        dtype: that the config names, or of most weights: `float32`, `float16` or `bfloat16`.
        max_position_embeddings: longest sequence the model was made for, in tokens.
        head_bytes: the output head; 0 if it is the embedding itself (`tied_head`).
        quantization: config.json's `quantization_config.quant_method`, or "".
        kind_of_layer: index into `kinds`, by layer.
        limited_experts: whether gates and ups of experts are limited before they are multiplied.
        state_dtype: type of recurrent states that config.json names, or "".
        encoder: what an encoder takes: `images`, `audio`, or "" without one.
        encoder_bytes: its weights and projection; vLLM builds it on every stage.
        dropped_bytes: stored, and not loaded by vLLM (layers for speculation, a talker).
        first_stage_layers: the least number of layers of the first stage.
        last_stage_layers: of the last stage: layers that share keys and values are in one.
        layer_table_bytes: embeddings of each layer (Gemma-3n, Gemma-4); vLLM builds them on every stage.
        column_unit: intermediate columns that feed-forward ranks cannot part (`column_shares`); 0 where that
            is not known.
    """

    reads_tolerantly = True
    architecture: str
    dtype: str
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    layer_bytes: tuple[int, ...]
    embedding_bytes: int
    head_bytes: int
    tied_head: bool
    other_bytes: int = 0
    quantization: str = ""
    scheme: Scheme = Scheme()  # noqa: RUF009 - frozen
    kinds: tuple[LayerKind, ...] = ()
    kind_of_layer: tuple[int, ...] = ()
    routing: Routing = Routing.NONE
    limited_experts: bool = False
    state_dtype: str = ""
    encoder: str = ""
    encoder_bytes: int = 0
    dropped_bytes: int = 0
    first_stage_layers: int = 1
    last_stage_layers: int = 1
    layer_table_bytes: int = 0
    column_unit: int = 0

    @property
    def total_bytes(self) -> int:
        """Returns the size of all weights of the language model, in bytes."""
        tables = self.embedding_bytes + self.head_bytes + self.layer_table_bytes
        return sum(self.layer_bytes) + tables + self.other_bytes

    def layer(self, index: int) -> LayerKind:
        """Returns the kind of a layer; full attention and no experts where the profile does not say."""
        if len(self.kind_of_layer) != self.num_layers or self.kind_of_layer[index] >= len(self.kinds):
            return LayerKind(kv_heads=self.num_kv_heads, kv_width=2 * self.head_dim)
        return self.kinds[self.kind_of_layer[index]]

    @property
    def layers(self) -> tuple[LayerKind, ...]:
        """Returns the kind of every layer."""
        return tuple(self.layer(index) for index in range(self.num_layers))

    @property
    def is_latent(self) -> bool:
        """Returns whether any layer keeps latents (multi-head latent attention)."""
        return any(kind.attention in (AttentionKind.LATENT, AttentionKind.SPARSE) for kind in self.layers)

    @property
    def has_state(self) -> bool:
        """Returns whether any layer keeps a state of fixed size."""
        return any(kind.conv_elements or kind.state_elements for kind in self.layers)

    @property
    def experts(self) -> int:
        """Returns the routed experts of a layer that has most of them."""
        return max((kind.experts for kind in self.layers), default=0)

    def to_json(self) -> str:
        """Returns the one JSON text of this profile; what is at its default is left out of `kinds`."""
        value = dataclasses.asdict(self)
        bare = dataclasses.asdict(LayerKind())
        value["kinds"] = [{k: v for k, v in kind.items() if v != bare[k]} for kind in value["kinds"]]
        return json.dumps(value, sort_keys=True, separators=(",", ":"))

    def check(self) -> None:
        """Checks that no size is one that there cannot be; raises ContractError naming it."""
        for name in ("num_layers", "hidden_size", "num_attention_heads", "num_kv_heads", "head_dim"):
            codec.at_least(1, "ModelProfile", **{name: getattr(self, name)})
        codec.at_most(MOST_LAYERS, "ModelProfile", num_layers=self.num_layers)
        for name in ("vocab_size", "max_position_embeddings", "first_stage_layers", "last_stage_layers"):
            codec.at_least(1, "ModelProfile", **{name: getattr(self, name)})
        codec.at_least(0, "ModelProfile", column_unit=self.column_unit)
        for part in ("embedding", "head", "other", "encoder", "dropped", "layer_table"):
            codec.at_least(0, "ModelProfile", **{f"{part}_bytes": getattr(self, f"{part}_bytes")})
        if len(self.layer_bytes) != self.num_layers:
            raise ContractError(
                f"ModelProfile.layer_bytes: got {len(self.layer_bytes)} layers, expected num_layers "
                f"{self.num_layers}"
            )
        codec.at_least(0, "ModelProfile", layer_bytes=min(self.layer_bytes))
        for index in self.kind_of_layer:
            codec.at_least(0, "ModelProfile", kind_of_layer=index)
        for index, kind in enumerate(self.layers):
            kind.check()
            codec.at_most(self.layer_bytes[index], "ModelProfile", routed_bytes=kind.routed_bytes)
