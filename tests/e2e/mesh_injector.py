"""A webhook that adds a sidecar to pods as Istio's injector does, unless they opt out by their label."""

import base64
import contextlib
import http.server
import json
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.cluster.namespaces import Addresses
from tests.cluster.node import NodeCluster

LABEL = "sidecar.istio.io/inject"
SIDECAR = "istio-proxy"
_NAME = "mesh-injector"


@contextlib.contextmanager
def mesh_injector(cluster: NodeCluster, namespace: str, folder: Path, image: str) -> Iterator[None]:
    """Injects into the pods of a namespace for as long as the context lasts.

    Args:
        folder: for the key.
        image: of the sidecar, with a shell.
    """
    host = Addresses(number=cluster.state.number).machine
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    new = ("-newkey", "rsa:2048", "-nodes", "-keyout", str(key), "-out", str(certificate), "-days", "1")
    subject = ("-subj", "/CN=injector", "-addext", f"subjectAltName=IP:{host}")
    subprocess.run(["openssl", "req", "-x509", *new, *subject], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            review = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            body = json.dumps(answer(review, image)).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Says nothing."""

    server = http.server.ThreadingHTTPServer((host, 0), Handler)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"https://{host}:{server.server_address[1]}/inject"
    bundle = base64.b64encode(certificate.read_bytes()).decode()
    cluster.kubectl("apply", "-f", "-", stdin=json.dumps(configuration(namespace, url, bundle)))
    try:
        yield
    finally:
        cluster.kubectl("delete", "mutatingwebhookconfiguration", _NAME)
        server.shutdown()
        server.server_close()


def configuration(namespace: str, url: str, bundle: str) -> dict[str, Any]:
    """Returns the configuration of the webhook."""
    rule = {"apiGroups": [""], "apiVersions": ["v1"], "resources": ["pods"], "operations": ["CREATE"]}
    webhook = {
        "name": "injector.example.test",
        "admissionReviewVersions": ["v1"],
        "sideEffects": "None",
        "failurePolicy": "Fail",
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
        "clientConfig": {"url": url, "caBundle": bundle},
        "rules": [rule],
    }
    return {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "MutatingWebhookConfiguration",
        "metadata": {"name": _NAME},
        "webhooks": [webhook],
    }


def answer(review: dict[str, Any], image: str) -> dict[str, Any]:
    """Returns the answer to a review: the pod with a sidecar that outlives SIGTERM, or as it is."""
    request = review["request"]
    response: dict[str, Any] = {"uid": request["uid"], "allowed": True}
    if (request["object"]["metadata"].get("labels") or {}).get(LABEL) != "false":
        sidecar = {
            "name": SIDECAR,
            "image": image,
            "command": ["sh", "-c", "trap '' TERM; while true; do sleep 1; done"],
            "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        }
        patch = json.dumps([{"op": "add", "path": "/spec/containers/-", "value": sidecar}])
        response |= {"patchType": "JSONPatch", "patch": base64.b64encode(patch.encode()).decode()}
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response}
