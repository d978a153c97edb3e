"""`heteroinfer up`: serves one HeteroInference on this machine."""
