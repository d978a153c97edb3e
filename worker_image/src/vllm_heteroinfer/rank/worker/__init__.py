"""vLLM workers of a group: cpu.py and gpu.py over common.py. Importing cpu.py in a GPU process breaks it."""
