"""Functions of vLLM that HeteroInfer replaces, a file each; `registry.py` tells why, as data.

Nothing is replaced at import. Each file has one `install()`, called in the processes that its registry
entry names, in a CPU rank before it loads its model. A second call does nothing. It raises PatchError if
this vLLM is not the one that the patch was written for, and ContractError if HETEROINFER_CPU_LINEAR, by which
a user chooses vLLM's kernels, is neither `auto` nor `onednn`.
"""
