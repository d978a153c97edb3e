"""vLLM workers of a group, by device. Importing cpu_worker.py in a GPU process breaks it."""
