"""`heteroinfer up`: one HeteroInference on this machine, from a file to served tokens."""
