"""What every process of a worker pod has, whoever it is: addresses, cgroups, the channel to its supervisor.

Stdlib and the contract only: the supervisor lives on when torch or vLLM break.
"""
