"""The handshake with which two supervisors prove that they belong to the same epoch of the same group.

Stdlib and the contract only. A code is an HMAC by the epoch's key. The follower sends the first line with its
code, so a stranger gets no answer:

    follower -> leader   pod, nonce, code of pod and nonce
    leader -> follower   its own nonce, code of pod and both nonces
    all later lines      each line with its own code, by a key derived from pod and both nonces

Each direction numbers its lines from 0, so that no line can be omitted, repeated or moved.
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
    """Computes and checks the codes of lines, for one end of one connection."""

    def __init__(self, key: EpochKey, *, leads: bool) -> None:
        self._key = key
        self._own_side, self._other_side = ("leader", "follower") if leads else ("follower", "leader")
        self._sent = 0
        self._received = 0

    def seal(self, line: str) -> str:
        """Adds the code to the next line to send."""
        code = self._key.code(self._own_side, str(self._sent), line)
        self._sent += 1
        return f"{code} {line}"

    def open(self, sealed: str) -> str:
        """Checks and removes the code of the next received line.

        Raises:
            ContractError: the other end did not send this line, or did not send it next.
        """
        code, _, line = sealed.partition(" ")
        if not self._key.verifies(code, self._other_side, str(self._received), line):
            raise ContractError("the line is not signed with this epoch's key")
        self._received += 1
        return line


def build_opening(key: EpochKey, pod: int) -> Opening:
    """Builds the first line of a follower."""
    nonce = os.urandom(_NONCE_BYTES).hex()
    return Opening(pod=pod, nonce=nonce, code=key.code("open", str(pod), nonce))


def reply_to(key: EpochKey, line: str) -> tuple[OpeningReply, Seal]:
    """Checks the follower's first line.

    Returns:
        The leader's first line, and the Seal that signs and checks all later lines of this connection.

    Raises:
        ContractError: the follower does not have the key.
    """
    opening = codec.from_json(Opening, line)
    if not key.verifies(opening.code, "open", str(opening.pod), opening.nonce):
        raise ContractError("the process that connected does not have this epoch's key, so it is no follower")
    nonce = os.urandom(_NONCE_BYTES).hex()
    parts = (str(opening.pod), opening.nonce, nonce)
    return OpeningReply(nonce=nonce, code=key.code("reply", *parts)), Seal(key.session(*parts), leads=True)


def check_reply(key: EpochKey, opening: Opening, line: str) -> Seal:
    """Checks the leader's first line. Returns the follower's Seal for all later lines.

    Raises:
        ContractError: the process that answered does not have the key.
    """
    reply = codec.from_json(OpeningReply, line)
    parts = (str(opening.pod), opening.nonce, reply.nonce)
    if not key.verifies(reply.code, "reply", *parts):
        raise ContractError("the process at the leader's address does not have this epoch's key")
    return Seal(key.session(*parts), leads=False)
