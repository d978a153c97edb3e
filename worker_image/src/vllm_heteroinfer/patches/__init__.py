"""Patches of vLLM, one module for each. `registry.py` contains the reason for each patch.

Importing a module replaces nothing. Each module has one `install()`. The processes that the registry entry
names call `install()`; a CPU rank calls it before it loads its model. A second call does nothing. `install()`
raises PatchError if the patch was not written for the installed vLLM. It raises ContractError if
HETEROINFER_CPU_LINEAR, the user's choice of kernels, is neither `auto` nor `onednn`.
"""
