"""Which values of vLLM's `--load-format` mode FeedForward takes. Stdlib only; pure.

vllm/model_executor/model_loader/__init__.py@v0.32.0 says which loader each one names; feed-forward ranks take
their columns from what `DefaultModelLoader` reads, or have dummies. tests/integration/worker/test_loading.py
holds the list to that table.
"""

from typing import Final

SAFETENSORS: Final = "safetensors"
OF_GPUS: Final = ("fastsafetensors", "instanttensor")
"""Ways to read safetensors that vLLM has on GPUs alone: CPU ranks read the same files without them."""
FEED_FORWARD: Final = ("auto", SAFETENSORS, *OF_GPUS, "hf", "mistral", "pt", "npcache", "dummy")
FEED_FORWARD_WHY: Final = "its ranks read files of the checkpoint"
