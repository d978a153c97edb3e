"""Creates an account for the user id that a cluster chose for this process. Writes a file."""

import contextlib
import os
import pwd
from pathlib import Path
from typing import Final

FURTHER_ACCOUNTS: Final = Path("/var/lib/extrausers/passwd")
"""File with accounts that glibc in our images reads in addition to /etc/passwd.

It is a link into /tmp, because the root file system is read-only."""
_NAME: Final = "assigned"
_HOME: Final = "/tmp"  # noqa: S108 - the home directory in our images
_USERS: Final = 100
"""Group of the account. libnss-extrausers ignores accounts of all groups below 500 except this group."""


def ensure_own_account(accounts: Path = FURTHER_ACCOUNTS) -> None:
    """Writes an account for this process's user id, if the image provides a file for accounts.

    Clusters such as OpenShift run images under user ids that they choose. No account file contains these
    ids, so programs that call getpwuid for the name or the home of their user would fail.
    """
    user = os.getuid()
    with contextlib.suppress(KeyError):  # the user has no account yet
        pwd.getpwuid(user)
        return
    if not accounts.is_symlink():
        return  # the worker image has a link here; another image is left as it is
    home = os.environ.get("HOME") or _HOME
    if not home.isprintable() or ":" in home:  # such a value would add a field or an account
        home = _HOME
    line = f"{_NAME}:x:{user}:{_USERS}::{home}:/usr/sbin/nologin\n"
    with contextlib.suppress(OSError):  # most programs work without an account
        accounts.readlink().write_text(line, encoding="utf-8")
