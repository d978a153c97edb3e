"""The common properties of a model's layers of one kind. Stdlib only; pure."""

import dataclasses
from dataclasses import dataclass
from enum import StrEnum

from heteroinfer_contract import codec


class AttentionKind(StrEnum):
    """The data that a layer keeps for earlier tokens."""

    FULL = "Full"
    """Keys and values of all earlier tokens."""
    WINDOW = "Window"
    """Keys and values of the last tokens, up to the window's width."""
    CHUNKED = "Chunked"
    """Keys and values of the tokens in the same chunk."""
    LATENT = "Latent"
    """A latent vector per token, from which keys and values are computed (multi-head latent attention)."""
    SPARSE = "Sparse"
    """A latent vector per token, or keys and values, and an index that selects tokens (DeepSeek-V3.2)."""
    LINEAR = "Linear"
    """A state of fixed size (Mamba, gated delta net, short convolution)."""
    NONE = "None"
    """Nothing: the layer has no attention."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKind:
    """The common properties of layers of one kind; the layers' sizes may differ.

    Attributes:
        attention: the data that is kept for earlier tokens.
        kv_heads: heads whose keys and values are cached; 1 for latents, 0 without a cache by token.
        kv_width: elements cached for one token in one head: key and value together, or the latents of all
            the layer's attentions.
        value_width: elements of a value in one head; 0 if it is as wide as the key, or if the layer has
            neither.
        shares_kv: whether the layer reads an earlier layer's keys and values instead of its own.
        index_bytes: bytes per token in the index of sparse attention.
        window: tokens of the window or chunk; 0 without one.
        conv_elements: state of a sequence's convolution, in elements of the engine's type.
        state_elements: recurrent state of a sequence, in elements of the state's own type.
        state_copies: copies of the state that vLLM keeps for one sequence, with prefix caching.
        experts: routed experts; 0 for a dense layer.
        experts_per_token: routed experts that a token passes through.
        expert_bytes: weights of one routed expert.
        experts_quantized: whether the routed experts are in the model's scheme.
        gates_together: whether one tensor has the gate and up columns of all experts. Such a tensor's name
            does not show whether the columns are interleaved.
        quantized_bytes: weights other than routed experts that are in the model's scheme.
        mlp_bytes: weights of the dense feed-forward part; 0 for a layer with shared or routed experts.
        columns: intermediate columns of one routed expert, or of the dense feed-forward part; 0 if unknown,
            as in profiles of earlier versions.
    """

    attention: AttentionKind = AttentionKind.FULL
    kv_heads: int = 0
    kv_width: int = 0
    value_width: int = 0
    shares_kv: bool = False
    index_bytes: int = 0
    window: int = 0
    conv_elements: int = 0
    state_elements: int = 0
    state_copies: int = 0
    experts: int = 0
    experts_per_token: int = 0
    expert_bytes: int = 0
    experts_quantized: bool = False
    gates_together: bool = False
    quantized_bytes: int = 0
    mlp_bytes: int = 0
    columns: int = 0

    def check(self) -> None:
        """Checks that all numbers are in range; raises ContractError that names the field."""
        numbers = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "attention"}
        codec.at_least(0, "LayerKind", **numbers)
        codec.at_most(self.experts, "LayerKind", experts_per_token=self.experts_per_token)
        codec.at_most(self.kv_width, "LayerKind", value_width=self.value_width)

    @property
    def head_sizes(self) -> tuple[int, int]:
        """Elements of a key and of a value in one head."""
        value = self.value_width or self.kv_width // 2
        return self.kv_width - value, value

    @property
    def feed_forward_bytes(self) -> int:
        """Weights of a layer that feed-forward ranks can compute: its routed experts or its MLP."""
        return self.routed_bytes or self.mlp_bytes

    @property
    def routed_bytes(self) -> int:
        """Weights of all routed experts of a layer."""
        return self.experts * self.expert_bytes

    def expected_experts(self, tokens: int) -> float:
        """Returns the mean number of experts that `tokens` tokens use, if all experts are equally likely.

        Args:
            tokens: tokens of one step, >= 0.
        """
        if not self.experts:
            return 0.0
        unused_probability = (1 - self.experts_per_token / self.experts) ** tokens
        return self.experts * (1 - unused_probability)
