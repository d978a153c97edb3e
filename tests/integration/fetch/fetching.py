"""Runs `heteroinfer-worker fetch` as a process, like the fetch pod, against a hub on loopback."""

import asyncio
import contextlib
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from heteroinfer_contract import names
from heteroinfer_contract.failure import Failure
from heteroinfer_contract.group_key import KEY_BYTES
from heteroinfer_contract.model_fetch import FetchedModel, FetchProgress
from heteroinfer_contract.report_access import CREDENTIALS_HEADER
from heteroinfer_operator.cluster import PodView, ResourceKey
from heteroinfer_operator.kube.leader_client import LeaderClient
from heteroinfer_operator.kube.trim import PodRecord
from heteroinfer_operator.report_client import NO_ANSWER, ReportClient
from tests.cluster.folders import REPOSITORY
from tests.hub_server import HubServer
from tests.ports import free_port

WORKER_PYTHON = REPOSITORY / ".venv-worker/bin/python"
MODEL = "acme/tiny"
DEADLINE_S = 60.0
_NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Fetch:
    """One fetch of MODEL. The context of `fetching` ends the process."""

    def __init__(self, hub: HubServer, cache: Path, *arguments: str, **env: str) -> None:
        self._port = free_port()
        cache.mkdir(exist_ok=True)
        self._message = cache.parent / f"message-{self._port}"
        self._log = cache.parent / f"log-{self._port}"
        command = [str(WORKER_PYTHON), "-m", "vllm_heteroinfer.launch.cli", "fetch", "--repository", MODEL]
        command += ["--cache", str(cache), "--health-host", "127.0.0.1", "--health-port", str(self._port)]
        command += ["--termination-message-path", str(self._message), *arguments]
        environment = {
            "PATH": os.environ["PATH"],
            # the code of this worktree, which may be a second one
            "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
            "HOME": str(cache.parent),
            "HF_ENDPOINT": hub.endpoint,
            "NO_PROXY": "*",
            "HF_HUB_DOWNLOAD_TIMEOUT": "60",  # a hub that pauses its answers is not offline
            **env,
        }
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    @property
    def output(self) -> str:
        """Returns all output of the process and its termination message."""
        message = self._message.read_text() if self._message.exists() else ""
        return self._log.read_text() + message

    def progress(self) -> FetchProgress | None:
        """Returns the answer at /fetch, or None without an answer."""
        try:
            with _NO_PROXY.open(f"http://127.0.0.1:{self._port}{names.PATH_FETCH}", timeout=5) as answer:
                return FetchProgress.from_json(answer.read().decode())
        except OSError:
            return None

    def confirm_removal(self, pod: PodView, operator_key: bytes, strangers: Sequence[str]) -> None:
        """Waits until the fetch asks for a removal, and confirms it as the operator does.

        Args:
            pod: the fetch pod, as the operator reads it.
            operator_key: key of the operator that created the pod.
            strangers: values of the header `Authorization` to send first. The fetch must ignore them.
        """
        owner = ResourceKey(namespace="team", name="tiny")
        record = PodRecord(view=pod, key=owner, owner_uid="uid", ip="127.0.0.1", health_port=self._port)

        async def confirm(key: bytes) -> bool:
            """Answers the fetch's question as an operator with this key.

            Returns whether it had a question.
            """
            asked: list[str] = []

            async def may_confirm(asking: PodRecord) -> bool:
                asked.append(asking.view.name)
                return True

            client = LeaderClient(key)
            try:
                await client.observe_fetch([record], may_confirm)
            finally:
                await client.close()
            return bool(asked)

        async def find_question() -> int | None:
            client = ReportClient()
            try:
                with contextlib.suppress(*NO_ANSWER):
                    return (await client.read_fetch("127.0.0.1", self._port, timeout_s=5.0))[1]
                return None
            finally:
                await client.close()

        deadline = time.monotonic() + DEADLINE_S
        while asyncio.run(find_question()) is None:
            assert self.process.poll() is None, self.output
            assert time.monotonic() < deadline, self.output
            time.sleep(0.02)
        for value in strangers:
            self._send(value)
        assert not asyncio.run(confirm(b"another operator".ljust(KEY_BYTES)))
        assert asyncio.run(find_question()) == 0, "a stranger confirmed the question"
        assert asyncio.run(confirm(operator_key))

    def _send(self, credentials: str) -> None:
        """Sends a request with these credentials."""
        url = f"http://127.0.0.1:{self._port}{names.PATH_FETCH}"
        request = urllib.request.Request(url, headers={CREDENTIALS_HEADER: credentials})
        with _NO_PROXY.open(request, timeout=5):
            pass

    def wait_for(self, accept: Callable[[FetchProgress], bool]) -> FetchProgress:
        """Waits for progress that `accept` accepts, and returns it."""
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            progress = self.progress()
            if progress is not None and accept(progress):
                return progress
            assert self.process.poll() is None, self.output
            time.sleep(0.02)
        raise AssertionError(f"no such progress within {DEADLINE_S} s: {self.progress()}\n{self.output}")

    def model(self) -> FetchedModel:
        """Waits for a successful end, and returns the termination message as a value."""
        code = self.process.wait(DEADLINE_S)
        assert code == names.EXIT_OK, self.output
        return FetchedModel.from_json(self._message.read_text())

    def failure(self) -> Failure:
        """Waits for a failed end, and returns the termination message."""
        code = self.process.wait(DEADLINE_S)
        assert code == names.EXIT_FETCH_FAILED, self.output
        failure = Failure.from_json(self._message.read_text())
        assert failure is not None, self.output
        return failure

    def kill(self) -> None:
        """Kills the process, like the failure of its node."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(DEADLINE_S)


@contextlib.contextmanager
def fetching(hub: HubServer, cache: Path, *arguments: str, **env: str) -> Iterator[Fetch]:
    """Runs a fetch until it ends, or until the context ends."""
    fetch = Fetch(hub, cache, *arguments, **env)
    try:
        yield fetch
    finally:
        if fetch.process.poll() is None:
            fetch.kill()
