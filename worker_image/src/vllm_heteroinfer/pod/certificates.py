"""Certificate authorities of `model.caBundle`, added to the system's. Stdlib and the contract only."""

import re
import ssl
from collections.abc import MutableMapping
from pathlib import Path
from typing import Final

from heteroinfer_contract import names
from heteroinfer_contract.errors import ContractError

_USER_VARIABLE: Final = "SSL_CERT_FILE"
"""Variable in which a user may name another file with the system's authorities."""
VARIABLES: Final = (
    _USER_VARIABLE,
    "REQUESTS_CA_BUNDLE",
    "CURL_CA_BUNDLE",
    "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH",
)
"""Variables with which OpenSSL, requests, curl, gRPC and the hub's client find certificate authorities."""
SYSTEM_BUNDLES: Final = (
    "/etc/ssl/certs/ca-certificates.crt",  # Debian, Alpine
    "/etc/pki/tls/certs/ca-bundle.crt",  # Red Hat
    "/etc/ssl/ca-bundle.pem",  # SUSE
)
_COMBINED: Final = "heteroinfer-ca.crt"
_CERTIFICATE: Final = re.compile(
    rb"-----BEGIN (X509 )?CERTIFICATE-----[^-\x80-\xff]*-----END (X509 )?CERTIFICATE-----"
)


def trust_ca_bundle(env: MutableMapping[str, str], folder: Path) -> None:
    """Makes clients trust the authorities of the pod's bundle in addition to the system's.

    Writes the certificates of both into a file, and sets the variables of all clients to this file. If the
    user sets SSL_CERT_FILE, this user's file replaces the system's. Does nothing if the pod has no bundle.

    Args:
        env: environment of this process, which its children inherit.
        folder: gets the combined file.

    Raises:
        ContractError: the bundle has no certificate, or has a certificate that OpenSSL cannot read.
    """
    bundle = env.get(names.ENV_CA_BUNDLE, "")
    if not bundle:
        return
    try:
        certificates = _read_certificates(Path(bundle).read_bytes())
    except (OSError, ValueError) as error:
        raise ContractError(
            f"model.caBundle: the key must contain certificates in PEM ({error}). Put the certificates of "
            "your authority into the key, each with its BEGIN CERTIFICATE line"
        ) from error
    files = (env.get(_USER_VARIABLE, ""), *SYSTEM_BUNDLES)
    contents = (_read_or_empty(Path(file)) for file in files if file)
    system_bundle = next(filter(None, contents), b"")  # the first file that exists and is not empty
    combined = folder / _COMBINED
    combined.write_bytes(b"\n".join((system_bundle, *certificates, b"")))
    for name in VARIABLES:
        env[name] = str(combined)


def _read_certificates(bundle: bytes) -> list[bytes]:
    """Returns the certificates without the text around them, which may have any encoding.

    Raises:
        ValueError: there is no certificate, or OpenSSL cannot read a certificate.
    """
    certificates = [match.group() for match in _CERTIFICATE.finditer(bundle)]
    if not certificates:
        raise ValueError("found no block from BEGIN CERTIFICATE to END CERTIFICATE in ASCII")
    for number, certificate in enumerate(certificates, 1):
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=certificate.decode("ascii"))
        except ssl.SSLError as error:
            raise ValueError(
                f"certificate {number} of {len(certificates)} cannot be read: {error}"
            ) from error
    return certificates


def _read_or_empty(file: Path) -> bytes:
    """Returns the content of a file; empty if the file cannot be read."""
    try:
        return file.read_bytes()
    except OSError:
        return b""
