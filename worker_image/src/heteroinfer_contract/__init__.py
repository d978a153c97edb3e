"""What the operator and the worker agree on: the plan as data, and every shared name.

Stdlib only. Both sides import this package; it imports neither.
"""
