"""Functions of vLLM that HeteroInfer replaces, a file each; `registry.py` tells why, as data.

Nothing is replaced at import. Each file has one `apply()`, called in the processes that its
registry entry names.
"""
