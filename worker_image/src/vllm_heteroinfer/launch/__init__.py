"""The supervisor: PID 1 of each worker pod, which starts its ranks, watches them and names the culprit.

Imports the standard library and heteroinfer_contract only, since it must start at once
and must live on when torch or vLLM break.
"""
