"""Lists models published in 2026: their config.json (`of_2026`), and names, types and sizes of their tensors.

The numbers are from public sources. No checkpoint was downloaded: names of tensors are those that vLLM's
classes read, and sizes without a source are assumed (encoders without numbers, tables of n-grams).
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any, Final

from heteroinfer_contract.model import Scheme, SchemeName
from tests.shapes.corpus import Shape
from tests.shapes.decoders import (
    FAMILIES,
    PLAIN,
    Decoder,
    _attention,
    _deepseek,
    _experts,
    _mlp,
    _nemotron_h,
    _norms,
    _qwen3_next,
    decoder_tensors,
)
from tests.shapes.encoders import ENCODERS
from tests.shapes.linears import TensorShape, linear

_FOLDER: Final = Path(__file__).parent / "of_2026"
_BLOCKS: Final = Scheme(name=SchemeName.FP8_BLOCK, bits=8, group=128)
_KIMI: Final = Scheme(name=SchemeName.INT4, bits=4, group=32)


class Shape2026(Shape):
    """A shape of 2026.

    If no older family has the names of its layers, a separate function yields their tensors.
    """

    def tensors(self) -> Iterator[TensorShape]:
        """Yields all tensors of its checkpoint."""
        text = self.config.get("text_config", self.config)
        writer = _LAYERS.get(text["model_type"])
        if text["model_type"] == "deepseek_v4":
            yield from _deepseek_v4(text)
            return
        mtp = text.get("num_nextn_predict_layers", 0) if writer is None else 0
        text = {"first_k_dense_replace": 0, **text, "num_nextn_predict_layers": mtp}
        scheme = _KIMI if self.experts_only else _BLOCKS if "quantization_config" in self.config else PLAIN
        decoder = Decoder(
            text=text, scheme=scheme, experts_only=self.experts_only, prefix=self.prefix, head=self.head
        )
        yield from _decoder(decoder, writer or FAMILIES[_ALIKE.get(text["model_type"], text["model_type"])])
        if "vision_config" in self.config:
            yield from _encoder(self.config["vision_config"], text["hidden_size"])


Layer = Callable[[Decoder, int, str], Iterator[TensorShape]]


def _decoder(decoder: Decoder, layer: Layer) -> Iterator[TensorShape]:
    """Yields the tensors of a decoder. `layer` yields those of one layer."""
    written = {FAMILIES[name]: name for name in FAMILIES}.get(layer)
    if written is not None:
        named = {**decoder.text, "model_type": written}
        yield from decoder_tensors(replace(decoder, text=named))
        return
    text, prefix = decoder.text, decoder.prefix
    vocab, hidden = text["vocab_size"], text["hidden_size"]
    yield f"{prefix}.embed_tokens.weight", "BF16", (vocab, hidden)
    for index in range(text["num_hidden_layers"]):
        yield from layer(decoder, index, f"{prefix}.layers.{index}")
    yield f"{prefix}.norm.weight", "BF16", (hidden,)
    if not text.get("tie_word_embeddings"):
        yield f"{decoder.head}.weight", "BF16", (vocab, hidden)


def _encoder(vision: Mapping[str, Any], hidden: int) -> Iterator[TensorShape]:
    """Yields the tensors of an encoder, with the sizes of Qwen3-VL if no source has others."""
    if vision.get("model_type") == "pixtral":
        yield from ENCODERS["pixtral"](vision, hidden)
        return
    sizes = {"hidden_size": 1152, "intermediate_size": 4304, "patch_size": 16}
    known = {key: vision[key] for key in sizes if key in vision}
    layers = vision.get("depth") or vision.get("num_hidden_layers") or vision.get("vt_num_hidden_layers")
    alike: dict[str, Any] = {
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [],
        "depth": layers or 27,
    }
    yield from ENCODERS["qwen3_vl"]({**sizes, **alike, **known}, hidden)


def _gemma4(decoder: Decoder, index: int, at: str) -> Iterator[TensorShape]:
    text, hidden = dict(decoder.text), decoder.text["hidden_size"]
    if text["layer_types"][index] == "full_attention":
        text["head_dim"] = text["global_head_dim"]
        text["num_key_value_heads"] = text["num_global_key_value_heads"]
    own = replace(decoder, text=text)
    for name, dtype, shape in _attention(own, f"{at}.self_attn", norms="head"):
        if ".v_proj." not in name or text["head_dim"] == decoder.text["head_dim"]:
            yield name, dtype, shape
    yield from _mlp(f"{at}.mlp", hidden, text["intermediate_size"], PLAIN)
    if text["enable_moe_block"]:
        count, width = text["num_experts"], text["moe_intermediate_size"]
        yield from linear(f"{at}.router.proj", count, hidden, PLAIN)
        yield f"{at}.experts.gate_up_proj", "BF16", (count, 2 * width, hidden)
        yield f"{at}.experts.down_proj", "BF16", (count, hidden, width)
    yield from _norms(at, hidden, "input_layernorm", "post_attention_layernorm")
    yield from _norms(at, hidden, "pre_feedforward_layernorm", "post_feedforward_layernorm")


def _hy_v3(decoder: Decoder, index: int, at: str) -> Iterator[TensorShape]:
    text, hidden = decoder.text, decoder.text["hidden_size"]
    yield from _attention(decoder, f"{at}.self_attn", norms="head")
    if index < text["first_k_dense_replace"]:
        yield from _mlp(f"{at}.mlp", hidden, text["intermediate_size"], PLAIN)
    else:
        count, width = text["num_experts"], text["moe_intermediate_size"]
        yield from linear(f"{at}.mlp.router.gate", count, hidden, PLAIN)
        yield f"{at}.mlp.expert_bias", "F32", (count,)
        yield from _experts(f"{at}.mlp", count, hidden, width, PLAIN)
        yield from _mlp(f"{at}.mlp.shared_mlp", hidden, width, PLAIN)
    yield from _norms(at, hidden, "input_layernorm", "post_attention_layernorm")


def _laguna(decoder: Decoder, index: int, at: str) -> Iterator[TensorShape]:
    text, hidden = decoder.text, decoder.text["hidden_size"]
    yield from _attention(decoder, f"{at}.self_attn", norms="head")
    yield from linear(f"{at}.self_attn.g_proj", text["num_attention_heads"], hidden, PLAIN)
    if text["mlp_layer_types"][index] == "dense":
        yield from _mlp(f"{at}.mlp", hidden, text["intermediate_size"], PLAIN)
    else:
        count, width = text["num_experts"], text["moe_intermediate_size"]
        yield from linear(f"{at}.mlp.gate", count, hidden, PLAIN)
        yield f"{at}.mlp.experts.e_score_correction_bias", "F32", (count,)
        yield from _experts(f"{at}.mlp", count, hidden, width, PLAIN)
        yield from _mlp(f"{at}.mlp.shared_expert", hidden, text["shared_expert_intermediate_size"], PLAIN)
    yield from _norms(at, hidden, "input_layernorm", "post_attention_layernorm")


def _mimo_v2(decoder: Decoder, index: int, at: str) -> Iterator[TensorShape]:
    """Yields a layer with fused queries, keys and values, and with experts in MXFP4."""
    text, hidden = decoder.text, decoder.text["hidden_size"]
    own = "swa_" if text["hybrid_layer_pattern"][index] else ""
    heads, kv_heads = text["num_attention_heads"], text[f"{own}num_key_value_heads"]
    key, value = text[f"{own}head_dim"], text[f"{own}v_head_dim"]
    qkv = heads * key + kv_heads * (key + value)
    yield from linear(f"{at}.self_attn.qkv_proj", qkv, hidden, decoder.scheme)
    yield from linear(f"{at}.self_attn.o_proj", hidden, heads * value, PLAIN)
    if not text["moe_layer_freq"][index]:
        yield from _mlp(f"{at}.mlp", hidden, text["intermediate_size"], decoder.scheme)
    else:
        count, width = text["n_routed_experts"], text["moe_intermediate_size"]
        yield from linear(f"{at}.mlp.gate", count, hidden, PLAIN)
        yield f"{at}.mlp.gate.e_score_correction_bias", "F32", (count,)
        for expert in range(count):
            for name, out, into in (("gate", width, hidden), ("up", width, hidden), ("down", hidden, width)):
                linear_at = f"{at}.mlp.experts.{expert}.{name}_proj"
                yield f"{linear_at}.weight", "U8", (out, into // 2)
                yield f"{linear_at}.weight_scale", "U8", (out, into // 32)
    yield from _norms(at, hidden, "input_layernorm", "post_attention_layernorm")


def _minimax_m3(decoder: Decoder, index: int, at: str) -> Iterator[TensorShape]:
    text, hidden = decoder.text, decoder.text["hidden_size"]
    yield from _attention(decoder, f"{at}.self_attn", norms="head")
    sparse = text["sparse_attention_config"]
    if sparse["sparse_attention_freq"][index]:
        width, heads = sparse["sparse_index_dim"], sparse["sparse_num_index_heads"]
        yield from linear(f"{at}.self_attn.index_q_proj", heads * width, hidden, PLAIN)
        yield from linear(f"{at}.self_attn.index_k_proj", width, hidden, PLAIN)
    if not text["moe_layer_freq"][index]:
        yield from _mlp(f"{at}.mlp", hidden, text["dense_intermediate_size"], PLAIN)
    else:
        count, width = text["num_local_experts"], text["intermediate_size"]
        moe = f"{at}.block_sparse_moe"
        yield from linear(f"{moe}.gate", count, hidden, PLAIN)
        yield f"{moe}.e_score_correction_bias", "F32", (count,)
        for expert in range(count):
            for name, out, into in (("w1", width, hidden), ("w2", hidden, width), ("w3", width, hidden)):
                yield f"{moe}.experts.{expert}.{name}.weight", "BF16", (out, into)
        yield from _mlp(f"{moe}.shared_experts", hidden, text["shared_intermediate_size"], PLAIN)
    yield from _norms(at, hidden, "input_layernorm", "post_attention_layernorm")


def _nemotron_3(decoder: Decoder, index: int, at: str) -> Iterator[TensorShape]:
    """Yields a layer of Nemotron-H, whose experts compute on a latent of the residual stream."""
    text, latent = decoder.text, decoder.text["moe_latent_size"]
    if text["hybrid_override_pattern"][index] != "E":
        yield from _nemotron_h(decoder, index, at)
        return
    hidden, width, mixer = text["hidden_size"], text["moe_intermediate_size"], f"{at}.mixer"
    count, shared = text["n_routed_experts"], text["moe_shared_expert_intermediate_size"]
    yield from _norms(at, hidden, "norm")
    yield from linear(f"{mixer}.gate", count, hidden, PLAIN)
    yield f"{mixer}.gate.e_score_correction_bias", "F32", (count,)
    yield from linear(f"{mixer}.fc1_latent_proj", latent, hidden, PLAIN)
    yield from linear(f"{mixer}.fc2_latent_proj", hidden, latent, PLAIN)
    for expert in range(count):
        yield from linear(f"{mixer}.experts.{expert}.up_proj", width, latent, PLAIN)
        yield from linear(f"{mixer}.experts.{expert}.down_proj", latent, width, PLAIN)
    yield from linear(f"{mixer}.shared_experts.up_proj", shared, hidden, PLAIN)
    yield from linear(f"{mixer}.shared_experts.down_proj", hidden, shared, PLAIN)


def _step3p5(decoder: Decoder, index: int, at: str) -> Iterator[TensorShape]:
    text, hidden = decoder.text, decoder.text["hidden_size"]
    is_full = text["layer_types"][index] == "full_attention"
    own = text if is_full else {**text, **text["attention_other_setting"]}
    own = {**own, "num_key_value_heads": own["num_attention_groups"]}
    yield from _attention(replace(decoder, text=own), f"{at}.self_attn", norms="head")
    yield from linear(f"{at}.self_attn.g_proj", own["num_attention_heads"], hidden, PLAIN)
    if str(index) not in text["moe_layers_enum"].split(","):
        yield from _mlp(f"{at}.mlp", hidden, text["intermediate_size"], PLAIN)
    else:
        count, width = text["moe_num_experts"], text["moe_intermediate_size"]
        yield from linear(f"{at}.moe.gate", count, hidden, PLAIN)
        yield f"{at}.moe.router_bias", "F32", (count,)
        yield f"{at}.moe.gate_proj.weight", "BF16", (count, width, hidden)
        yield f"{at}.moe.up_proj.weight", "BF16", (count, width, hidden)
        yield f"{at}.moe.down_proj.weight", "BF16", (count, hidden, width)
        yield from _mlp(f"{at}.share_expert", hidden, text["share_expert_dim"], PLAIN)
    yield from _norms(at, hidden, "input_layernorm", "post_attention_layernorm")


def _qwen4(decoder: Decoder, index: int, at: str) -> Iterator[TensorShape]:
    """Yields a layer of Qwen3-Next with an indexer and residual streams. One layer has the n-grams' table."""
    text, hidden = decoder.text, decoder.text["hidden_size"]
    yield from _qwen3_next(decoder, index, at)
    if text["layer_types"][index] == "full_attention":
        width = (text["indexer_n_heads"] + text["indexer_kv_heads"]) * text["indexer_head_dim"]
        yield from linear(f"{at}.self_attn.indexer.index_qk_proj", width, hidden, PLAIN)
    streams, rank = text["hc_count"] * hidden, text["hc_lowrank"]
    for name in ("attn", "mlp"):
        connection = f"{at}.{name}_hyper_connection"
        yield from linear(f"{connection}.input_mix_weight_down", rank, streams, PLAIN)
        yield from linear(f"{connection}.input_mix_weight_up", streams, rank, PLAIN)
    if index == 1:
        rows = _NGRAM_ROWS // _NGRAM_SHARDS
        width = hidden // _NGRAM_HEADS
        for shard in range(_NGRAM_SHARDS):
            yield f"{at}.ple.ple_embedding.ngram_embedding.shard_{shard}.weight", "BF16", (rows, width)


