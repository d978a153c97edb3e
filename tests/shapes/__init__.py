"""Lists published models without their weights: configs, tensors, and vLLM's recorded answers about them."""
