"""Our own kernels for CPU ranks: C++ sources, their build, and torch ops that call them.

`python -m vllm_heteroinfer.kernels.build` compiles them when an image or an environment is built, never while
serving. Importing this package loads nothing.
"""