_NGRAM_SHARDS: Final = 512
_NGRAM_HEADS: Final = 16
_NGRAM_ROWS: Final = 16 * 20_000_256
"""Two orders of n-grams with 8 heads each, and about 20,000,000 rows: 51 billion weights in all."""


def _glm5_next(decoder: Decoder, index: int, at: str) -> Iterator[TensorShape]:
    text, hidden = {**decoder.text, "index_n_heads": 32}, decoder.text["hidden_size"]
    if text["layer_types"][index] == "deepseek_sparse_attention":
        yield from _deepseek(replace(decoder, text=text), index, at)
        return
    linear_at, width = f"{at}.self_attn", text["linear_num_value_heads"] * 128
    for name in ("q_proj", "k_proj", "v_proj"):
        yield from linear(f"{linear_at}.{name}", width, hidden, decoder.scheme)
    for name in ("f", "g"):
        yield from linear(f"{linear_at}.{name}_a_proj", 128, hidden, PLAIN)
        yield from linear(f"{linear_at}.{name}_b_proj", width, 128, PLAIN)
    yield from linear(f"{linear_at}.o_proj", hidden, width, decoder.scheme)
    if index < text["first_k_dense_replace"]:
        yield from _mlp(f"{at}.mlp", hidden, text["intermediate_size"], decoder.scheme)
    else:
        count, inner = text["n_routed_experts"], text["moe_intermediate_size"]
        yield from linear(f"{at}.mlp.gate", count, hidden, PLAIN)
        yield f"{at}.mlp.gate.e_score_correction_bias", "F32", (count,)
        yield from _experts(f"{at}.mlp", count, hidden, inner, decoder.scheme)
        yield from _mlp(f"{at}.mlp.shared_experts", hidden, inner, decoder.scheme)
    yield from _norms(at, hidden, "input_layernorm", "post_attention_layernorm")


