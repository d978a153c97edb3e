"""Rules for experts that a GPU computes instead of its feed-forward ranks. Stdlib only; pure.

The planner predicts by these rules, and the worker follows them. docs/decisions/2026-11-27-gpu-experts.md
explains them.
"""

from typing import Final

ACTIVATIONS: Final = ("silu", "gelu", "gelu_tanh")
"""Gated activations that the CPU kernels and vLLM's GPU kernel for experts support."""
LEAST_GAIN: Final = 0.95
"""A division of experts is used only if a layer takes at most this part of the time of each simpler one.

The simplest division has all experts on CPUs; then follows the division with all experts on the GPU.
"""
LEAST_ROWS: Final = 64
"""Minimum number of rows of which the GPU computes some experts, if vLLM captures no CUDA graphs."""
SLOTS: Final = 3
"""Number of slots of a ring. A slot holds a copy that is in flight, or waits until the GPU unpacks it."""
