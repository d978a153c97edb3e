"""The key that proves membership of a group. Its codes are HMAC-SHA256 (RFC 2104). Stdlib only; pure.

The operator derives a group's key from its own key and the group's uid, and keeps the group's key in a
Secret that the group's pods read. Each epoch uses a key derived from the group's key. Nothing is encrypted:
a code proves the author of a text, its time (by the reader's nonce), and that the text was not changed.
"""

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from heteroinfer_contract import names
from heteroinfer_contract.errors import ContractError

KEY_BYTES: Final = 32
_HEX_DIGITS: Final = "0123456789abcdefABCDEF"
_FINGERPRINT_CHARS: Final = 10


@dataclass(frozen=True, slots=True)
class EpochKey:
    """The key that makes the codes of one epoch of one group."""

    secret: bytes = field(repr=False)

    def code(self, purpose: str, *parts: str) -> str:
        """Returns the code of `parts` as hex.

        Args:
            purpose: use of the code; a code for one purpose is invalid for every other.
            parts: texts that the code proves; different lists of parts give different codes.
        """
        return _mac(self.secret, purpose, *parts).hex()

    def verifies(self, code: str, purpose: str, *parts: str) -> bool:
        """Returns whether `code` is the code of `parts`; takes equally long for every wrong code."""
        return hmac.compare_digest(code.encode(), self.code(purpose, *parts).encode())

    def session(self, *parts: str) -> "EpochKey":
        """Returns a key for one connection; each end of the connection chose some of `parts`."""
        return EpochKey(_mac(self.secret, "session", *parts))

    def sign(self, purpose: str, name: str, text: str) -> str:
        """Returns `text` after a code that proves that a process of the epoch wrote it under this name."""
        return f"{self.code(purpose, name, text)} {text}"

    def read_signed(self, purpose: str, name: str, signed: str) -> str:
        """Returns the text in `signed`, a result of `sign`.

        Raises:
            ContractError: no process of the epoch signed the text under this name.
        """
        code, _, text = signed.partition(" ")
        if not self.verifies(code, purpose, name, text):
            raise ContractError(
                f"{name}: refused a value without a valid signature of this epoch (a process outside the "
                "group sent it). Restrict access to the group's ports with a NetworkPolicy"
            )
        return text


@dataclass(frozen=True, slots=True)
class GroupKey:
    """The key of a group, for all epochs."""

    secret: bytes = field(repr=False)

    @classmethod
    def of_group(cls, operator_key: bytes, group_uid: str) -> "GroupKey":
        """Derives a group's key from the operator's key and the group's uid."""
        return cls(_mac(operator_key, "group", group_uid))

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> "GroupKey | None":
        """Returns a pod's key; None without a key, for example if an older operator started the pod.

        Raises:
            ContractError: the value is not a key. The message does not show the value.
        """
        text = env.get(names.ENV_GROUP_KEY, "")
        if not text:
            return None
        try:
            secret = bytes.fromhex(text)
        except ValueError:
            secret = b""
        if len(secret) != KEY_BYTES:
            is_hex = all(character in _HEX_DIGITS for character in text)
            got = f"{len(text)} digits" if is_hex else "other characters"
            raise ContractError(
                f"{names.ENV_GROUP_KEY}: must be {2 * KEY_BYTES} hex digits (got {got}). "
                "Delete the Secret that contains it; the operator then creates it again"
            )
        return cls(secret)

    @property
    def text(self) -> str:
        """The key as hex, the form in the Secret and in the environment."""
        return self.secret.hex()

    @property
    def fingerprint(self) -> str:
        """Text that distinguishes this key from others without revealing it."""
        return _mac(self.secret, "fingerprint").hex()[:_FINGERPRINT_CHARS]

    def of_epoch(self, epoch: int) -> EpochKey:
        """Returns the key of an epoch; keys of other epochs cannot be derived from it."""
        return EpochKey(_mac(self.secret, "epoch", str(epoch)))


@dataclass(frozen=True, slots=True)
class RecordKey:
    """The key by which the operator recognizes the objects that store its decisions."""

    secret: bytes = field(repr=False)

    @classmethod
    def of_operator(cls, operator_key: bytes) -> "RecordKey":
        """Derives this key from the operator's own key; no group has this key."""
        return cls(_mac(operator_key, "record"))

    @property
    def fingerprint(self) -> str:
        """Text that distinguishes this key from others and does not reveal the key."""
        return _mac(self.secret, "fingerprint").hex()[:_FINGERPRINT_CHARS]

    def code(self, *parts: str) -> str:
        """Makes the code of an object, as hex; `parts` are its kind, owner, name and content."""
        return _mac(self.secret, "object", *parts).hex()

    def verifies(self, code: str, *parts: str) -> bool:
        """Compares `code` with the code of `parts`; takes equally long for every wrong code."""
        return hmac.compare_digest(code.encode(errors="replace"), self.code(*parts).encode())


@dataclass(frozen=True, slots=True)
class CleanupKey:
    """The key by which the operator confirms that a fetch may remove commits from a cache."""

    secret: bytes = field(repr=False)

    @classmethod
    def of_operator(cls, operator_key: bytes) -> "CleanupKey":
        """Derives this key from the operator's own key; no pod has this key."""
        return cls(_mac(operator_key, "cleanup"))

    def token(self, *parts: str) -> str:
        """Returns the token that confirms one question of one pod, as hex; `parts` identify both."""
        return _mac(self.secret, "confirmation", *parts).hex()


def _mac(secret: bytes, purpose: str, *parts: str) -> bytes:
    """Returns the HMAC of a purpose and its parts.

    The length of each text precedes it, so that different lists of parts never give the same bytes.
    """
    mac = hmac.new(secret, digestmod=hashlib.sha256)
    for part in (f"heteroinfer {purpose}", *parts):
        encoded = part.encode(errors="surrogatepass")
        mac.update(len(encoded).to_bytes(8, "big") + encoded)
    return mac.digest()
