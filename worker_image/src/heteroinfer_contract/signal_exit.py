"""The exit code of a process that ends since a signal asked it to.

Stdlib only; pure, and as little of it as can be: a pod's first process imports it before anything else.
"""


def exit_code_of(number: int) -> int:
    """Returns the exit code that stands for a signal, as shells count."""
    return 128 + number
