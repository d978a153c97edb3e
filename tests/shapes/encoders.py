"""Yields the tensors of published encoders and their projections with their checkpoints' names."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from heteroinfer_contract.model import Scheme
from tests.shapes.linears import TensorShape, linear

PLAIN = Scheme()
Config = Mapping[str, Any]


def _norm(at: str, size: int, *, bias: bool = True) -> Iterator[TensorShape]:
    yield f"{at}.weight", "BF16", (size,)
    if bias:
        yield f"{at}.bias", "BF16", (size,)


def _linears(at: str, *sizes: tuple[str, int, int], bias: bool = True) -> Iterator[TensorShape]:
    for name, out, into in sizes:
        yield from linear(f"{at}.{name}", out, into, PLAIN, bias=bias)


def _pixtral(vision: Config, hidden: int) -> Iterator[TensorShape]:
    size, width, patch = vision["hidden_size"], vision["intermediate_size"], vision["patch_size"]
    yield "vision_tower.patch_conv.weight", "BF16", (size, 3, patch, patch)
    yield from _norm("vision_tower.ln_pre", size, bias=False)
    for index in range(vision["num_hidden_layers"]):
        at = f"vision_tower.transformer.layers.{index}"
        projections = [(f"attention.{name}_proj", size, size) for name in "qkvo"]
        mlp = [("feed_forward.gate_proj", width, size), ("feed_forward.up_proj", width, size)]
        yield from _linears(at, *projections, *mlp, ("feed_forward.down_proj", size, width), bias=False)
        yield from _norm(f"{at}.attention_norm", size, bias=False)
        yield from _norm(f"{at}.ffn_norm", size, bias=False)
    at = "multi_modal_projector"
    yield from _norm(f"{at}.norm", size, bias=False)
    merge = ("patch_merger.merging_layer", size, 4 * size)
    yield from _linears(at, merge, ("linear_1", hidden, size), ("linear_2", hidden, hidden), bias=False)


def _siglip(vision: Config, hidden: int) -> Iterator[TensorShape]:
    size, width, patch = vision["hidden_size"], vision["intermediate_size"], vision["patch_size"]
    at = "vision_tower.vision_model"
    yield f"{at}.embeddings.patch_embedding.weight", "BF16", (size, 3, patch, patch)
    yield f"{at}.embeddings.patch_embedding.bias", "BF16", (size,)
    yield f"{at}.embeddings.position_embedding.weight", "BF16", ((vision["image_size"] // patch) ** 2, size)
    for index in range(vision["num_hidden_layers"]):
        layer = f"{at}.encoder.layers.{index}"
        projections = [
            (f"self_attn.{name}", size, size) for name in ("q_proj", "k_proj", "v_proj", "out_proj")
        ]
        yield from _linears(layer, *projections, ("mlp.fc1", width, size), ("mlp.fc2", size, width))
        yield from _norm(f"{layer}.layer_norm1", size)
        yield from _norm(f"{layer}.layer_norm2", size)
    yield from _norm(f"{at}.post_layernorm", size)
    yield "multi_modal_projector.mm_input_projection_weight", "BF16", (size, hidden)
    yield from _norm("multi_modal_projector.mm_soft_emb_norm", size, bias=False)


def _qwen2_5_vl(vision: Config, hidden: int) -> Iterator[TensorShape]:
    size, width, patch = vision["hidden_size"], vision["intermediate_size"], vision["patch_size"]
    yield "visual.patch_embed.proj.weight", "BF16", (size, 3, 2, patch, patch)
    for index in range(vision["depth"]):
        at = f"visual.blocks.{index}"
        yield from _linears(at, ("attn.qkv", 3 * size, size), ("attn.proj", size, size))
        mlp = (("mlp.gate_proj", width, size), ("mlp.up_proj", width, size), ("mlp.down_proj", size, width))
        yield from _linears(at, *mlp)
        yield from _norm(f"{at}.norm1", size, bias=False)
        yield from _norm(f"{at}.norm2", size, bias=False)
    yield from _norm("visual.merger.ln_q", size, bias=False)
    yield from _linears("visual.merger.mlp", ("0", 4 * size, 4 * size), ("2", hidden, 4 * size))


def _qwen3_vl(vision: Config, hidden: int) -> Iterator[TensorShape]:
    size, width, patch = vision["hidden_size"], vision["intermediate_size"], vision["patch_size"]
    top = "model.visual"
    yield f"{top}.patch_embed.proj.weight", "BF16", (size, 3, 2, patch, patch)
    yield f"{top}.patch_embed.proj.bias", "BF16", (size,)
    yield f"{top}.pos_embed.weight", "BF16", (vision["num_position_embeddings"], size)
    for index in range(vision["depth"]):
        at = f"{top}.blocks.{index}"
        yield from _linears(at, ("attn.qkv", 3 * size, size), ("attn.proj", size, size))
        yield from _linears(at, ("mlp.linear_fc1", width, size), ("mlp.linear_fc2", size, width))
        yield from _norm(f"{at}.norm1", size)
        yield from _norm(f"{at}.norm2", size)
    mergers = [(f"{top}.merger", size)]
    mergers += [
        (f"{top}.deepstack_merger_list.{i}", 4 * size) for i in range(len(vision["deepstack_visual_indexes"]))
    ]
    for at, normed in mergers:
        yield from _norm(f"{at}.norm", normed)
        yield from _linears(at, ("linear_fc1", 4 * size, 4 * size), ("linear_fc2", hidden, 4 * size))


def _llama4(vision: Config, hidden: int) -> Iterator[TensorShape]:
    size, width, patch = vision["hidden_size"], vision["intermediate_size"], vision["patch_size"]
    top, patches = "vision_model", (vision["image_size"] // patch) ** 2 + 1
    yield f"{top}.class_embedding", "BF16", (size,)
    yield f"{top}.positional_embedding_vlm", "BF16", (patches, size)
    yield from linear(f"{top}.patch_embedding.linear", size, 3 * patch * patch, PLAIN)
    for index in range(vision["num_hidden_layers"]):
        at = f"{top}.model.layers.{index}"
        projections = [(f"self_attn.{name}_proj", size, size) for name in "qkvo"]
        yield from _linears(at, *projections, ("mlp.fc1", width, size), ("mlp.fc2", size, width))
        yield from _norm(f"{at}.input_layernorm", size)
        yield from _norm(f"{at}.post_attention_layernorm", size)
    yield from _norm(f"{top}.layernorm_pre", size)
    yield from _norm(f"{top}.layernorm_post", size)
    out = vision["projector_output_dim"]
    mlp = (("fc1", vision["projector_input_dim"], width), ("fc2", out, vision["projector_input_dim"]))
    yield from _linears(f"{top}.vision_adapter.mlp", *mlp, bias=False)
    yield from linear("multi_modal_projector.linear_1", hidden, vision["vision_output_dim"], PLAIN)


def _intern_vit(vision: Config, hidden: int) -> Iterator[TensorShape]:
    size, width, patch = vision["hidden_size"], vision["intermediate_size"], vision["patch_size"]
    top, patches = "vision_model", (vision["image_size"] // patch) ** 2 + 1
    yield f"{top}.embeddings.class_embedding", "BF16", (1, 1, size)
    yield f"{top}.embeddings.position_embedding", "BF16", (1, patches, size)
    yield f"{top}.embeddings.patch_embedding.weight", "BF16", (size, 3, patch, patch)
    yield f"{top}.embeddings.patch_embedding.bias", "BF16", (size,)
    for index in range(vision["num_hidden_layers"]):
        at = f"{top}.encoder.layers.{index}"
        yield from linear(f"{at}.attn.qkv", 3 * size, size, PLAIN, bias=vision["qkv_bias"])
        yield from _linears(at, ("attn.proj", size, size), ("mlp.fc1", width, size), ("mlp.fc2", size, width))
        yield from _norm(f"{at}.norm1", size)
        yield from _norm(f"{at}.norm2", size)
        for name in ("ls1", "ls2"):
            yield f"{at}.{name}", "BF16", (size,)
    yield from _norm("mlp1.0", 4 * size)
    yield from _linears("mlp1", ("1", hidden, 4 * size), ("3", hidden, hidden))


ENCODERS: Mapping[str, Callable[[Config, int], Iterator[TensorShape]]] = {
    "pixtral": _pixtral,
    "siglip_vision_model": _siglip,
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen3_vl": _qwen3_vl,
    "qwen3_5_moe": _qwen3_vl,
    "llama4_vision_model": _llama4,
    "intern_vit_6b": _intern_vit,
}
"""By the model type of a `vision_config`: its tensors, from the config and the decoder's hidden size."""
