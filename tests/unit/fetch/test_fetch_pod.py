"""A fetch pod sees the end of each of its parts: the download, the look for a stall, the progress log."""

import asyncio
import hashlib
import threading
from pathlib import Path
from typing import Any

import pytest

from heteroinfer_contract.failure import FailureReason
from heteroinfer_contract.model_fetch import FetchedFile
from tests.ports import free_port
from vllm_heteroinfer.fetch import fetch_pod
from vllm_heteroinfer.fetch.errors import FetchError
from vllm_heteroinfer.fetch.job import FetchJob

LIMIT_S = 20.0


class SilentHub:
    """A hub that lists a model and sends no weights until it is released."""

    def __init__(self) -> None:
        self.released = threading.Event()

    def files(self) -> tuple[str, list[FetchedFile]]:
        config = FetchedFile(
            path="config.json", size_bytes=2, digest=f"sha256:{hashlib.sha256(b'{}').hexdigest()}"
        )
        weights = FetchedFile(path="model.safetensors", size_bytes=100, digest="sha256:" + "0" * 64)
        return "a" * 40, [config, weights]

    def fetch(self, commit: str, file: FetchedFile, into: Path) -> None:
        if file.path == "config.json":
            into.write_bytes(b"{}")
            return
        self.released.wait(LIMIT_S)
        raise FetchError(FailureReason.MODEL_HUB_UNREACHABLE, "released")


class Stale(FetchJob):
    """A job whose cache cannot be looked at any more, as over NFS."""

    def __init__(self, broken: str, **options: Any) -> None:
        super().__init__(**options)
        self._broken = broken

    def find_stall(self) -> FetchError | None:
        self._break("find_stall")
        return super().find_stall()

    def progress(self) -> Any:
        self._break("progress")
        return super().progress()

    def _break(self, called: str) -> None:
        if called == self._broken:
            raise OSError("Stale file handle")


def run(cache: Path, broken: str, *, patience_s: float) -> None:
    """Runs a pod's fetch from a silent hub; raises what ends it."""
    hub = SilentHub()
    options = fetch_pod.FetchOptions(
        repository="acme/tiny",
        revision="main",
        cache=cache,
        health_host="127.0.0.1",
        health_port=free_port(),
        patience_s=patience_s,
        termination_message_path=None,
    )
    job = Stale(
        broken, source=hub, repository="acme/tiny", revision="main", cache=cache, patience_s=patience_s
    )
    try:
        asyncio.run(asyncio.wait_for(fetch_pod._run(job, options), LIMIT_S))
    finally:
        hub.released.set()


@pytest.mark.parametrize("broken", ["find_stall", "progress"])
def test_a_look_at_the_cache_that_raises_ends_the_fetch(broken: str, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="Stale file handle"):
        run(tmp_path, broken, patience_s=600.0)


def test_a_stall_ends_the_fetch(tmp_path: Path) -> None:
    with pytest.raises(FetchError, match="the hub brought nothing new"):
        run(tmp_path, "", patience_s=0.1)
