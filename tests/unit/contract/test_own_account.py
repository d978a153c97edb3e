"""Writes an account for a user id that a cluster chose."""

import os
import pwd
from pathlib import Path

import pytest

from heteroinfer_contract.own_account import ensure_own_account

ASSIGNED = 1000680000


def test_a_user_id_without_an_account_gets_an_account(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accounts, written = tmp_path / "passwd", tmp_path / "written"
    accounts.symlink_to(written)
    monkeypatch.setattr(os, "getuid", lambda: ASSIGNED)
    monkeypatch.setenv("HOME", "/tmp")
    ensure_own_account(accounts)
    assert written.read_text() == "assigned:x:1000680000:100::/tmp:/usr/sbin/nologin\n"


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ("/h\u00f6me", "/h\u00f6me"),
        ("/x\nroot2:x:0:0::/:/bin/sh", "/tmp"),
        ("a:b", "/tmp"),
        ("/\udc80", "/tmp"),
    ],
)
def test_every_home_folder_gives_one_line_in_the_accounts_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str, taken: str
) -> None:
    accounts, written = tmp_path / "passwd", tmp_path / "written"
    accounts.symlink_to(written)
    monkeypatch.setattr(os, "getuid", lambda: ASSIGNED)
    monkeypatch.setenv("HOME", given)
    ensure_own_account(accounts)
    assert written.read_text("utf-8") == f"assigned:x:1000680000:100::{taken}:/usr/sbin/nologin\n"


def test_outside_of_our_images_no_account_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accounts, written = tmp_path / "passwd", tmp_path / "folder" / "written"
    ensure_own_account(accounts)  # the user has an account already
    assert not accounts.exists()
    monkeypatch.setattr(os, "getuid", lambda: ASSIGNED)
    with pytest.raises(KeyError):
        pwd.getpwuid(ASSIGNED)
    ensure_own_account(accounts)  # this image is not ours
    assert not accounts.exists()
    accounts.symlink_to(written)
    ensure_own_account(accounts)  # the link leads to a folder that does not exist
    assert not written.exists()
