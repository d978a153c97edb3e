"""What the end-to-end test does as a user would: install, give a model, ask, watch, break things."""

import base64
import json
import re
import socket
import ssl
import threading
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPSConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from heteroinfer_contract import names
from tests.cluster.node import NodeCluster

NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Resource:
    """One HeteroInference on the node.

    Attributes:
        cluster: the node.
        namespace: its namespace.
        name: its name.
    """

    cluster: NodeCluster
    namespace: str
    name: str

    def get(self, kind: str, *arguments: str) -> dict[str, Any]:
        """Returns objects as JSON."""
        text = self.cluster.kubectl("get", "-n", self.namespace, kind, *arguments, "-o", "json")
        return dict(json.loads(text))

    @property
    def status(self) -> dict[str, Any]:
        """Returns the status as stored now."""
        return dict(self.get(names.SINGULAR, self.name).get("status", {}))

    def pods(self) -> list[dict[str, Any]]:
        """Returns its worker pods by pod index."""
        selector = f"{names.LABEL_RESOURCE}={self.name},{names.LABEL_COMPONENT}={names.COMPONENT_WORKER}"
        found = self.get("pods", "-l", selector)["items"]
        return sorted(found, key=lambda pod: int(pod["metadata"]["labels"][names.LABEL_POD_INDEX]))

    def wait_ready(self, timeout_s: float) -> None:
        """Waits as the README says; the error holds what the resource and its pods say."""
        try:
            self.cluster.kubectl(
                "wait", "-n", self.namespace, "--for=condition=Ready", f"hinf/{self.name}",
                f"--timeout={timeout_s:.0f}s", timeout_s=timeout_s + 10,
            )  # fmt: skip
        except Exception as error:
            raise AssertionError(f"{error}\n{json.dumps(self.status, indent=1)}\n{self.logs()}") from error

    def logs(self) -> str:
        """Returns the last lines of each worker pod."""
        return "\n".join(
            self.cluster.kubectl("logs", "-n", self.namespace, pod["metadata"]["name"], "--tail=30")
            for pod in self.pods()
        )

    def complete(self, prompt: list[int], max_tokens: int) -> list[int]:
        """Returns the greedy tokens after a prompt, asked through the clients' Service."""
        service = self.get("service", self.name)
        url = f"http://{service['spec']['clusterIP']}:{service['spec']['ports'][0]['port']}/v1/completions"
        body = {
            "model": self.name,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
        with NO_PROXY.open(request, timeout=60) as answer:
            return list(json.load(answer)["choices"][0]["token_ids"])

    def kill_rank(self, pod: dict[str, Any], rank: int) -> float:
        """Kills the process of a rank in its pod with SIGKILL; returns the Unix time just before."""
        name = pod["metadata"]["name"]
        log = self.cluster.kubectl("logs", "-n", self.namespace, name)
        started = re.search(rf"started rank {rank} as process (\d+)", log)
        assert started is not None, log
        script = f"import os, time; print(time.time()); os.kill({started[1]}, 9)"
        return float(self.cluster.kubectl("exec", "-n", self.namespace, name, "--", "python3", "-c", script))


class ReadyWatch:
    """Watches the condition Ready by the API server's own watch, with the time of each change.

    As a context manager: `changes` holds (Unix time, status, reason) from its start on.
    """

    def __init__(self, resource: Resource) -> None:
        self.changes: list[tuple[float, str, str]] = []
        config = yaml.safe_load(resource.cluster.kubeconfig.read_text())
        self._server = urlsplit(config["clusters"][0]["cluster"]["server"])
        self._context = _tls(config, resource.cluster.state.folder)
        self._path = (
            f"/apis/{names.API_GROUP}/{names.API_VERSION}/namespaces/{resource.namespace}/{names.PLURAL}"
            f"?watch=true&fieldSelector=metadata.name%3D{resource.name}"
        )
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._started = threading.Event()

    def __enter__(self) -> "ReadyWatch":
        self._thread.start()
        assert self._started.wait(10), "the API server gave no watch"
        return self

    def __exit__(self, *_: object) -> None:
        # Ends the read of the other thread; closing under it would take its buffer away.
        self._connection.sock.shutdown(socket.SHUT_RDWR)
        self._thread.join(10)
        self._connection.close()

    def wait_for(self, accept: Callable[[str, str], bool], timeout_s: float, *, since: float = 0.0) -> float:
        """Returns the time of the first change, after `since`, that `accept(status, reason)` takes."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            for at, status, reason in list(self.changes):
                if at >= since and accept(status, reason):
                    return at
            time.sleep(0.02)
        raise AssertionError(f"no such change of Ready within {timeout_s} s: {self.changes}")

    def _run(self) -> None:
        host, port = self._server.hostname, self._server.port
        assert host is not None
        self._connection = HTTPSConnection(host, port, context=self._context, timeout=1200)
        self._connection.request("GET", self._path)
        answer = self._connection.getresponse()
        self._started.set()
        while line := answer.readline():
            self._note(json.loads(line)["object"])

    def _note(self, resource: dict[str, Any]) -> None:
        for condition in resource.get("status", {}).get("conditions", ()):
            if condition["type"] == "Ready":
                self.changes.append((time.time(), condition["status"], condition["reason"]))


def _tls(config: dict[str, Any], folder: Path) -> ssl.SSLContext:
    """Returns the client's side of TLS from a kubeconfig with embedded certificates."""
    cluster, user = config["clusters"][0]["cluster"], config["users"][0]["user"]
    context = ssl.create_default_context(
        cadata=base64.b64decode(cluster["certificate-authority-data"]).decode()
    )
    pair = folder / "watch.pem"
    pair.write_bytes(
        base64.b64decode(user["client-certificate-data"]) + base64.b64decode(user["client-key-data"])
    )
    context.load_cert_chain(pair)
    return context
