"""The supervisor: PID 1 of each worker pod, which starts its ranks, watches them and names the culprit.

Stdlib and the contract only: the supervisor must start immediately, and keep running if torch or vLLM fails.
"""
