"""The operator: a HeteroInference resource to the pods of its groups, and `heteroinfer up` to processes."""
