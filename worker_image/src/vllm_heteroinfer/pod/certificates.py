"""Certificate authorities of `model.caBundle`, added to the system's. Stdlib and the contract only."""

import ssl
from collections.abc import MutableMapping
from pathlib import Path
from typing import Final

from heteroinfer_contract import names
from heteroinfer_contract.errors import ContractError

VARIABLES: Final = (
    "SSL_CERT_FILE",
    "REQUESTS_CA_BUNDLE",
    "CURL_CA_BUNDLE",
    "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH",
)
"""By which OpenSSL and the clients of the hub, requests, curl and gRPC find authorities."""
SYSTEM_BUNDLES: Final = (
    "/etc/ssl/certs/ca-certificates.crt",  # Debian, Alpine
    "/etc/pki/tls/certs/ca-bundle.crt",  # Red Hat
    "/etc/ssl/ca-bundle.pem",  # SUSE
)
_COMBINED: Final = "heteroinfer-ca.crt"


def trust_ca_bundle(env: MutableMapping[str, str], folder: Path) -> None:
    """Points clients to the system's authorities and those of the pod's bundle, if it has one.

    If the user names another file with the system's authorities (SSL_CERT_FILE), it counts as theirs.

    Args:
        env: of this process, which its children get.
        folder: where the combined file is written.

    Raises:
        ContractError: the bundle has no certificates.
    """
    bundle = env.get(names.ENV_CA_BUNDLE, "")
    if not bundle:
        return
    try:
        own = Path(bundle).read_text(encoding="utf-8")
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=own)
    except (OSError, ValueError, ssl.SSLError) as error:
        raise ContractError(
            f"model.caBundle: the key that it names has no certificates in PEM ({error}); put those of your "
            "authority there, each with its BEGIN CERTIFICATE line"
        ) from error
    given = [env[name] for name in VARIABLES[:1] if env.get(name)]
    system = next((text for each in (*given, *SYSTEM_BUNDLES) if (text := _read(Path(each)))), "")
    combined = folder / _COMBINED
    combined.write_text(f"{system}\n{own}\n", encoding="utf-8")
    for name in VARIABLES:
        env[name] = str(combined)


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""
