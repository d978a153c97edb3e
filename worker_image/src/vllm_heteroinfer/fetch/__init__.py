"""Fetches a model from a hub into a cache, once: resumable, verified, reported while it goes on.

Runs in a pod of its own before any rank starts; needs huggingface_hub, neither torch nor vLLM.
`hub_reader` and `headers`, which `heteroinfer plan` runs, need neither of these.
"""
