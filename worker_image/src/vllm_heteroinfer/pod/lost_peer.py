"""By which words a rank says that another one is gone; read by ranks and by supervisors. Pure."""

import re

_LOST = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|closed by peer|reset by peer|socket closed"
    r"|broken pipe\b|econnreset|connectionerror|disterror|distnetworkerror|diststoreerror|distbackenderror"
    r"|(?<![a-z])(processgroup)?gloo(?![a-z])"
    r"|nccl (communicator|error)|tcpstore|timed out waiting|no route to host|remote process exited"
    r"|peerlosterror",
    re.IGNORECASE,
)
"""Words by which torch.distributed (torch 2.13.0: gloo, NCCL, TCPStore), the kernel and
Python say that a peer is gone. Without a match the error counts as the rank's own."""


def says_peer_is_lost(text: str) -> bool:
    """Returns whether an error's text, its class name in front, says that a peer went away."""
    return _LOST.search(text) is not None
