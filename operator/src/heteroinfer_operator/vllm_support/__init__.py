"""Whether vLLM 0.32.0 runs a model with these arguments, as data and checks. Pure."""
