"""A model directory that holds the right headers and zeros: enough to plan with."""

import json
import struct
from pathlib import Path

HIDDEN, VOCAB = 64, 320
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 4,
    "hidden_size": HIDDEN,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}


def write_model(directory: Path) -> Path:
    """Makes a 4-layer float32 model in `directory`; returns it."""
    shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "lm_head.weight": (VOCAB, HIDDEN)}
    shapes |= {f"model.layers.{i}.mlp.up_proj.weight": (HIDDEN, HIDDEN) for i in range(4)}
    header, end = {}, 0
    for name, (rows, columns) in shapes.items():
        start, end = end, end + rows * columns * 4
        header[name] = {"dtype": "F32", "shape": [rows, columns], "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG))
    (directory / "tokenizer.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(end))
    return directory
