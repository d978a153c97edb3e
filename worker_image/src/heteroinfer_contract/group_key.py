"""The key of a group: who has it is of the group. Codes by HMAC-SHA256 (RFC 2104). Stdlib only; pure.

The operator makes a group's key of its own and the group's uid, and keeps it in a Secret that the
group's pods get; each epoch uses a key of its own, made of that. Nothing is encrypted: a code
proves who wrote a text, when (by the reader's nonce), and that nobody changed it.
"""

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from heteroinfer_contract import names
from heteroinfer_contract.errors import ContractError

KEY_BYTES: Final = 32
_FINGERPRINT_CHARS: Final = 10


@dataclass(frozen=True, slots=True)
class EpochKey:
    """What codes of one epoch of one group are made with."""

    secret: bytes = field(repr=False)

    def code(self, purpose: str, *parts: str) -> str:
        """Returns the code of `parts` as hex.

        Args:
            purpose: what the code is for: no code of one purpose is of use for another.
            parts: what it vouches for, each as it is: no two lists of parts have one code but by chance.
        """
        return _mac(self.secret, purpose, *parts).hex()

    def vouches(self, code: str, purpose: str, *parts: str) -> bool:
        """Returns whether `code` is that of `parts`; takes as long for every wrong one."""
        return hmac.compare_digest(code.encode(), self.code(purpose, *parts).encode())

    def session(self, *parts: str) -> "EpochKey":
        """Returns the key of one connection, whose ends have chosen `parts`."""
        return EpochKey(_mac(self.secret, "session", *parts))

    def sign(self, purpose: str, name: str, text: str) -> str:
        """Returns `text` with the code that it was written by one of the epoch, under this name."""
        return f"{self.code(purpose, name, text)} {text}"

    def read_signed(self, purpose: str, name: str, signed: str) -> str:
        """Returns the text that `sign` made `signed` of.

        Raises:
            ContractError: nobody of the epoch wrote it under this name.
        """
        code, _, text = signed.partition(" ")
        if not self.vouches(code, purpose, name, text):
            raise ContractError(
                f"{name}: got a value that no process of this epoch has signed, expected one of the group's "
                "own; who else reaches this group's ports? See the NetworkPolicy of its namespace"
            )
        return text


@dataclass(frozen=True, slots=True)
class GroupKey:
    """The key of a group, of all its epochs."""

    secret: bytes = field(repr=False)

    @classmethod
    def of_group(cls, operator_key: bytes, group_uid: str) -> "GroupKey":
        """Returns the key that an operator with this key of its own gives to a group."""
        return cls(_mac(operator_key, "group", group_uid))

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> "GroupKey | None":
        """Returns the key of a pod; None where it has none, as when an earlier version's operator started it.

        Raises:
            ContractError: it is no key; the message does not show it.
        """
        text = env.get(names.ENV_GROUP_KEY, "")
        if not text:
            return None
        try:
            secret = bytes.fromhex(text)
        except ValueError:
            secret = b""
        if len(secret) != KEY_BYTES:
            raise ContractError(
                f"{names.ENV_GROUP_KEY}: got {len(text)} characters, expected {2 * KEY_BYTES} hex digits; "
                "delete the Secret that it comes from, and the operator makes it anew"
            )
        return cls(secret)

    @property
    def text(self) -> str:
        """Returns the key as it stands in a Secret and in the environment."""
        return self.secret.hex()

    @property
    def fingerprint(self) -> str:
        """Returns what tells this key from others, and nothing of the key."""
        return _mac(self.secret, "fingerprint").hex()[:_FINGERPRINT_CHARS]

    def of_epoch(self, epoch: int) -> EpochKey:
        """Returns the key of an epoch; those of others cannot be made of it."""
        return EpochKey(_mac(self.secret, "epoch", str(epoch)))


@dataclass(frozen=True, slots=True)
class RecordKey:
    """The key by which the operator knows the objects again that it keeps its decisions in."""

    secret: bytes = field(repr=False)

    @classmethod
    def of_operator(cls, operator_key: bytes) -> "RecordKey":
        """Makes the key of an operator with this key of its own; no group has it."""
        return cls(_mac(operator_key, "record"))

    @property
    def fingerprint(self) -> str:
        """Text that tells this key from others, and shows nothing of the key."""
        return _mac(self.secret, "fingerprint").hex()[:_FINGERPRINT_CHARS]

    def code(self, *parts: str) -> str:
        """Makes the code of an object, as hex; `parts` are its kind, owner, name and content."""
        return _mac(self.secret, "object", *parts).hex()

    def vouches(self, code: str, *parts: str) -> bool:
        """Compares `code` with the code of `parts`; takes as long for every wrong code."""
        return hmac.compare_digest(code.encode(errors="replace"), self.code(*parts).encode())


def _mac(secret: bytes, purpose: str, *parts: str) -> bytes:
    mac = hmac.new(secret, digestmod=hashlib.sha256)
    for part in (f"heteroinfer {purpose}", *parts):
        encoded = part.encode(errors="surrogatepass")
        mac.update(len(encoded).to_bytes(8, "big") + encoded)
    return mac.digest()
