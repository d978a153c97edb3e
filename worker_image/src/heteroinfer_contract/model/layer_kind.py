"""What the layers of a model that are alike have in common. Stdlib only; pure."""

import dataclasses
from dataclasses import dataclass
from enum import StrEnum

from heteroinfer_contract import codec


class AttentionKind(StrEnum):
    """What a layer keeps of the tokens before."""

    FULL = "Full"
    """Keys and values of all of them."""
    WINDOW = "Window"
    """Of the last ones, as many as the window is wide."""
    CHUNKED = "Chunked"
    """Of those in the same chunk."""
    LATENT = "Latent"
    """One latent vector for each, of which keys and values are made (multi-head latent attention)."""
    SPARSE = "Sparse"
    """A latent vector for each, and an index that chooses among them (DeepSeek sparse attention)."""
    LINEAR = "Linear"
    """A state of fixed size (Mamba, gated delta net, short convolution)."""
    NONE = "None"
    """Nothing: the layer has no attention."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKind:
    """What layers of one kind have in common; their sizes may differ.

    Attributes:
        attention: what is kept of earlier tokens.
        kv_heads: heads whose keys and values are cached; 1 of a latent, 0 without a cache by token.
        kv_width: elements cached for one token in one head: key and value together, or the latents of all
            its attentions.
        value_width: elements of a value in one head; 0 if it is as wide as the key, or without both.
        shares_kv: whether it reads an earlier layer's keys and values, and has none of its own.
        index_bytes: of a token in the index of sparse attention.
        window: tokens of the window or chunk; 0 without one.
        conv_elements: state of a sequence's convolution, in elements of the engine's type.
        state_elements: recurrent state of a sequence, in elements of the state's own type.
        state_copies: of it that vLLM keeps for one sequence, with prefix caching.
        experts: routed experts; 0 of a dense layer.
        experts_per_token: how many of them a token goes through.
        expert_bytes: weights of one routed expert, in bytes.
        experts_quantized: whether these are in the model's scheme.
        gates_together: whether one tensor has the gate and up columns of all experts, in an order that its
            name does not say.
        quantized_bytes: weights other than routed experts that are in the model's scheme, in bytes.
        mlp_bytes: the dense feed-forward part, in bytes; 0 of a layer with experts, shared or routed.
        columns: intermediate columns of one routed expert, or of the dense feed-forward part; 0 where that is
            not known, as in profiles by earlier versions.
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
        """Checks that no number is one that there cannot be; raises ContractError naming it."""
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
        """Returns what feed-forward ranks can take of a layer: its routed experts, or its MLP, in bytes."""
        return self.routed_bytes or self.mlp_bytes

    @property
    def routed_bytes(self) -> int:
        """Returns the weights of all routed experts of a layer, in bytes."""
        return self.experts * self.expert_bytes

    def expected_experts(self, tokens: int) -> float:
        """Returns how many experts so many tokens go through, on average, if each is as likely.

        Args:
            tokens: of one step, >= 0.
        """
        if not self.experts:
            return 0.0
        missed = (1 - self.experts_per_token / self.experts) ** tokens
        return self.experts * (1 - missed)
