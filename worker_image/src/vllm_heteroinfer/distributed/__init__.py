"""Traffic between ranks: the pipeline's hops and the communicators of tensor-parallel process groups."""
