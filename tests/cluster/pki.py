"""Creates certificates and kubeconfigs of one cluster with openssl: elliptic keys, in milliseconds."""

import base64
import dataclasses
import json
import ssl
from collections.abc import Sequence
from pathlib import Path

from tests.cluster.processes import run

DAYS = "365"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pki:
    """The folder of a cluster's keys (mode 0700). `issue` adds to it."""

    folder: Path

    def path(self, name: str) -> str:
        """Returns the path of a file of the folder, as text for a command line."""
        return str(self.folder / name)

    def create_authority(self, name: str, common_name: str) -> None:
        """Writes `name`.key and a self-signed `name`.crt, which may sign others."""
        self._create_key(name)
        usage = "keyUsage=critical,keyCertSign,digitalSignature,cRLSign"
        run(
            [
                *("openssl", "req", "-x509", "-new", "-key", self.path(f"{name}.key"), "-days", DAYS),
                *("-subj", f"/CN={common_name}", "-addext", usage, "-out", self.path(f"{name}.crt")),
            ]
        )

    def _create_key(self, name: str) -> None:
        run(
            [
                "openssl",
                "ecparam",
                "-name",
                "prime256v1",
                "-genkey",
                "-noout",
                "-out",
                self.path(f"{name}.key"),
            ]
        )

    def issue(
        self, name: str, subject: str, *, authority: str = "ca", server_names: Sequence[str] = ()
    ) -> None:
        """Writes `name`.key and `name`.crt for a client. With `server_names`, they are also for a server."""
        self._create_key(name)
        usages = "clientAuth,serverAuth" if server_names else "clientAuth"
        extensions = ["basicConstraints=CA:FALSE", "keyUsage=digitalSignature", f"extendedKeyUsage={usages}"]
        if server_names:
            extensions.append(f"subjectAltName={','.join(server_names)}")
        (self.folder / f"{name}.ext").write_text("\n".join(extensions) + "\n")
        request = run(["openssl", "req", "-new", "-key", self.path(f"{name}.key"), "-subj", subject])
        run(
            [
                *("openssl", "x509", "-req", "-CA", self.path(f"{authority}.crt")),
                *("-CAkey", self.path(f"{authority}.key"), "-CAcreateserial", "-days", DAYS),
                *("-extfile", self.path(f"{name}.ext"), "-out", self.path(f"{name}.crt")),
            ],
            stdin=request,
        )

    def create_service_account_key(self) -> None:
        """Writes sa.key and sa.pub, which sign and check service-account tokens."""
        self._create_key("sa")
        run(["openssl", "pkey", "-in", self.path("sa.key"), "-pubout", "-out", self.path("sa.pub")])

    def client_context(self, name: str) -> ssl.SSLContext:
        """Returns the TLS settings of client `name` for the API server."""
        context = ssl.create_default_context(cafile=self.path("ca.crt"))
        context.load_cert_chain(self.path(f"{name}.crt"), self.path(f"{name}.key"))
        return context

    def write_kubeconfig(self, name: str, server: str, target: Path) -> None:
        """Writes the kubeconfig of client `name` as JSON (which is also YAML), with all keys, mode 0600."""

        def inlined(file: str) -> str:
            return base64.b64encode((self.folder / file).read_bytes()).decode()

        user = {"client-certificate-data": inlined(f"{name}.crt"), "client-key-data": inlined(f"{name}.key")}
        cluster = {"server": server, "certificate-authority-data": inlined("ca.crt")}
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "heteroinfer-test", "cluster": cluster}],
            "users": [{"name": name, "user": user}],
            "contexts": [
                {"name": "heteroinfer-test", "context": {"cluster": "heteroinfer-test", "user": name}}
            ],
            "current-context": "heteroinfer-test",
        }
        target.touch(mode=0o600)
        target.write_text(json.dumps(document))


def create_pki(folder: Path, address: str, service_address: str, node: str | None) -> Pki:
    """Creates all certificates of a cluster whose API server is at `address`.

    Pods find the API server at `service_address`, the Service `kubernetes`. `node` is the name of its
    kubelet, which also serves at `address`; None: there is no node.
    """
    folder.mkdir(mode=0o700)
    pki = Pki(folder=folder)
    pki.create_authority("ca", "kubernetes-ca")
    pki.create_authority("front-ca", "front-proxy-ca")
    pki.create_service_account_key()
    in_cluster = [f"DNS:kubernetes.default{rest}" for rest in ("", ".svc", ".svc.cluster.local")]
    addresses = [f"IP:{each}" for each in sorted({address, service_address, "127.0.0.1"})]
    pki.issue(
        "apiserver",
        "/CN=kube-apiserver",
        server_names=["DNS:localhost", "DNS:kubernetes", *in_cluster, *addresses],
    )
    pki.issue("front", "/CN=front-proxy-client", authority="front-ca")
    masters = ("admin", "kubelet-client", "coredns", "network-policy")
    for name in masters if node else masters[:2]:
        pki.issue(name, f"/O=system:masters/CN={name}")
    for name in ("kube-controller-manager", "kube-scheduler", *(("kube-proxy",) if node else ())):
        pki.issue(name, f"/CN=system:{name}")
    if node:
        pki.issue(
            "kubelet", f"/O=system:nodes/CN=system:node:{node}", server_names=[f"DNS:{node}", f"IP:{address}"]
        )
    return pki
