"""Size of a loaded model's weights, including packed weights of CPU ranks. Does not import torch."""

from typing import Any


def weight_bytes(model: Any) -> int:
    """Returns the size of a loaded model's weights, in bytes.

    A CPU linear layer passes its packed weight to oneDNN and keeps an empty tensor. For such a layer, the
    size is computed from the layer's shape. Source:
    vllm/model_executor/layers/utils.py::dispatch_cpu_unquantized_gemm@v0.32.0.
    """
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}  # no duplicates
    total = sum(tensor.nbytes for tensor in tensors.values())
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if weight is not None and weight.numel() == 0 and hasattr(module, "output_size_per_partition"):
            total += (
                module.input_size_per_partition * module.output_size_per_partition * weight.element_size()
            )
    return total
