"""The one error that the test cluster raises on purpose."""


class ClusterError(Exception):
    """A tool, a program or the machine did not do what the test cluster needs.

    The message says what was got, what was expected and what to do about it.
    """
