"""Collectives between the GPU and CPU ranks of one group, over host memory; imports nothing of vLLM."""

from vllm_heteroinfer.distributed.bridge.bridge import Bridge

__all__ = ["Bridge"]
