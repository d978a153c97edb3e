"""Fetches a model from a hub into a cache: resumes, verifies and reports its progress.

Runs in a pod of its own before any rank starts. Needs huggingface_hub, but not torch or vLLM.
`heteroinfer plan` uses `hub_reader` and `headers`, which need none of the three.
"""
