"""Prints vLLM's own requirements for quantized checkpoints. Runs in the worker's environment."""

import json

from vllm.model_executor.layers import quantization


def main() -> None:
    """Prints, as one JSON line, the types of activations of each method, and the deprecated ones."""
    dtypes = {}
    for method in quantization.QUANTIZATION_METHODS:
        config = quantization.get_quantization_config(method)
        # A class method in most; where it is one of instances, it reads none of their state.
        found = config.get_supported_act_dtypes
        taken = found() if hasattr(found, "__self__") else found(None)
        dtypes[method] = sorted(str(dtype).removeprefix("torch.") for dtype in taken)
    print(json.dumps({"dtypes": dtypes, "deprecated": quantization.DEPRECATED_QUANTIZATION_METHODS}))


if __name__ == "__main__":
    main()
