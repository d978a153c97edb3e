"""vLLM platforms of a group's processes: cpu.py or cuda.py, by role. A process never imports both."""
