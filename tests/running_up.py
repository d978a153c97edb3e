"""Runs `heteroinfer up` as a user does, and gives access to its output and processes."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from heteroinfer_contract.group_report import GroupReport

REPOSITORY = Path(__file__).parents[1]
COMMAND = Path(sys.executable).parent / "heteroinfer"
READY_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 60.0
REPORT_TIMEOUT_S = 10.0
POLL_S = 0.05

ENDPOINT = re.compile(r"OpenAI API of group 0: (?P<url>\S+)/v1 \(model (?P<model>\S+)\)")
LAST_OF_URLS = re.compile(r"^\s*curl http")
STATUS = re.compile(r"status: (?P<url>\S+/group)")
RANK = re.compile(r"rank (?P<rank>\d+) \((?P<role>\S+), (?P<device>CPU|GPU), layers (?P<layers>\S+)\): ")
METRICS = re.compile(r"metrics of rank (?P<rank>\d+): (?P<url>\S+)")


class UpError(Exception):
    """`heteroinfer up` did not behave as expected. The text ends with its last lines of output."""


class RunningUp:
    """One running `heteroinfer up`. End it with stop(), or with the context manager, which kills it.

    Args:
        arguments: arguments of the command line after `up`.
        env: variables that are added to this process's environment.
        on_line: called with each line of output.
    """

    def __init__(
        self,
        arguments: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        on_line: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.lines: list[str] = []
        self._on_line = on_line
        self.process = subprocess.Popen(
            [COMMAND, "up", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **(env or {})},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> "RunningUp":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join()
        if self.process.stdout is not None:
            self.process.stdout.close()

    def wait_line(self, pattern: re.Pattern[str], timeout_s: float, *, after: int = 0) -> re.Match[str]:
        """Waits for a line from number `after` on that matches, and returns the match.

        Raises:
            UpError: no line matched in time, or the command has ended.
        """
        deadline = monotonic() + timeout_s
        while True:
            ended = self.process.poll() is not None
            if ended:
                self._reader.join()
            for line in self.lines[after:]:
                if found := pattern.search(line):
                    return found
            if ended:
                raise UpError(
                    f"ended with exit code {self.process.returncode} before {pattern.pattern!r}:\n"
                    f"{self.tail()}"
                )
            if monotonic() > deadline:
                raise UpError(f"no {pattern.pattern!r} within {timeout_s:g} s:\n{self.tail()}")
            sleep(POLL_S)

    def wait_ready(self, timeout_s: float = READY_TIMEOUT_S, *, after: int = 0) -> str:
        """Waits until the group serves and all URLs are printed.

        Returns the base URL of the API (without /v1).
        """
        url = self.wait_line(ENDPOINT, timeout_s, after=after)["url"]
        self.wait_line(LAST_OF_URLS, REPORT_TIMEOUT_S, after=after)
        return url

    def wait_exit(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """Waits for the exit code, and returns it. Raises UpError if the process does not end in time."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise UpError(f"still runs after {timeout_s:g} s:\n{self.tail()}") from None
        self._reader.join()
        return code

    def stop(self, number: int = signal.SIGINT) -> int:
        """Sends a signal, by default SIGINT like Ctrl-C, and returns the exit code."""
        self.process.send_signal(number)
        return self.wait_exit()

    def tail(self, count: int = 30) -> str:
        """Returns the last lines of output."""
        return "\n".join(self.lines[-count:])

    def group_report(self) -> GroupReport:
        """Returns the newest leader's report of group 0."""
        url = [found["url"] for line in self.lines if (found := STATUS.search(line))][-1]
        return GroupReport.from_json(_get(url))

    def metrics(self) -> dict[int, str]:
        """Returns the text of each rank's /metrics, by rank, in the newest epoch."""
        urls = {int(found["rank"]): found["url"] for line in self.lines if (found := METRICS.search(line))}
        return {rank: _get(url) for rank, url in urls.items()}

    def seats(self) -> dict[int, tuple[str, str, str]]:
        """Returns each rank's role, device and layers, by rank."""
        found = filter(None, map(RANK.search, self.lines))
        return {int(match["rank"]): (match["role"], match["device"], match["layers"]) for match in found}

    def complete(self, url: str, prompt: str | list[int], max_tokens: int = 32) -> dict[str, Any]:
        """Returns the greedy completion of a prompt, with `text` and `token_ids`."""
        body = {
            "model": self.wait_line(ENDPOINT, 0.0)["model"],
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        request = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120.0) as answer:
            choice: dict[str, Any] = json.load(answer)["choices"][0]
        return choice

    def processes(self) -> "Processes":
        """Returns all living processes that it has started."""
        return Processes.below(self.process.pid)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            self._on_line(self.lines[-1])


class Processes:
    """Processes by id and start time, because the kernel reuses ids."""

    def __init__(self, started: Mapping[int, int]) -> None:
        self.started = dict(started)

    @classmethod
    def below(cls, pid: int) -> "Processes":
        """Returns all descendants of a process."""
        parents = {child: fields for child in _pids() if (fields := _stat(child)) is not None}
        found: dict[int, int] = {}
        generation = {pid}
        while generation:
            generation = {child for child, (_, parent, _) in parents.items() if parent in generation}
            found |= {child: parents[child][2] for child in generation}
        return cls(found)

    @classmethod
    def of(cls, pids: Iterable[int]) -> "Processes":
        """Returns the living processes with these ids."""
        return cls({pid: fields[2] for pid in pids if (fields := _stat(pid)) is not None})

    def __bool__(self) -> bool:
        return bool(self.started)

    def living(self) -> list[int]:
        """Returns the processes that still run. A zombie has ended."""
        return [
            pid
            for pid, started in self.started.items()
            if (fields := _stat(pid)) is not None and fields[2] == started and fields[0] != "Z"
        ]

    def wait_gone(self, timeout_s: float) -> list[int]:
        """Waits until all have ended, at most `timeout_s`. Returns those that still run."""
        deadline = monotonic() + timeout_s
        while (left := self.living()) and monotonic() < deadline:
            sleep(POLL_S)
        return left


def _pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _stat(pid: int) -> tuple[str, int, int] | None:
    """Returns state, parent and start time of a process, or None after its end (proc_pid_stat(5))."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], int(fields[1]), int(fields[19])


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10.0) as answer:
        return bytes(answer.read()).decode()
