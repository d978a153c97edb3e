"""Collectives between the GPU and CPU ranks of one process group, over host memory. Does not import vLLM.

The package imports torch only when you access `Bridge`, so that code without torch can read headers.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_heteroinfer.distributed.bridge.bridge import Bridge

__all__ = ["Bridge"]


def __getattr__(name: str) -> Any:
    """Imports `Bridge`, and with it torch, at the first access."""
    if name != "Bridge":
        raise AttributeError(f"module {__name__} has no attribute {name}")
    from vllm_heteroinfer.distributed.bridge.bridge import Bridge

    return Bridge
