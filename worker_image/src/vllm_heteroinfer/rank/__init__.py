"""A rank: the process that holds a share of the model, and computes. One for each rank of the plan."""
