"""Certificate authorities of a private network are trusted in addition to the system's."""

import ssl
from pathlib import Path

import pytest

from heteroinfer_contract import names
from heteroinfer_contract.errors import ContractError
from vllm_heteroinfer.pod import certificates
from vllm_heteroinfer.pod.certificates import VARIABLES, trust_ca_bundle

SYSTEM = next(text for each in certificates.SYSTEM_BUNDLES if (text := Path(each).read_text()))
END = "-----END CERTIFICATE-----\n"
FIRST, SECOND = (f"{each}{END}" for each in SYSTEM.split(END)[:2])


def trusted(file: str) -> int:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cafile=file)
    return len(context.get_ca_certs())


def bundled(folder: Path, text: str, **env: str) -> dict[str, str]:
    return bundled_bytes(folder, text.encode(), **env)


def bundled_bytes(folder: Path, content: bytes, **env: str) -> dict[str, str]:
    bundle = folder / "ca.crt"
    bundle.write_bytes(content)
    found = {names.ENV_CA_BUNDLE: str(bundle), **env}
    trust_ca_bundle(found, folder)
    return found


def test_without_a_bundle_nothing_changes(tmp_path: Path) -> None:
    env: dict[str, str] = {}
    trust_ca_bundle(env, tmp_path)
    assert (env, list(tmp_path.iterdir())) == ({}, [])


def test_a_bundle_is_added_to_the_certificates_of_the_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = tmp_path / "system"
    system.write_text(FIRST)
    monkeypatch.setattr(certificates, "SYSTEM_BUNDLES", (str(tmp_path / "none"), str(system)))
    env = bundled(tmp_path, SECOND)
    assert {env[name] for name in VARIABLES} == {str(tmp_path / "heteroinfer-ca.crt")}
    assert trusted(env["SSL_CERT_FILE"]) == 2
    alone = tmp_path / "alone"
    alone.mkdir()
    monkeypatch.setattr(certificates, "SYSTEM_BUNDLES", ())
    assert trusted(bundled(alone, SECOND)["SSL_CERT_FILE"]) == 1


def test_certificates_in_a_file_that_the_user_names_are_kept(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text(FIRST)
    env = bundled(tmp_path, SECOND, SSL_CERT_FILE=str(own))
    assert env["SSL_CERT_FILE"] != str(own)
    assert trusted(env["SSL_CERT_FILE"]) == 2


@pytest.mark.parametrize("text", ["", "no certificate", f"{FIRST[:200]}\n{END}"])
def test_reports_a_file_without_certificates(tmp_path: Path, text: str) -> None:
    with pytest.raises(ContractError, match=r"model\.caBundle: the key must contain certificates"):
        bundled(tmp_path, text)


@pytest.mark.parametrize(
    "content",
    [
        f"# Főtanúsítvány\n{FIRST}# ő\n{SECOND}".encode(),
        f"# Fôt\n{FIRST}{SECOND}".encode("latin-1"),
        f"{FIRST}{SECOND}".encode("utf-8-sig"),
        f"{FIRST}{SECOND}".replace("\n", "\r\n").encode(),
        f"{FIRST}{SECOND}\0".encode(),
    ],
    ids=["comment", "latin-1", "byte order mark", "CRLF", "NUL"],
)
def test_text_around_certificates_does_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    monkeypatch.setattr(certificates, "SYSTEM_BUNDLES", ())
    assert trusted(bundled_bytes(tmp_path, content)["SSL_CERT_FILE"]) == 2


def test_text_of_any_encoding_is_kept_in_the_users_file_of_certificates(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_bytes("# ô\n".encode("latin-1") + FIRST.encode())
    assert trusted(bundled(tmp_path, SECOND, SSL_CERT_FILE=str(own))["SSL_CERT_FILE"]) == 2


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (FIRST.encode("utf-16"), "found no block from BEGIN CERTIFICATE"),
        (f"{FIRST}-----BEGIN CERTIFICATE-----\nxx\n{END}".encode(), "certificate 2 of 2 cannot be read"),
        (FIRST.replace("M", "Ő", 1).encode(), "found no block from BEGIN CERTIFICATE"),
    ],
    ids=["UTF-16", "no certificate", "letters"],
)
def test_reports_which_certificate_cannot_be_read(tmp_path: Path, content: bytes, problem: str) -> None:
    with pytest.raises(
        ContractError, match=rf"must contain certificates in PEM \({problem}.* Put the certificates of your"
    ):
        bundled_bytes(tmp_path, content)
