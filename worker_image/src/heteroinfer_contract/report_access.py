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
"""Seconds for which a challenge is valid. A reader that polls less often needs one more request each time."""


def credentials_headers(proof: str) -> dict[str, str]:
    """Returns the headers of a request that proves something, such as the possession of a key."""
    return {CREDENTIALS_HEADER: f"{SCHEME} {proof}"}


def read_proof(credentials: str) -> str:
    """Returns the proof in the value of CREDENTIALS_HEADER; "" if the value has another scheme."""
    scheme, _, proof = credentials.partition(" ")
    return proof if scheme == SCHEME else ""


class ReportGuard:
    """Checks that readers of the report have the epoch's key.

    Gives each reader a challenge, and accepts its first correct answer. Stores no open challenges, so that
    strangers cannot fill the memory.
    """

    def __init__(self, key: EpochKey) -> None:
        self._key = key
        self._challenge_key = EpochKey(os.urandom(KEY_BYTES))
        self._answered_until_s: dict[str, float] = {}

    def challenge(self, now_s: float) -> str:
        """Returns a challenge that can be answered once, within CHALLENGE_LIFE_S."""
        issued_s, nonce = f"{now_s:.3f}", os.urandom(_NONCE_BYTES).hex()
        return f"{issued_s}/{nonce}/{self._challenge_key.code('challenge', issued_s, nonce)}"

    def accepted_challenge(self, credentials: str, now_s: float) -> str | None:
        """Returns the challenge if `credentials` are its first correct answer; None otherwise."""
        challenge, _, code = read_proof(credentials).rpartition("/")
        issued_s, _, nonce_and_code = challenge.partition("/")
        nonce, _, challenge_code = nonce_and_code.partition("/")
        # Challenges that have expired need no memory: they are refused by their age.
        self._answered_until_s = {
            answered: until_s for answered, until_s in self._answered_until_s.items() if until_s > now_s
        }
        if not self._challenge_key.verifies(challenge_code, "challenge", issued_s, nonce):
            return None  # this process did not issue the challenge
        if now_s - float(issued_s) > CHALLENGE_LIFE_S or challenge in self._answered_until_s:
            return None
        if not self._key.verifies(code, "read", challenge):
            return None
        self._answered_until_s[challenge] = now_s + CHALLENGE_LIFE_S
        return challenge

    def code_of_report(self, challenge: str, body: str) -> str:
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

    def request_headers(self) -> dict[str, str]:
        """Returns the headers of the next request."""
        if self._key is None or not self._challenge:
            return {}
        return credentials_headers(f"{self._challenge}/{self._key.code('read', self._challenge)}")

    def read(self, response_headers: Mapping[str, str], body: str) -> str | None:
        """Returns the report in a leader's response; None if the full report needs one more request.

        Send that request with `request_headers()`, which then answer the leader's challenge. A reader without
        the key gets the public report.

        Raises:
            ContractError: the sender of the report does not have the key.
        """
        answered_challenge, self._challenge = self._challenge, ""
        _, _, challenge = response_headers.get(CHALLENGE_HEADER, "").partition(" ")
        if self._key is None or not challenge:
            return body
        self._challenge = challenge
        code = response_headers.get(CODE_HEADER)
        if code is None:
            return None
        if not self._key.verifies(code, "report", answered_challenge, body):
            raise ContractError(
                "refused a report without the leader's signature (another process sent it). Check which "
                "process listens at the leader's address"
            )
        return body
