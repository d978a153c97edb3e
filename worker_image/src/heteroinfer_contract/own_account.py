"""An account for the user id that a cluster chose for this process. Has effects."""

import contextlib
import os
import pwd
from pathlib import Path
from typing import Final

FURTHER_ACCOUNTS: Final = Path("/var/lib/extrausers/passwd")
"""Read by glibc besides /etc/passwd in our images: a link into /tmp, as their root file system is fixed."""
_NAME: Final = "assigned"
_HOME: Final = "/tmp"  # noqa: S108 - that of our images
_USERS: Final = 100
"""Group of the account: libnss-extrausers ignores accounts of the groups below 500, but of this one."""


def ensure_own_account(accounts: Path = FURTHER_ACCOUNTS) -> None:
    """Writes an account for this process' user id, where the image has a place for it.

    Clusters such as OpenShift run images as user ids of their own choice, of which no account file knows.
    Programs that ask getpwuid for the name or the home of their user would fail.
    """
    user = os.getuid()
    with contextlib.suppress(KeyError):
        pwd.getpwuid(user)
        return
    if not accounts.is_symlink():
        return  # no image of ours
    home = os.environ.get("HOME") or _HOME
    if not home.isprintable() or ":" in home:  # it would forge another field or account
        home = _HOME
    line = f"{_NAME}:x:{user}:{_USERS}::{home}:/usr/sbin/nologin\n"
    with contextlib.suppress(OSError):  # what needs no account goes on without
        accounts.readlink().write_text(line, encoding="utf-8")
