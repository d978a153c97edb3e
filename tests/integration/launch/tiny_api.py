"""Replaces the API server: /health answers 200, and SIGTERM ends the process with 0.

TINY_API chooses what the process does once TINY_TRIGGER exists:

- `silent`: it answers no request.
- `engine`: it reports that its engine does not answer.
- `endless`: it answers with a line of 100,000 bytes.
- no value: it continues to serve.

Other values of TINY_API have an effect from the start:

- `asks`: it sends requests to its engine, which answers.
- `parent`: its engine is a child process, and the API server ends with it.
- `first`: it listens once TINY_TRIGGER exists. Until then, its group generates its first tokens.
- `first_hangs`: it never listens, and its engine does not answer.

/slow sends a line every 0.1 s until TINY_TRIGGER exists. When the supervisor announces a drain, running
requests continue, and new requests are refused.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import FrameType

from heteroinfer_contract import names
from heteroinfer_contract.group_report import RankPhase
from vllm_heteroinfer.pod.channel import RankReporter

running: set[int] = set()
"""Threads that answer slow requests."""


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/slow":
            self.answer_slowly()
            return
        while os.environ.get("TINY_API") == "silent" and Path(os.environ["TINY_TRIGGER"]).exists():
            time.sleep(0.1)
        if os.environ.get("TINY_API") == "endless" and Path(os.environ["TINY_TRIGGER"]).exists():
            self.wfile.write(b"x" * 100_000 + b"\r\n")
            return
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

    def answer_slowly(self) -> None:
        """Sends lines until the trigger exists, or refuses the request during a drain."""
        if reporter.asked_to_drain():
            self.send_response(503)
            self.end_headers()
            return
        running.add(threading.get_ident())
        with contextlib.suppress(ConnectionError):  # the client left
            self.send_response(200)
            self.end_headers()
            while not Path(os.environ["TINY_TRIGGER"]).exists():
                self.wfile.write(b"line\n")
                time.sleep(0.1)
            self.wfile.write(b"end\n")
        running.discard(threading.get_ident())

    def log_message(self, *args: object) -> None:
        pass


def stop(number: int, frame: FrameType | None) -> None:
    print("api server stops in order", flush=True)
    sys.exit(0)


def drain() -> None:
    """Confirms the drain to the supervisor once the supervisor has announced it and no request runs."""
    while running or not reporter.asked_to_drain():
        time.sleep(0.05)
    reporter.report_drained()


def ask() -> None:
    """Sends requests to an engine that answers, until TINY_TRIGGER exists."""
    while not Path(os.environ["TINY_TRIGGER"]).exists():
        time.sleep(0.05)
    reporter.set_work("question 7 to the engine")


def ask_again_and_again() -> None:
    question = 0
    while True:
        question += 1
        reporter.set_work(f"question {question} to the engine")
        time.sleep(0.15)
        reporter.set_work(None)
        time.sleep(0.02)


def be_parent() -> None:
    """Ends in the same way as the engine, a child of this process."""
    engine = subprocess.Popen(["sleep", "600"])
    print(f"engine {engine.pid} runs", flush=True)
    code = engine.wait()
    reporter.report_engine_end(code)
    os._exit(70)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, stop)
    own = json.loads(os.environ[names.ENV_ADDRESSES])[int(os.environ[names.ENV_POD_INDEX])]
    reporter = RankReporter.from_env(os.environ)
    threading.Thread(target=drain, daemon=True).start()
    if os.environ.get("TINY_API") == "first_hangs":
        reporter.set_work("question 7 to the engine")
    while (
        os.environ.get("TINY_API", "").startswith("first") and not Path(os.environ["TINY_TRIGGER"]).exists()
    ):
        time.sleep(0.05)
    reporter.set_phase(RankPhase.READY)
    works = {"engine": ask, "asks": ask_again_and_again, "parent": be_parent}
    if work := works.get(os.environ.get("TINY_API", "")):
        threading.Thread(target=work, daemon=True).start()
    ThreadingHTTPServer((own["host"], own["api_port"]), Handler).serve_forever()
