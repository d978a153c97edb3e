"""An API server as far as the supervisor knows one: /health answers 200; SIGTERM ends it with 0."""

import json
import os
import signal
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import FrameType

from heteroinfer_contract import names


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


def stop(number: int, frame: FrameType | None) -> None:
    print("api server stops in order", flush=True)
    sys.exit(0)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, stop)
    own = json.loads(os.environ[names.ENV_ADDRESSES])[int(os.environ[names.ENV_POD_INDEX])]
    HTTPServer((own["host"], own["api_port"]), Handler).serve_forever()
