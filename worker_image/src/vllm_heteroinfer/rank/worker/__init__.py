"""vLLM workers of a group, by device. An import of cpu_worker.py in a GPU process breaks that process."""
