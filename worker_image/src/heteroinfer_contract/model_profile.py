"""Sizes of a model, as far as a plan needs them. Stdlib only; pure.

Read from a model's own files by `heteroinfer_contract.model_files`.
"""

from dataclasses import dataclass

from heteroinfer_contract import codec
from heteroinfer_contract.errors import ContractError


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelProfile:
    """A model's sizes in its checkpoint's own dtype.

    Attributes:
        architecture: first of config.json's `architectures`.
        dtype: of the checkpoint: `float32`, `float16` or `bfloat16`.
        num_layers: transformer layers.
        hidden_size: width of the residual stream.
        num_attention_heads: query heads of a layer.
        num_kv_heads: key/value heads of a layer.
        head_dim: width of a head.
        vocab_size: rows of the embedding.
        max_position_embeddings: longest sequence the model was made for, in tokens.
        layer_bytes: weights of each layer, in bytes.
        embedding_bytes: the input embedding.
        head_bytes: the output head; 0 if it is the embedding itself (`tied_head`).
        tied_head: whether head and embedding are one tensor.
        other_bytes: everything else (final norm).
        quantization: config.json's `quantization_config.quant_method`, or "".
    """

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

    @property
    def total_bytes(self) -> int:
        """Returns the size of all weights, in bytes."""
        return sum(self.layer_bytes) + self.embedding_bytes + self.head_bytes + self.other_bytes

    def kv_bytes_per_token_and_layer(self, element_bytes: int) -> int:
        """Returns the KV cache of one token in one layer, in bytes.

        Args:
            element_bytes: size of one element of the cache: 2 for bf16, 4 for float32.
        """
        return 2 * self.num_kv_heads * self.head_dim * element_bytes

    def to_json(self) -> str:
        """Returns the one JSON text of this profile."""
        return codec.to_json(self)

    @classmethod
    def from_json(cls, text: str) -> "ModelProfile":
        """Returns the profile that `text` holds.

        Raises:
            ContractError: it is none that a model can have; the message names the field.
        """
        profile = codec.from_json(cls, text)
        profile.check()
        return profile

    def check(self) -> None:
        """Checks that no size is one that there cannot be; raises ContractError naming it."""
        for name in ("num_layers", "hidden_size", "num_attention_heads", "num_kv_heads", "head_dim"):
            codec.at_least(1, "ModelProfile", **{name: getattr(self, name)})
        for name in ("vocab_size", "max_position_embeddings"):
            codec.at_least(1, "ModelProfile", **{name: getattr(self, name)})
        for name in ("embedding_bytes", "head_bytes", "other_bytes"):
            codec.at_least(0, "ModelProfile", **{name: getattr(self, name)})
        if len(self.layer_bytes) != self.num_layers:
            raise ContractError(
                f"ModelProfile.layer_bytes: got {len(self.layer_bytes)} layers, expected num_layers "
                f"{self.num_layers}"
            )
        codec.at_least(0, "ModelProfile", layer_bytes=min(self.layer_bytes))
