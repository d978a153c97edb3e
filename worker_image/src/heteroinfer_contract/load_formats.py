"""The values of vLLM's `--load-format` that mode FeedForward accepts. Stdlib only; pure.

vllm/model_executor/model_loader/__init__.py@v0.32.0 maps each value to a loader. Feed-forward ranks cut their
columns from the tensors that `DefaultModelLoader` reads, or use dummy weights.
tests/integration/worker/test_loading.py compares this list with vLLM's table.
"""

from typing import Final

SAFETENSORS: Final = "safetensors"
GPU_FORMATS: Final = ("fastsafetensors", "instanttensor")
"""Formats that vLLM supports only on GPUs; CPU ranks read the same files as plain safetensors."""
FEED_FORWARD: Final = ("auto", SAFETENSORS, *GPU_FORMATS, "hf", "mistral", "pt", "npcache", "dummy")
FEED_FORWARD_WHY: Final = "feed-forward ranks read files of the checkpoint"
"""Why mode FeedForward accepts no other format; messages end with this text."""
