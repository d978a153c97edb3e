"""What vLLM's kernels for experts on CPUs say that they take: routing methods by format, as JSON.

.venv-worker/bin/python -m tests.shapes.kernels
"""

import json
import sys

_CLASSES = {
    "FP8 in blocks": "CPUExpertsFp8",
    "MXFP4": "CPUExpertsMxfp4",
    "int4": "CPUExpertsInt4",
    "int8": "CPUExpertsInt8",
}
"""SchemeName -> class in vllm/model_executor/layers/fused_moe/experts/cpu_moe.py."""


def routing_methods() -> dict[str, list[str]]:
    """Returns the routing methods that each kernel takes, by format."""
    from vllm.model_executor.layers.fused_moe.config import RoutingMethodType
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    return {
        scheme: sorted(
            {
                method.name
                for method in RoutingMethodType
                if getattr(cpu_moe, name)._supports_routing_method(method, None, None)
            }
        )
        for scheme, name in _CLASSES.items()
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(routing_methods()) + "\n")
