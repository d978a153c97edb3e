"""Defines the only error that the test cluster raises on purpose."""


class ClusterError(Exception):
    """A tool, a program or the machine did not behave as the test cluster needs.

    The message has the received and the expected value, and a fix.
    """
