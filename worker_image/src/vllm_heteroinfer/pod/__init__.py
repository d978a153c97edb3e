"""Code that every process of a worker pod uses: addresses, health server, channel to the supervisor.

Stdlib and the contract only: the supervisor must keep running when torch or vLLM break.
"""
