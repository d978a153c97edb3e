"""What `heteroinfer top` and `heteroinfer logs` tell of the HeteroInferences of a cluster, read-only."""