def _inkling(decoder: Decoder, index: int, at: str) -> Iterator[TensorShape]:
    text, hidden = decoder.text, decoder.text["hidden_size"]
    heads, kv_heads, width = text["num_attention_heads"], text["num_key_value_heads"], text["head_dim"]
    for name, out in (("wq_du", heads), ("wk_dv", kv_heads), ("wv_dv", kv_heads), ("wr_du", heads)):
        yield from linear(f"{at}.attn.{name}", out * width, hidden, PLAIN)
    yield from linear(f"{at}.attn.wo_ud", hidden, heads * width, PLAIN)
    count, inner = text["n_routed_experts"], text["moe_intermediate_size"]
    yield from linear(f"{at}.mlp.gate", count, hidden, PLAIN)
    yield f"{at}.mlp.experts.w13_weight", "BF16", (count, 2 * inner, hidden)
    yield f"{at}.mlp.experts.w2_weight", "BF16", (count, hidden, inner)
    yield from _mlp(f"{at}.mlp.shared_experts", hidden, text["shared_expert_intermediate_size"], PLAIN)
    yield from _norms(at, hidden, "attn_norm", "mlp_norm")


def _deepseek_v4(text: Mapping[str, Any]) -> Iterator[TensorShape]:
    """Yields the tensors of DeepSeek-V4: FP8 in blocks, and experts in MXFP4."""
    hidden, heads, width = text["hidden_size"], text["num_attention_heads"], text["head_dim"]
    q_rank, o_rank, groups = text["q_lora_rank"], text["o_lora_rank"], text["o_groups"]
    count, inner = text["n_routed_experts"], text["moe_intermediate_size"]
    yield "embed.weight", "BF16", (text["vocab_size"], hidden)
    for index in range(text["num_hidden_layers"]):
        at, ratio = f"layers.{index}", text["compress_ratios"][index]
        sizes = [("wq_a", q_rank, hidden), ("wq_b", heads * width, q_rank), ("wkv", width, hidden)]
        sizes += [("wo_a", groups * o_rank, heads * width // groups), ("wo_b", hidden, groups * o_rank)]
        yield from _fp8(f"{at}.attn", sizes)
        if ratio:
            yield from linear(f"{at}.attn.compressor.wkv", 2 * width, hidden, PLAIN)
            yield from linear(f"{at}.attn.compressor.wgate", 2 * width, hidden, PLAIN)
        if ratio == 4:
            index_width = text["index_n_heads"] * text["index_head_dim"]
            yield from _fp8(f"{at}.attn.indexer", [("wq_b", index_width, q_rank)])
        yield from linear(f"{at}.ffn.gate", count, hidden, PLAIN)
        for expert in range(count):
            for name, out, into in (("w1", inner, hidden), ("w2", hidden, inner), ("w3", inner, hidden)):
                yield f"{at}.ffn.experts.{expert}.{name}.weight", "I8", (out, into // 2)
                yield f"{at}.ffn.experts.{expert}.{name}.scale", "F8_E8M0", (out, into // 32)
        shared = [("w1", inner, hidden), ("w2", hidden, inner), ("w3", inner, hidden)]
        yield from _fp8(f"{at}.ffn.shared_experts", shared)
        yield from _norms(at, hidden, "attn_norm", "ffn_norm")
    yield "norm.weight", "BF16", (hidden,)
    yield "head.weight", "BF16", (text["vocab_size"], hidden)


def _fp8(at: str, sizes: list[tuple[str, int, int]]) -> Iterator[TensorShape]:
    for name, out, into in sizes:
        yield f"{at}.{name}.weight", "F8_E4M3", (out, into)
        yield f"{at}.{name}.scale", "F8_E8M0", (ceil(out / 128), ceil(into / 128))


_ALIKE: Final = {"glm_moe_dsa": "deepseek_v32", "glm4_moe_lite": "deepseek_v3", "mistral4": "deepseek_v3"}
"""Model types whose layers have the names of an older type."""
_LAYERS: Final[Mapping[str, Layer | None]] = {
    "gemma4_text": _gemma4,
    "glm5_next_text": _glm5_next,
    "hy_v3": _hy_v3,
    "inkling_text": _inkling,
    "laguna": _laguna,
    "mimo_v2": _mimo_v2,
    "minimax_m3_text": _minimax_m3,
    "nemotron_h": _nemotron_3,
    "qwen4_exp_text": _qwen4,
    "step3p5": _step3p5,
}
_PREFIXES: Final = {"KimiK25ForConditionalGeneration": "language_model.model"}
_WRAPPED: Final = "model.language_model"


def _shape(path: Path) -> Shape2026:
    config = json.loads(path.read_text())
    architecture = config["architectures"][0]
    wrapped = _WRAPPED if "text_config" in config else "model"
    prefix = "backbone" if architecture == "NemotronHForCausalLM" else _PREFIXES.get(architecture, wrapped)
    return Shape2026(
        name=path.stem,
        config=config,
        prefix=prefix,
        head="language_model.lm_head" if architecture in _PREFIXES else "lm_head",
        experts_only=architecture == "KimiK25ForConditionalGeneration",
    )


SHAPES_2026: Final = tuple(_shape(path) for path in sorted(_FOLDER.glob("*.json")))
