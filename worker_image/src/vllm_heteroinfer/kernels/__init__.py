"""Kernels of our own for CPU ranks: C++ sources, how they are compiled, and torch ops of them.

Compiled when an image or an environment is made (`python -m vllm_heteroinfer.kernels.build`),
never while serving. Nothing is loaded at import of this package.
"""
