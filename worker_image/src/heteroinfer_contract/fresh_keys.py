"""Keys and nonces that nobody can guess, by the kernel's chance. Stdlib only."""

import os
from typing import Final

from heteroinfer_contract.group_key import KEY_BYTES

NONCE_BYTES: Final = 16


def new_key() -> bytes:
    """Returns a random key."""
    return os.urandom(KEY_BYTES)


def new_nonce() -> str:
    """Returns a number that was never used before, as hex."""
    return os.urandom(NONCE_BYTES).hex()
