"""Out-of-tree vLLM plugin: GPU and CPU ranks in one group. Imports nothing of torch or vLLM here."""
