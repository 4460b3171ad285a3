"""TLS files: what is none is named, with the option to check, before anything is connected."""

from __future__ import annotations

import base64
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest
import trustme
from cryptography.hazmat.primitives import serialization

from etfarm.wire.channel import Access, open_channel
from etfarm.wire.tls import BadTlsFile, expiry_of, read_certificates, read_identity
from tests.support.golden import Golden


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A certificate with its key, another key, the same with a password, and a file that is nothing of it."""
    ca = trustme.CA()
    own, other = ca.issue_cert("localhost"), ca.issue_cert("localhost")
    ca.cert_pem.write_to_path(tmp_path / "ca.pem")
    own.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    own.private_key_pem.write_to_path(tmp_path / "key.pem")
    (tmp_path / "key.pem").chmod(0o600)
    other.private_key_pem.write_to_path(tmp_path / "other.pem")
    (tmp_path / "none.pem").write_text("import npz\n")
    (tmp_path / "damaged.pem").write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    key = serialization.load_pem_private_key(own.private_key_pem.bytes(), None)
    locked = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"secret")
    )
    (tmp_path / "locked.pem").write_bytes(locked)
    return tmp_path


def test_good_files_are_given_as_they_are(folder: Path) -> None:
    assert read_certificates(folder / "ca.pem", "--tls-ca") == (folder / "ca.pem").read_bytes()
    assert read_identity(folder / "cert.pem", folder / "key.pem") == (
        (folder / "cert.pem").read_bytes(),
        (folder / "key.pem").read_bytes(),
    )


@pytest.mark.remedy("BAD_TLS_FILE")
@pytest.mark.parametrize("name", ["none.pem", "damaged.pem", "key.pem"])
def test_what_holds_no_certificate_is_named_with_its_option(folder: Path, name: str) -> None:
    with pytest.raises(BadTlsFile) as refused:
        read_certificates(folder / name, "--tls-client-ca")
    assert str(refused.value) == f"{folder / name} holds no certificate (PEM). Check --tls-client-ca."
    assert read_certificates(folder / "ca.pem", "--tls-client-ca")


@pytest.mark.parametrize(
    ("cert", "key", "expected"),
    [
        ("none.pem", "key.pem", "none.pem holds no certificate (PEM). Check --tls-cert."),
        ("cert.pem", "none.pem", "none.pem holds no private key (PEM). Check --tls-key."),
        ("cert.pem", "cert.pem", "cert.pem holds no private key (PEM). Check --tls-key."),
        ("cert.pem", "missing.pem", "missing.pem cannot be read: No such file or directory. Check --tls-key."),
        ("cert.pem", "other.pem", "Check --tls-cert and --tls-key."),
        ("cert.pem", "locked.pem", "locked.pem has a password. Give one without, which only its user may read."),
    ],
)
def test_an_identity_of_other_files_is_refused(folder: Path, cert: str, key: str, expected: str) -> None:
    with pytest.raises(BadTlsFile) as refused:
        read_identity(folder / cert, folder / key)
    assert str(refused.value).endswith(expected)


@pytest.mark.parametrize(
    "access",
    [
        lambda at: Access("board:1", tls_ca=at / "none.pem"),
        lambda at: Access("board:1", tls_ca=at / "ca.pem", tls_cert=at / "cert.pem"),
        lambda at: Access("board:1", tls_cert=at / "cert.pem", tls_key=at / "key.pem"),
    ],
)
def test_no_channel_is_opened_with_them(golden: Golden, folder: Path, access: Callable[[Path], Access]) -> None:
    with golden.refuses("BAD_TLS_FILE"):
        open_channel(access(folder))


def test_a_process_without_tls_does_not_import_ssl() -> None:
    """It takes memory, and boards have little."""
    loaded = "import sys, etfarm.wire.tls; print('ssl' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", loaded], check=True, capture_output=True, text=True).stdout == "False\n"


@pytest.mark.parametrize("year", [1999, 2026, 2049, 2050, 2120])
def test_the_end_of_a_certificate_is_read_from_its_bytes(year: int) -> None:
    """Years from 2050 on have another format."""
    ends = datetime(year, 12, 31, 23, 59, 58, tzinfo=UTC)
    issued = trustme.CA().issue_cert("localhost", not_before=datetime(1990, 1, 1, tzinfo=UTC), not_after=ends)
    chain = b"".join(pem.bytes() for pem in issued.cert_chain_pems)
    assert expiry_of(chain) == ends


@pytest.mark.parametrize("length", [0, 1, 40, 80, 200])
def test_bytes_that_are_no_certificate_have_no_end(length: int) -> None:
    der = base64.b64decode(b"".join(trustme.CA().cert_pem.bytes().splitlines()[1:-1]))
    pem = b"-----BEGIN CERTIFICATE-----\n" + base64.b64encode(der[:length]) + b"\n-----END CERTIFICATE-----\n"
    assert expiry_of(pem) is None
    assert expiry_of(der) is None
