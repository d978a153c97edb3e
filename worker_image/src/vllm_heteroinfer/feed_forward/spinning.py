"""How long processes of mode FeedForward wait in a loop before they sleep. Stdlib and the contract only."""

from collections.abc import Mapping

from heteroinfer_contract import names


def spin_time_ns(env: Mapping[str, str]) -> int:
    """Returns the time that a process spins before it sleeps, in ns.

    Returns 0 if the supervisor did not set the time.
    """
    return int(float(env.get(names.ENV_FEED_FORWARD_SPIN, "0")) * 1e9)
