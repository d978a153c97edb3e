"""How two supervisors prove to each other that they are of one epoch of one group.

Stdlib and the contract only. The follower speaks first, with a code, so that a stranger hears nothing at all:

    follower -> leader   pod, nonce, code of both
    leader -> follower   nonce, code of all three
    from then on         each line with a code of its own, by a key that is made of both nonces

Lines count up from 0 in each direction, so that none can be left out, repeated or put elsewhere.
"""

import os
from dataclasses import dataclass
from typing import Final

from heteroinfer_contract import codec
from heteroinfer_contract.errors import ContractError
from heteroinfer_contract.group_key import EpochKey

_NONCE_BYTES: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """The first line of a follower."""

    pod: int
    nonce: str
    code: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OpeningReply:
    """The first line of the leader."""

    nonce: str
    code: str


class Seal:
    """Codes of the lines of one connection, at one of its ends."""

    def __init__(self, key: EpochKey, *, leads: bool) -> None:
        self._key = key
        self._own, self._other = ("leader", "follower") if leads else ("follower", "leader")
        self._sent = 0
        self._received = 0

    def seal(self, line: str) -> str:
        """Returns the next line to send, with its code."""
        code = self._key.code(self._own, str(self._sent), line)
        self._sent += 1
        return f"{code} {line}"

    def open(self, sealed: str) -> str:
        """Returns the next line that was received, without its code.

        Raises:
            ContractError: the other end did not send it, or not as the next one.
        """
        code, _, line = sealed.partition(" ")
        if not self._key.vouches(code, self._other, str(self._received), line):
            raise ContractError("got a line that the other supervisor has not sent so")
        self._received += 1
        return line


def build_opening(key: EpochKey, pod: int) -> Opening:
    """Returns the first line of a follower."""
    nonce = os.urandom(_NONCE_BYTES).hex()
    return Opening(pod=pod, nonce=nonce, code=key.code("open", str(pod), nonce))


def reply_to(key: EpochKey, line: str) -> tuple[OpeningReply, Seal]:
    """Returns the leader's first line and its end of the connection.

    Raises:
        ContractError: the first line is of somebody without the key.
    """
    opening = codec.from_json(Opening, line)
    if not key.vouches(opening.code, "open", str(opening.pod), opening.nonce):
        raise ContractError("it does not have this epoch's key")
    nonce = os.urandom(_NONCE_BYTES).hex()
    parts = (str(opening.pod), opening.nonce, nonce)
    return OpeningReply(nonce=nonce, code=key.code("reply", *parts)), Seal(key.session(*parts), leads=True)


def check_reply(key: EpochKey, opening: Opening, line: str) -> Seal:
    """Returns the follower's end of the connection.

    Raises:
        ContractError: whoever answered does not have the key.
    """
    reply = codec.from_json(OpeningReply, line)
    parts = (str(opening.pod), opening.nonce, reply.nonce)
    if not key.vouches(reply.code, "reply", *parts):
        raise ContractError("who answers at the leader's address does not have this epoch's key")
    return Seal(key.session(*parts), leads=False)
