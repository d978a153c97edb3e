"""Published models without their weights: configs, tensors, and what vLLM says of them."""
