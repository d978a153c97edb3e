"""vLLM platforms of a group's processes: cpu.py and cuda.py, chosen by role, never both imported."""
