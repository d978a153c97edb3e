"""Runs a webhook that changes pods when they are created, as platforms do."""

import base64
import contextlib
import http.server
import json
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.cluster.namespaces import Addresses
from tests.cluster.node import NodeCluster

Change = Callable[[dict[str, Any]], list[dict[str, Any]]]
"""Returns a JSON patch for a pod. An empty patch leaves it unchanged."""


@contextlib.contextmanager
def changed_pods(
    cluster: NodeCluster, name: str, namespaces: Sequence[str], folder: Path, change: Change
) -> Iterator[None]:
    """Changes the new pods of namespaces until the context ends.

    Args:
        name: name of the webhook's configuration.
        folder: folder for the key.
    """
    host = Addresses(number=cluster.state.number).machine
    key, certificate = folder / f"{name}-key.pem", folder / f"{name}.pem"
    new = ("-newkey", "rsa:2048", "-nodes", "-keyout", str(key), "-out", str(certificate), "-days", "1")
    subject = ("-subj", "/CN=webhook", "-addext", f"subjectAltName=IP:{host}")
    subprocess.run(["openssl", "req", "-x509", *new, *subject], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            review = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            body = json.dumps(answer(review, change)).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Logs nothing."""

    server = http.server.ThreadingHTTPServer((host, 0), Handler)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"https://{host}:{server.server_address[1]}/pods"
    bundle = base64.b64encode(certificate.read_bytes()).decode()
    stored = json.dumps(configuration(name, namespaces, url, bundle))
    cluster.kubectl("apply", "-f", "-", stdin=stored)
    try:
        yield
    finally:
        cluster.kubectl("delete", "mutatingwebhookconfiguration", name)
        server.shutdown()
        server.server_close()


def configuration(name: str, namespaces: Sequence[str], url: str, bundle: str) -> dict[str, Any]:
    """Returns the configuration of the webhook."""
    rule = {"apiGroups": [""], "apiVersions": ["v1"], "resources": ["pods"], "operations": ["CREATE"]}
    where = {"key": "kubernetes.io/metadata.name", "operator": "In", "values": list(namespaces)}
    webhook = {
        "name": f"{name}.example.test",
        "admissionReviewVersions": ["v1"],
        "sideEffects": "None",
        "failurePolicy": "Fail",
        "namespaceSelector": {"matchExpressions": [where]},
        "clientConfig": {"url": url, "caBundle": bundle},
        "rules": [rule],
    }
    return {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "MutatingWebhookConfiguration",
        "metadata": {"name": name},
        "webhooks": [webhook],
    }


def answer(review: dict[str, Any], change: Change) -> dict[str, Any]:
    """Returns the answer to a review, with the change of its pod."""
    request = review["request"]
    response: dict[str, Any] = {"uid": request["uid"], "allowed": True}
    if patch := change(request["object"]):
        encoded = base64.b64encode(json.dumps(patch).encode()).decode()
        response |= {"patchType": "JSONPatch", "patch": encoded}
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response}
