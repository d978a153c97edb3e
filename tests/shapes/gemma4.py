"""Prints our sizes of Gemma-4's layers and those of vLLM's own class on the meta device, as JSON.

    .venv-worker/bin/python -m tests.shapes.gemma4

The layers include layers that share keys and values, with embeddings of each layer, full attention with heads
of its own, and experts. The tensors are those of transformers' class. The sizes are not read from published
files.
"""

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from heteroinfer_contract.model_files import read_profile
from tests.shapes.comparison import compare
from tests.shapes.corpus import Shape, write_shape
from tests.shapes.linears import TensorShape
from tests.shapes.oracle import ask

_LARGE = {
    "head_dim": 256,
    "global_head_dim": 512,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "sliding_window": 1024,
    "max_position_embeddings": 262144,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "shared": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 42,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "global_head_dim": 512,
        "num_kv_shared_layers": 18,
        "hidden_size_per_layer_input": 256,
    },
    "dense": {
        **_LARGE,
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_hidden_layers": 60,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "num_global_key_value_heads": 4,
    },
    "experts": {
        **_LARGE,
        "hidden_size": 2816,
        "intermediate_size": 2112,
        "num_hidden_layers": 30,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "num_global_key_value_heads": 2,
        "enable_moe_block": True,
        "num_experts": 128,
        "top_k_experts": 8,
        "moe_intermediate_size": 704,
    },
}


class Gemma4(Shape):
    """A shape with the tensors of transformers' own class."""

    def tensors(self) -> Iterator[TensorShape]:
        """Yields all tensors of its checkpoint. The head is tied to the embedding."""
        import torch
        from transformers import Gemma4ForCausalLM, Gemma4TextConfig

        with torch.device("meta"):
            model = Gemma4ForCausalLM(Gemma4TextConfig(**CONFIGS[self.name]))
        for name, tensor in model.state_dict().items():
            if name != "lm_head.weight":
                yield name, "BF16", tuple(tensor.shape)


def main() -> int:
    """Prints the difference of each size from vLLM's, as a share of vLLM's. Returns 0."""
    os.environ.setdefault("VLLM_PLUGINS", "")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    found = {}
    for name, fields in CONFIGS.items():
        named = {"architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text", "dtype": "bfloat16"}
        shape = Gemma4(name=name, config={**named, **fields})
        with tempfile.TemporaryDirectory() as folder:
            profile = read_profile(write_shape(shape, Path(folder)))
        both = compare(profile, ask(shape))
        found[name] = {what: both.ours[what] / both.theirs[what] - 1 for what in both.ours}
    sys.stdout.write(json.dumps(found) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
