"""Limits a group's full report to readers that prove they hold the group's key. Stdlib only; no I/O.

A reader without the key gets a challenge and a report that does not name the group. A reader that answers
the challenge with the right code gets the full report, together with a code of the report's text.
"""

import os
from collections.abc import Mapping
from typing import Final

from heteroinfer_contract.errors import ContractError
from heteroinfer_contract.group_key import KEY_BYTES, EpochKey

CHALLENGE_HEADER: Final = "WWW-Authenticate"
CREDENTIALS_HEADER: Final = "Authorization"
CODE_HEADER: Final = "X-HeteroInfer-Code"
SCHEME: Final = "HeteroInfer"
_NONCE_BYTES: Final = 16
CHALLENGE_LIFE_S: Final = 30.0
"""A reader that polls less often gets a new challenge, which costs one more request."""


class ReportGuard:
    """Answers readers. Does not store open challenges, so that strangers cannot fill the memory."""

    def __init__(self, key: EpochKey) -> None:
        self._key = key
        self._own = EpochKey(os.urandom(KEY_BYTES))
        self._used: dict[str, float] = {}

    def challenge(self, now_s: float) -> str:
        """Returns a challenge that can be answered once, within CHALLENGE_LIFE_S."""
        at, nonce = f"{now_s:.3f}", os.urandom(_NONCE_BYTES).hex()
        return f"{at}/{nonce}/{self._own.code('challenge', at, nonce)}"

    def admits(self, credentials: str, now_s: float) -> str | None:
        """Returns the challenge if this is its first correct answer; None otherwise."""
        scheme, _, answer = credentials.partition(" ")
        challenge, _, code = answer.rpartition("/")
        at, _, rest = challenge.partition("/")
        nonce, _, own = rest.partition("/")
        self._used = {used: until_s for used, until_s in self._used.items() if until_s > now_s}
        if scheme != SCHEME or not self._own.vouches(own, "challenge", at, nonce):
            return None
        if now_s - float(at) > CHALLENGE_LIFE_S or challenge in self._used:
            return None
        if not self._key.vouches(code, "read", challenge):
            return None
        self._used[challenge] = now_s + CHALLENGE_LIFE_S
        return challenge

    def vouch(self, challenge: str, body: str) -> str:
        """Returns the code that proves to the reader that a holder of the key wrote the report."""
        return self._key.code("report", challenge, body)


class ReportReader:
    """Reads the report of one leader.

    Args:
        key: key of the epoch; None reads only the public report.
    """

    def __init__(self, key: EpochKey | None) -> None:
        self._key = key
        self._challenge = ""

    def headers(self) -> dict[str, str]:
        """Returns the headers of the next request."""
        if self._key is None or not self._challenge:
            return {}
        return {CREDENTIALS_HEADER: f"{SCHEME} {self._challenge}/{self._key.code('read', self._challenge)}"}

    def read(self, headers: Mapping[str, str], body: str) -> str | None:
        """Returns the body if it is all that this reader may read; None if the reader must ask again.

        Raises:
            ContractError: the sender of the report does not have the key.
        """
        answered, self._challenge = self._challenge, ""
        _, _, challenge = headers.get(CHALLENGE_HEADER, "").partition(" ")
        if self._key is None or not challenge:
            return body
        self._challenge = challenge
        code = headers.get(CODE_HEADER)
        if code is None:
            return None
        if not self._key.vouches(code, "report", answered, body):
            raise ContractError(
                "refused a report without the leader's signature. Check which process listens at its address"
            )
        return body
