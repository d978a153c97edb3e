"""The supervisor: PID 1 of each worker pod, which starts its ranks, watches them and names the culprit.

Stdlib and the contract only: it must start at once, and live on when torch or vLLM break.
"""
