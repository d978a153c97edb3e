"""The contract between the operator and the worker: the plan as data, and every shared name.

Stdlib only. Operator and worker import this package; it imports neither.
"""
