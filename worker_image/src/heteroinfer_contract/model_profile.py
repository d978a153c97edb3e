"""The sizes of a model that a plan needs. Stdlib only; pure.

`heteroinfer_contract.model_files` reads them from the model's own files. They are stored in a pod's
termination message (Kubernetes keeps 4096 bytes) and in the status.
"""

import dataclasses
import json
from dataclasses import dataclass
from typing import Final

from heteroinfer_contract import codec
from heteroinfer_contract.errors import ContractError
from heteroinfer_contract.model import AttentionKind, LayerKind, Routing, Scheme

MAX_LAYERS: Final = 4096
"""Maximum number of layers, equal to the limit of `roles[].layers`; published models have up to 126."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelProfile(codec.JsonValue):
    """A model's sizes in the dtype that its config names.

    A profile of version 0.1.0 ends at `quantization`. Its later fields have their defaults, and every layer
    counts as a layer with full attention and without experts.

    Attributes:
        architecture: first of config.json's `architectures`.
        dtype: `float32`, `float16` or `bfloat16`: from the config, or the type of most weights.
        max_position_embeddings: longest sequence that the model supports, in tokens.
        head_bytes: the output head; 0 if the head is the embedding itself (`tied_head`).
        quantization: config.json's `quantization_config.quant_method`, or "".
        kind_of_layer: index into `kinds`, by layer.
        limited_experts: whether gates and ups of experts are clamped before they are multiplied.
        state_dtype: type of recurrent states that config.json names, or "".
        encoder: input of the encoder: `images`, `audio`, or "" without an encoder.
        encoder_bytes: weights and projection of the encoder; vLLM builds it on every stage.
        dropped_bytes: stored weights that vLLM does not load (layers for speculation, parts for speech).
        first_stage_layers: minimum number of layers of the first stage.
        last_stage_layers: minimum number of layers of the last stage: layers that share keys and values must
            be in one stage.
        layer_table_bytes: embeddings of each layer (Gemma-3n, Gemma-4); vLLM builds them on every stage.
        column_unit: intermediate columns that feed-forward ranks cannot split (`column_shares`), or 0.
        expert_scheme: format of the routed experts by the files' headers, if it is another than `scheme`.
        text_architecture: class of the language model inside this model, if config.json names one.
        text_type: `model_type` of the language model inside this model, or "".
        host_table_bytes: tables that a GPU rank keeps in the host's memory (n-grams).
        faults: reasons in the files why vLLM cannot load the model, or answers wrongly; one sentence each.
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
    expert_scheme: Scheme | None = None
    text_architecture: str = ""
    text_type: str = ""
    host_table_bytes: int = 0
    faults: tuple[str, ...] = ()

    @property
    def scheme_of_experts(self) -> Scheme:
        """The format of the routed experts, if they are quantized."""
        return self.expert_scheme or self.scheme

    @property
    def total_bytes(self) -> int:
        """Size of all weights of the language model."""
        tables = self.embedding_bytes + self.head_bytes + self.layer_table_bytes
        return sum(self.layer_bytes) + tables + self.other_bytes + self.host_table_bytes

    def layer(self, index: int) -> LayerKind:
        """Returns the kind of a layer; full attention without experts if the profile does not describe it."""
        if len(self.kind_of_layer) != self.num_layers or self.kind_of_layer[index] >= len(self.kinds):
            return LayerKind(kv_heads=self.num_kv_heads, kv_width=2 * self.head_dim)
        return self.kinds[self.kind_of_layer[index]]

    @property
    def layers(self) -> tuple[LayerKind, ...]:
        """The kind of every layer."""
        return tuple(self.layer(index) for index in range(self.num_layers))

    @property
    def is_latent(self) -> bool:
        """Whether any layer keeps latents (multi-head latent attention)."""
        latent, sparse = AttentionKind.LATENT, AttentionKind.SPARSE
        # Sparse attention caches either one latent per token (`kv_heads` is 1), or keys and values of several
        # heads.
        return any(
            kind.attention is latent or (kind.attention is sparse and kind.kv_heads == 1)
            for kind in self.layers
        )

    @property
    def has_shared_keys(self) -> bool:
        """Whether the last layers share keys and values, so that the last stage must hold all of them."""
        return self.last_stage_layers > 1

    @property
    def has_state(self) -> bool:
        """Whether any layer keeps a state of fixed size."""
        return any(kind.conv_elements or kind.state_elements for kind in self.layers)

    @property
    def experts(self) -> int:
        """Maximum number of routed experts in a layer."""
        return max((kind.experts for kind in self.layers), default=0)

    def to_json(self) -> str:
        """Returns the canonical JSON text; entries of `kinds` omit fields that are at their default."""
        value = dataclasses.asdict(self)
        defaults = dataclasses.asdict(LayerKind())
        value["kinds"] = [
            {field: setting for field, setting in kind.items() if setting != defaults[field]}
            for kind in value["kinds"]
        ]
        return json.dumps(value, sort_keys=True, separators=(",", ":"))

    def check(self) -> None:
        """Checks that all sizes are in range; raises ContractError that names the field."""
        for name in ("num_layers", "hidden_size", "num_attention_heads", "num_kv_heads", "head_dim"):
            codec.at_least(1, "ModelProfile", **{name: getattr(self, name)})
        codec.at_most(MAX_LAYERS, "ModelProfile", num_layers=self.num_layers)
        for name in ("vocab_size", "max_position_embeddings", "first_stage_layers", "last_stage_layers"):
            codec.at_least(1, "ModelProfile", **{name: getattr(self, name)})
        codec.at_least(0, "ModelProfile", column_unit=self.column_unit)
        for part in ("embedding", "head", "other", "encoder", "dropped", "layer_table", "host_table"):
            codec.at_least(0, "ModelProfile", **{f"{part}_bytes": getattr(self, f"{part}_bytes")})
        if len(self.layer_bytes) != self.num_layers:
            raise ContractError(
                f"ModelProfile.layer_bytes: must have num_layers ({self.num_layers}) entries "
                f"(got {len(self.layer_bytes)})"
            )
        codec.at_least(0, "ModelProfile", layer_bytes=min(self.layer_bytes))
        self.scheme.check()
        self.scheme_of_experts.check()
        for index in self.kind_of_layer:
            codec.at_least(0, "ModelProfile", kind_of_layer=index)
        for index, kind in enumerate(self.layers):
            kind.check()
            codec.at_most(self.layer_bytes[index], "ModelProfile", routed_bytes=kind.routed_bytes)
