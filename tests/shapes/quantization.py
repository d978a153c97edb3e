"""Prints vLLM's own requirements for quantized checkpoints. Runs in the worker's environment."""

import json

from vllm.model_executor.layers import quantization


def main() -> None:
    """Prints, as one JSON line, the activation types of each method, and the deprecated methods."""
    dtypes = {}
    for method in quantization.QUANTIZATION_METHODS:
        config = quantization.get_quantization_config(method)
        # A class method in most classes. If it is an instance method, it reads no state of the instance.
        found = config.get_supported_act_dtypes
        taken = found() if hasattr(found, "__self__") else found(None)
        dtypes[method] = sorted(str(dtype).removeprefix("torch.") for dtype in taken)
    print(json.dumps({"dtypes": dtypes, "deprecated": quantization.DEPRECATED_QUANTIZATION_METHODS}))


if __name__ == "__main__":
    main()
