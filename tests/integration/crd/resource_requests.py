"""Sends requests about HeteroInferences over one open connection: hundreds in a few seconds."""

import json
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import urllib3
from kubernetes.client import Configuration
from kubernetes.config import load_kube_config

from heteroinfer_contract import names

_PATH = f"/apis/{names.API_GROUP}/{names.API_VERSION}/namespaces/default/{names.PLURAL}"


class Refused(Exception):  # noqa: N818 - not an error of the test: what the API server decided
    """The API server refused the object. `message` is its reason."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class Server:
    """The API server.

    Args:
        kubeconfig: kubeconfig of a user with all permissions.
    """

    def __init__(self, kubeconfig: Path) -> None:
        configuration = Configuration()
        load_kube_config(str(kubeconfig), client_configuration=configuration)  # type: ignore[no-untyped-call]  # its types are partial
        # A direct connection, which ignores a proxy of the user's shell.
        self._pool = urllib3.connectionpool.connection_from_url(
            configuration.host,
            ca_certs=configuration.ssl_ca_cert,
            cert_file=configuration.cert_file,
            key_file=configuration.key_file,
            timeout=30,
        )

    def create(self, body: dict[str, Any], *, dry_run: bool = True) -> dict[str, Any]:
        """Creates an object, and returns it as stored, with defaults.

        Checks fields as strictly as `kubectl apply`.

        Raises:
            Refused: the object is invalid.
        """
        return self._send("POST", _PATH, body, dry_run=dry_run)

    def put_status(self, name: str, body: dict[str, Any], *, dry_run: bool = True) -> dict[str, Any]:
        """Replaces the status of an object, and returns the object. Raises Refused."""
        return self._send("PUT", f"{_PATH}/{name}/status", body, dry_run=dry_run)

    def _send(self, method: str, path: str, body: dict[str, Any], *, dry_run: bool) -> dict[str, Any]:
        """Sends a request. Raises Refused if the API server finds the object invalid."""
        query = "fieldValidation=Strict" + ("&dryRun=All" if dry_run else "")
        response = self._pool.request(
            method,
            f"{path}?{query}",
            body=json.dumps(body).encode(),
            headers={"Content-Type": "application/json", "Accept": "application/json"},
        )
        answer: dict[str, Any] = json.loads(response.data)
        if response.status in {400, 422}:
            raise Refused(answer["message"])
        if response.status not in {200, 201}:
            raise AssertionError(f"{method} {path}: got status {response.status}: {answer}")
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.close()
