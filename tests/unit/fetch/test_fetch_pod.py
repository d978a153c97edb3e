"""An error in any task of a fetch pod ends the pod: the download, the watch for stalls, the progress log."""

import asyncio
import hashlib
import logging
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from heteroinfer_contract.failure import FailureReason
from heteroinfer_contract.model_fetch import FetchedFile
from tests.ports import free_port
from vllm_heteroinfer.fetch import fetch_pod
from vllm_heteroinfer.fetch.errors import FetchError
from vllm_heteroinfer.fetch.job import FetchJob, FetchOptions
from vllm_heteroinfer.pod.turn_clock import TurnClock

LIMIT_S = 20.0
HELD_S = 4.0
"""Time in which the pod is not scheduled."""


class SilentHub:
    """A hub that lists a model, but sends no weights until the test releases it."""

    def __init__(self) -> None:
        self.released = threading.Event()

    def files(self) -> tuple[str, list[FetchedFile]]:
        config = FetchedFile(
            path="config.json", size_bytes=2, digest=f"sha256:{hashlib.sha256(b'{}').hexdigest()}"
        )
        weights = FetchedFile(path="model.safetensors", size_bytes=100, digest="sha256:" + "0" * 64)
        return "a" * 40, [config, weights]

    def is_large(self, file: FetchedFile) -> bool:
        return False

    def fetch(self, commit: str, file: FetchedFile, into: Path) -> None:
        if file.path == "config.json":
            into.write_bytes(b"{}")
            return
        self.released.wait(LIMIT_S)
        raise FetchError(FailureReason.MODEL_HUB_UNREACHABLE, "released")


class Stale(FetchJob):
    """A job whose cache cannot be read any more, as after an error of NFS."""

    def __init__(self, broken: str, **fields: Any) -> None:
        super().__init__(**fields)
        self._broken = broken
        self._looks = 0

    def find_stall(self) -> FetchError | None:
        self._break("find_stall")
        self._looks += 1
        if self._broken == "turns" and self._looks == 3:
            time.sleep(HELD_S)
        return super().find_stall()

    def progress(self) -> Any:
        self._break("progress")
        return super().progress()

    def _break(self, called: str) -> None:
        if called == self._broken:
            raise OSError("Stale file handle")


def run(cache: Path, broken: str, *, stall_limit_s: float) -> None:
    """Runs a pod's fetch from a silent hub. Raises the error that ends the fetch."""
    hub = SilentHub()
    options = FetchOptions(
        repository="acme/tiny",
        revision="main",
        cache=cache,
        health_host="127.0.0.1",
        health_port=free_port(),
        stall_limit_s=stall_limit_s,
        termination_message_path=None,
    )
    clock = TurnClock(fetch_pod.WATCH_INTERVAL_S, time.monotonic())
    job = Stale(
        broken,
        source=hub,
        options=options,
        now_s=lambda: clock.awake_s(time.monotonic()),
    )
    if broken == "turns":
        threading.Timer(HELD_S + 3.0, hub.released.set).start()
    try:
        asyncio.run(asyncio.wait_for(fetch_pod._run(job, options, clock), LIMIT_S))
    finally:
        hub.released.set()


@pytest.mark.parametrize("broken", ["find_stall", "progress"])
def test_an_error_while_the_cache_is_checked_ends_the_fetch(broken: str, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="Stale file handle"):
        run(tmp_path, broken, stall_limit_s=600.0)


def test_a_stall_ends_the_fetch(tmp_path: Path) -> None:
    with pytest.raises(FetchError, match="the download got no new byte"):
        run(tmp_path, "", stall_limit_s=0.1)


def test_a_frozen_pod_resumes(tmp_path: Path) -> None:
    """After a pause, the fetch first reads the data that the hub sent in this time."""
    with pytest.raises(FetchError, match="released"):
        run(tmp_path, "turns", stall_limit_s=3.0)


def test_the_log_shows_control_characters_escaped() -> None:
    record = logging.LogRecord("x", logging.ERROR, "x.py", 1, "names %s files", ("a\x1b]0;TITLE\x07",), None)
    shown = fetch_pod.FetchLogFormatter("%(message)s").format(record)
    assert shown == r"names a\x1b]0;TITLE\x07 files"
