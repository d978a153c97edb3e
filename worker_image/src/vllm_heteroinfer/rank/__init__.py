"""A rank: a process that loads a share of the model and computes. The plan lists all ranks."""
