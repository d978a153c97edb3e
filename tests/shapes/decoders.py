"""Yields the tensors of published decoders with their checkpoints' names, from their configs."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from heteroinfer_contract.model import Scheme
from tests.shapes.linears import TensorShape, linear

PLAIN = Scheme()


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """A decoder whose tensors are listed.

    Attributes:
        text: its config, including defaults.
        scheme: format of its linear layers.
        experts_only: whether only routed experts are quantized.
        prefix: prefix of `layers.N`, `embed_tokens` and `norm`.
        head: name of the head.
    """

    text: Mapping[str, Any]
    scheme: Scheme = PLAIN
    experts_only: bool = False
    prefix: str = "model"
    head: str = "lm_head"

    @property
    def dense(self) -> Scheme:
        """Returns the format of all layers except routed experts."""
        return PLAIN if self.experts_only else self.scheme


def decoder_tensors(decoder: Decoder) -> Iterator[TensorShape]:
    """Yields the tensors of a whole decoder."""
    text, prefix = decoder.text, decoder.prefix
    vocab, hidden = text["vocab_size"], text["hidden_size"]
    embedding = "embeddings" if prefix == "backbone" else "embed_tokens"
    yield f"{prefix}.{embedding}.weight", "BF16", (vocab, hidden)
    layers = text["num_hidden_layers"] + text.get("num_nextn_predict_layers", 0)
    for index in range(layers):
        yield from FAMILIES[text["model_type"]](decoder, index, f"{prefix}.layers.{index}")
    yield f"{prefix}.{'norm_f' if prefix == 'backbone' else 'norm'}.weight", "BF16", (hidden,)
    if not text.get("tie_word_embeddings"):
        yield f"{decoder.head}.weight", "BF16", (vocab, hidden)


def _norms(at: str, size: int, *names: str) -> Iterator[TensorShape]:
    for name in names:
        yield f"{at}.{name}.weight", "BF16", (size,)


def _attention(decoder: Decoder, at: str, *, gate: bool = False, norms: str = "") -> Iterator[TensorShape]:
    text, scheme = decoder.text, decoder.dense
    hidden, heads = text["hidden_size"], text["num_attention_heads"]
    width = text.get("head_dim") or hidden // heads
    kv = text.get("num_key_value_heads", heads)
    bias = text["model_type"] in ("qwen2", "qwen2_5_vl_text") or bool(text.get("attention_bias"))
    yield from linear(f"{at}.q_proj", heads * width * (2 if gate else 1), hidden, scheme, bias=bias)
    yield from linear(f"{at}.k_proj", kv * width, hidden, scheme, bias=bias)
    yield from linear(f"{at}.v_proj", kv * width, hidden, scheme, bias=bias)
    yield from linear(
        f"{at}.o_proj", hidden, heads * width, scheme, bias=bool(text.get("attention_out_bias"))
    )
    if norms == "head":
        yield from _norms(at, width, "q_norm", "k_norm")
    elif norms == "all":
        yield from _norms(at, heads * width, "q_norm")
        yield from _norms(at, kv * width, "k_norm")


def _mlp(at: str, hidden: int, width: int, scheme: Scheme) -> Iterator[TensorShape]:
    yield from linear(f"{at}.gate_proj", width, hidden, scheme)
    yield from linear(f"{at}.up_proj", width, hidden, scheme)
    yield from linear(f"{at}.down_proj", hidden, width, scheme)


def _experts(at: str, count: int, hidden: int, width: int, scheme: Scheme) -> Iterator[TensorShape]:
    for expert in range(count):
        yield from _mlp(f"{at}.experts.{expert}", hidden, width, scheme)


def _llama(decoder: Decoder, index: int, at: str) -> Iterator[TensorShape]:
    text = decoder.text
    norms = "head" if text["model_type"].startswith("qwen3") else ""
    yield from _attention(decoder, f"{at}.self_attn", norms=norms)
    yield from _mlp(f"{at}.mlp", text["hidden_size"], text["intermediate_size"], decoder.dense)
    yield from _norms(at, text["hidden_size"], "input_layernorm", "post_attention_layernorm")


def _olmo2(decoder: Decoder, index: int, at: str) -> Iterator[TensorShape]:
    text = decoder.text
    yield from _attention(decoder, f"{at}.self_attn", norms="all")
    yield from _mlp(f"{at}.mlp", text["hidden_size"], text["intermediate_size"], decoder.dense)
    yield from _norms(at, text["hidden_size"], "post_attention_layernorm", "post_feedforward_layernorm")


def _phi3(decoder: Decoder, index: int, at: str) -> Iterator[TensorShape]:
    text, scheme = decoder.text, decoder.dense
    hidden, heads, width = text["hidden_size"], text["num_attention_heads"], text["intermediate_size"]
    head_dim = hidden // heads
    qkv = (heads + 2 * text["num_key_value_heads"]) * head_dim
    yield from linear(f"{at}.self_attn.qkv_proj", qkv, hidden, scheme)
    yield from linear(f"{at}.self_attn.o_proj", hidden, heads * head_dim, scheme)
    yield from linear(f"{at}.mlp.gate_up_proj", 2 * width, hidden, scheme)
    yield from linear(f"{at}.mlp.down_proj", hidden, width, scheme)
    yield from _norms(at, hidden, "input_layernorm", "post_attention_layernorm")


def _gemma(decoder: Decoder, index: int, at: str) -> Iterator[TensorShape]:
    text = decoder.text
    norms = "head" if text["model_type"] == "gemma3_text" else ""
    yield from _attention(decoder, f"{at}.self_attn", norms=norms)
    yield from _mlp(f"{at}.mlp", text["hidden_size"], text["intermediate_size"], decoder.dense)
    yield from _norms(at, text["hidden_size"], "input_layernorm", "post_attention_layernorm")
    yield from _norms(at, text["hidden_size"], "pre_feedforward_layernorm", "post_feedforward_layernorm")


def _mixtral(decoder: Decoder, index: int, at: str) -> Iterator[TensorShape]:
    text = decoder.text
    hidden, width, count = text["hidden_size"], text["intermediate_size"], text["num_local_experts"]
    is_minimax = text["model_type"] == "minimax_m2"
    yield from _attention(decoder, f"{at}.self_attn", norms="all" if is_minimax else "")
    moe = f"{at}.block_sparse_moe"
    yield from linear(f"{moe}.gate", count, hidden, PLAIN)
    if is_minimax:
        yield f"{moe}.e_score_correction_bias", "F32", (count,)
    for expert in range(count):
        yield from linear(f"{moe}.experts.{expert}.w1", width, hidden, decoder.scheme)
        yield from linear(f"{moe}.experts.{expert}.w2", hidden, width, decoder.scheme)
        yield from linear(f"{moe}.experts.{expert}.w3", width, hidden, decoder.scheme)
    yield from _norms(at, hidden, "input_layernorm", "post_attention_layernorm")


def _qwen3_moe(decoder: Decoder, index: int, at: str) -> Iterator[TensorShape]:
    text = decoder.text
    yield from _attention(decoder, f"{at}.self_attn", norms="head")
    yield from linear(f"{at}.mlp.gate", text["num_experts"], text["hidden_size"], PLAIN)
    count, width = text["num_experts"], text["moe_intermediate_size"]
    yield from _experts(f"{at}.mlp", count, text["hidden_size"], width, decoder.scheme)
    yield from _norms(at, text["hidden_size"], "input_layernorm", "post_attention_layernorm")


def _glm4_moe(decoder: Decoder, index: int, at: str) -> Iterator[TensorShape]:
    text = decoder.text
    hidden, width, count = text["hidden_size"], text["moe_intermediate_size"], text["n_routed_experts"]
    yield from _attention(decoder, f"{at}.self_attn", norms="head" if text.get("use_qk_norm") else "")
    if index < text["first_k_dense_replace"]:
        yield from _mlp(f"{at}.mlp", hidden, text["intermediate_size"], decoder.dense)
    else:
        yield from linear(f"{at}.mlp.gate", count, hidden, PLAIN)
        yield f"{at}.mlp.gate.e_score_correction_bias", "F32", (count,)
        yield from _experts(f"{at}.mlp", count, hidden, width, decoder.scheme)
        shared = width * text["n_shared_experts"]
        yield from _mlp(f"{at}.mlp.shared_experts", hidden, shared, decoder.dense)
    yield from _norms(at, hidden, "input_layernorm", "post_attention_layernorm")
    if index >= text["num_hidden_layers"]:
        yield from _speculation(text, at)


def _deepseek(decoder: Decoder, index: int, at: str) -> Iterator[TensorShape]:
    text, scheme = decoder.text, decoder.dense
    hidden, heads, width = text["hidden_size"], text["num_attention_heads"], text["moe_intermediate_size"]
    rope, nope, value = text["qk_rope_head_dim"], text["qk_nope_head_dim"], text["v_head_dim"]
    q_rank, rank = text.get("q_lora_rank") or 0, text["kv_lora_rank"]
    attn = f"{at}.self_attn"
    if q_rank:
        yield from linear(f"{attn}.q_a_proj", q_rank, hidden, scheme)
        yield from _norms(attn, q_rank, "q_a_layernorm")
        yield from linear(f"{attn}.q_b_proj", heads * (rope + nope), q_rank, scheme)
    else:
        yield from linear(f"{attn}.q_proj", heads * (rope + nope), hidden, scheme)
    yield from linear(f"{attn}.kv_a_proj_with_mqa", rank + rope, hidden, scheme)
    yield from _norms(attn, rank, "kv_a_layernorm")
    yield from linear(f"{attn}.kv_b_proj", heads * (nope + value), rank, scheme)
    yield from linear(f"{attn}.o_proj", hidden, heads * value, scheme)
    if text.get("index_topk"):
        index_heads, index_dim = text["index_n_heads"], text["index_head_dim"]
        yield from linear(f"{attn}.indexer.wq_b", index_heads * index_dim, q_rank, scheme)
        yield from linear(f"{attn}.indexer.wk", index_dim, hidden, scheme)
        yield f"{attn}.indexer.k_norm.weight", "F32", (index_dim,)
        yield f"{attn}.indexer.k_norm.bias", "F32", (index_dim,)
        yield from linear(f"{attn}.indexer.weights_proj", index_heads, hidden, PLAIN)
    if index < text["first_k_dense_replace"]:
        yield from _mlp(f"{at}.mlp", hidden, text["intermediate_size"], scheme)
    else:
        count = text["n_routed_experts"]
        yield from linear(f"{at}.mlp.gate", count, hidden, PLAIN)
        if text.get("topk_method") == "noaux_tc":
            yield f"{at}.mlp.gate.e_score_correction_bias", "F32", (count,)
        yield from _experts(f"{at}.mlp", count, hidden, width, decoder.scheme)
        yield from _mlp(f"{at}.mlp.shared_experts", hidden, width * text["n_shared_experts"], scheme)
    yield from _norms(at, hidden, "input_layernorm", "post_attention_layernorm")
    if index >= text["num_hidden_layers"]:
        yield from _speculation(text, at)


def _speculation(text: Mapping[str, Any], at: str) -> Iterator[TensorShape]:
    """Yields the additional tensors of a layer for multi-token prediction."""
    hidden, vocab = text["hidden_size"], text["vocab_size"]
    yield from _norms(at, hidden, "enorm", "hnorm", "shared_head.norm")
    yield from linear(f"{at}.eh_proj", hidden, 2 * hidden, PLAIN)
    yield f"{at}.embed_tokens.weight", "BF16", (vocab, hidden)
    yield f"{at}.shared_head.head.weight", "BF16", (vocab, hidden)


def _gpt_oss(decoder: Decoder, index: int, at: str) -> Iterator[TensorShape]:
    text = decoder.text
    hidden, width, count = text["hidden_size"], text["intermediate_size"], text["num_local_experts"]
    yield from _attention(decoder, f"{at}.self_attn")
    yield f"{at}.self_attn.sinks", "BF16", (text["num_attention_heads"],)
    yield from linear(f"{at}.mlp.router", count, hidden, PLAIN, bias=True)
    for name, out, into in (("gate_up_proj", 2 * width, hidden), ("down_proj", hidden, width)):
        yield f"{at}.mlp.experts.{name}_blocks", "U8", (count, out, into // 32, 16)
        yield f"{at}.mlp.experts.{name}_scales", "U8", (count, out, into // 32)
        yield f"{at}.mlp.experts.{name}_bias", "BF16", (count, out)
    yield from _norms(at, hidden, "input_layernorm", "post_attention_layernorm")


def _llama4(decoder: Decoder, index: int, at: str) -> Iterator[TensorShape]:
    text = decoder.text
    hidden, width, count = text["hidden_size"], text["intermediate_size"], text["num_local_experts"]
    yield from _attention(decoder, f"{at}.self_attn")
    if (index + 1) % text["interleave_moe_layer_step"] == 0:
        yield from linear(f"{at}.feed_forward.router", count, hidden, PLAIN)
        yield f"{at}.feed_forward.experts.gate_up_proj", "BF16", (count, hidden, 2 * width)
        yield f"{at}.feed_forward.experts.down_proj", "BF16", (count, width, hidden)
        yield from _mlp(f"{at}.feed_forward.shared_expert", hidden, width, decoder.dense)
    else:
        yield from _mlp(f"{at}.feed_forward", hidden, text["intermediate_size_mlp"], decoder.dense)
    yield from _norms(at, hidden, "input_layernorm", "post_attention_layernorm")


def _qwen3_next(decoder: Decoder, index: int, at: str) -> Iterator[TensorShape]:
    text, scheme = decoder.text, decoder.dense
    hidden = text["hidden_size"]
    keys = text["linear_num_key_heads"] * text["linear_key_head_dim"]
    heads = text["linear_num_value_heads"]
    values = heads * text["linear_value_head_dim"]
    if (index + 1) % text.get("full_attention_interval", 4) == 0:
        yield from _attention(decoder, f"{at}.self_attn", gate=True, norms="head")
    else:
        linear_at = f"{at}.linear_attn"
        if text["model_type"] == "qwen3_next":
            yield from linear(f"{linear_at}.in_proj_qkvz", 2 * keys + 2 * values, hidden, scheme)
            yield from linear(f"{linear_at}.in_proj_ba", 2 * heads, hidden, PLAIN)
        else:
            yield from linear(f"{linear_at}.in_proj_qkv", 2 * keys + values, hidden, scheme)
            yield from linear(f"{linear_at}.in_proj_z", values, hidden, scheme)
            yield from linear(f"{linear_at}.in_proj_b", heads, hidden, PLAIN)
            yield from linear(f"{linear_at}.in_proj_a", heads, hidden, PLAIN)
        yield f"{linear_at}.conv1d.weight", "BF16", (2 * keys + values, 1, text["linear_conv_kernel_dim"])
        yield f"{linear_at}.A_log", "F32", (heads,)
        yield f"{linear_at}.dt_bias", "BF16", (heads,)
        yield f"{linear_at}.norm.weight", "F32", (text["linear_value_head_dim"],)
        yield from linear(f"{linear_at}.out_proj", hidden, values, scheme)
    if "num_experts" in text:
        count, width = text["num_experts"], text["moe_intermediate_size"]
        yield from linear(f"{at}.mlp.gate", count, hidden, PLAIN)
        yield from _experts(f"{at}.mlp", count, hidden, width, decoder.scheme)
        yield from _mlp(f"{at}.mlp.shared_expert", hidden, text["shared_expert_intermediate_size"], scheme)
        yield from linear(f"{at}.mlp.shared_expert_gate", 1, hidden, PLAIN)
    else:
        yield from _mlp(f"{at}.mlp", hidden, text["intermediate_size"], scheme)
    yield from _norms(at, hidden, "input_layernorm", "post_attention_layernorm")


def _mamba2(
    text: Mapping[str, Any], at: str, heads: int, width: int, groups: int, state: int
) -> Iterator[TensorShape]:
    hidden, inner = text["hidden_size"], heads * width
    conv = inner + 2 * groups * state
    kernel = text.get("conv_kernel") or text["mamba_d_conv"]
    yield from linear(f"{at}.in_proj", inner + conv + heads, hidden, PLAIN)
    yield f"{at}.conv1d.weight", "BF16", (conv, 1, kernel)
    yield f"{at}.conv1d.bias", "BF16", (conv,)
    for name in ("A_log", "D", "dt_bias"):
        yield f"{at}.{name}", "BF16", (heads,)
    yield from _norms(at, inner, "norm")
    yield from linear(f"{at}.out_proj", hidden, inner, PLAIN)


def _nemotron_h(decoder: Decoder, index: int, at: str) -> Iterator[TensorShape]:
    text, hidden = decoder.text, decoder.text["hidden_size"]
    yield from _norms(at, hidden, "norm")
    letter, mixer = text["hybrid_override_pattern"][index], f"{at}.mixer"
    if letter == "M":
        sizes = (text["mamba_num_heads"], text["mamba_head_dim"], text["n_groups"], text["ssm_state_size"])
        yield from _mamba2(text, mixer, *sizes)
    elif letter == "*":
        yield from _attention(decoder, mixer)
    elif letter == "E":
        count, width = text["n_routed_experts"], text["moe_intermediate_size"]
        yield from linear(f"{mixer}.gate", count, hidden, PLAIN)
        yield f"{mixer}.gate.e_score_correction_bias", "F32", (count,)
        for expert in range(count):
            yield from linear(f"{mixer}.experts.{expert}.up_proj", width, hidden, decoder.scheme)
            yield from linear(f"{mixer}.experts.{expert}.down_proj", hidden, width, decoder.scheme)
        shared = text["moe_shared_expert_intermediate_size"]
        yield from linear(f"{mixer}.shared_experts.up_proj", shared, hidden, decoder.dense)
        yield from linear(f"{mixer}.shared_experts.down_proj", hidden, shared, decoder.dense)
    else:
        yield from linear(f"{mixer}.up_proj", text["intermediate_size"], hidden, decoder.dense)
        yield from linear(f"{mixer}.down_proj", hidden, text["intermediate_size"], decoder.dense)


def _granite_hybrid(decoder: Decoder, index: int, at: str) -> Iterator[TensorShape]:
    text, hidden = decoder.text, decoder.text["hidden_size"]
    if text["layer_types"][index] == "mamba":
        sizes = (text["mamba_n_heads"], text["mamba_d_head"], text["mamba_n_groups"], text["mamba_d_state"])
        yield from _mamba2(text, f"{at}.mamba", *sizes)
    else:
        yield from _attention(decoder, f"{at}.self_attn")
    if count := text["num_local_experts"]:
        width = text["intermediate_size"]
        yield f"{at}.block_sparse_moe.input_linear.weight", "BF16", (count, 2 * width, hidden)
        yield f"{at}.block_sparse_moe.output_linear.weight", "BF16", (count, hidden, width)
        yield from linear(f"{at}.block_sparse_moe.router.layer", count, hidden, PLAIN)
    shared = text["shared_intermediate_size"]
    yield from linear(f"{at}.shared_mlp.input_linear", 2 * shared, hidden, decoder.dense)
    yield from linear(f"{at}.shared_mlp.output_linear", hidden, shared, decoder.dense)
    yield from _norms(at, hidden, "input_layernorm", "post_attention_layernorm")


def consolidated_tensors(text: Mapping[str, Any]) -> Iterator[TensorShape]:
    """Yields the tensors of a model in Mistral's own file format.

    Args:
        text: its params.json.
    """
    hidden, width, head_dim = text["dim"], text["hidden_dim"], text["head_dim"]
    yield "tok_embeddings.weight", "BF16", (text["vocab_size"], hidden)
    for index in range(text["n_layers"]):
        at = f"layers.{index}"
        for name, heads in (("wq", text["n_heads"]), ("wk", text["n_kv_heads"]), ("wv", text["n_kv_heads"])):
            yield f"{at}.attention.{name}.weight", "BF16", (heads * head_dim, hidden)
        yield f"{at}.attention.wo.weight", "BF16", (hidden, text["n_heads"] * head_dim)
        yield f"{at}.feed_forward.w1.weight", "BF16", (width, hidden)
        yield f"{at}.feed_forward.w2.weight", "BF16", (hidden, width)
        yield f"{at}.feed_forward.w3.weight", "BF16", (width, hidden)
        yield from _norms(at, hidden, "attention_norm", "ffn_norm")
    yield "norm.weight", "BF16", (hidden,)
    yield "output.weight", "BF16", (text["vocab_size"], hidden)


Family = Callable[[Decoder, int, str], Iterator[TensorShape]]
FAMILIES: Mapping[str, Family] = {
    "llama": _llama,
    "mistral": _llama,
    "qwen2": _llama,
    "qwen2_5_vl_text": _llama,
    "qwen3": _llama,
    "qwen3_vl_text": _llama,
    "olmo2": _olmo2,
    "olmo3": _olmo2,
    "phi3": _phi3,
    "gemma2": _gemma,
    "gemma3_text": _gemma,
    "mixtral": _mixtral,
    "minimax_m2": _mixtral,
    "qwen3_moe": _qwen3_moe,
    "glm4_moe": _glm4_moe,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "deepseek_v32": _deepseek,
    "kimi_k2": _deepseek,
    "gpt_oss": _gpt_oss,
    "llama4_text": _llama4,
    "qwen3_next": _qwen3_next,
    "qwen3_5_moe_text": _qwen3_next,
    "qwen3_5_text": _qwen3_next,
    "nemotron_h": _nemotron_h,
    "granitemoehybrid": _granite_hybrid,
}
"""The tensors of one layer by model type."""
