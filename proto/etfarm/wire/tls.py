"""Reading and validation of TLS files, with errors that name the file; gRPC would only fail to connect later."""

from __future__ import annotations

import base64
import re
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from etfarm.wire.errors import UserError
from etfarm.wire.private import require_secret

if TYPE_CHECKING:
    import ssl


_PEM: Final = re.compile(rb"-----BEGIN CERTIFICATE-----(.*?)-----END CERTIFICATE-----", re.DOTALL)
_VERSION: Final = 0xA0
_UTC_TIME: Final = 0x17


class BadTlsFile(UserError):
    """A TLS file that cannot be read or has the wrong content."""

    reason = "BAD_TLS_FILE"


def read_certificates(path: Path, option: str) -> bytes:
    """Return the content of a file of PEM certificates, validated.

    Args:
        option: the option that named the file, for the remedy.

    Raises:
        BadTlsFile: the file cannot be read, or has no certificate.
    """
    import ssl

    data = _read(path, option)
    try:
        _context().load_verify_locations(path)
    except ssl.SSLError:
        raise BadTlsFile(f"{path} holds no certificate (PEM).", f"Check {option}.", path=path) from None
    return data


def read_identity(cert: Path, key: Path) -> tuple[bytes, bytes]:
    """Return a PEM certificate chain and its key, the contents of `--tls-cert` and `--tls-key`.

    Raises:
        BadTlsFile: a file cannot be read or has other content, or the key has a password, belongs to another certificate, or may
            be used by other users.
    """
    import ssl

    chain, secret = read_certificates(cert, "--tls-cert"), _read(key, "--tls-key")

    def ask() -> str:
        raise BadTlsFile(f"The key in {key} has a password.", "Give one without, which only its user may read.", path=key)

    try:
        _context().load_cert_chain(cert, key, password=ask)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            message = f"The key in {key} is not that of the certificate in {cert}."
            raise BadTlsFile(message, "Check --tls-cert and --tls-key.", path=key) from None
        raise BadTlsFile(f"{key} holds no private key (PEM).", "Check --tls-key.", path=key) from None
    with key.open("rb") as file:
        require_secret(file.fileno(), key, partial(BadTlsFile, path=key))
    return chain, secret


def first_of(chain: bytes) -> bytes:
    """Return the first certificate of a PEM chain in DER; empty if it cannot be read."""
    match = _PEM.search(chain)
    try:
        return base64.b64decode(match[1]) if match is not None else b""
    except ValueError:
        return b""


def expiry_of(chain: bytes) -> datetime | None:
    """Return the end of the validity of the first certificate of a PEM chain; None if it cannot be read.

    Python's ssl module tells this only of a peer whose certificate it has verified.
    Source: RFC 5280, 4.1 and 4.1.2.5.
    """
    der = first_of(chain)
    try:
        _, certificate, _ = _element(der, 0)
        _, at, _ = _element(der, certificate)
        kind, _, end = _element(der, at)
        if kind == _VERSION:
            at = end
        for _ in range(3):  # serial number, algorithm, issuer
            _, _, at = _element(der, at)
        _, validity, _ = _element(der, at)
        _, _, at = _element(der, validity)  # not before
        kind, start, end = _element(der, at)
        text = der[start:end].decode("ascii").removesuffix("Z")
        if kind == _UTC_TIME:
            text = ("19" if int(text[:2]) >= 50 else "20") + text
        return datetime.strptime(text, "%Y%m%d%H%M%S").replace(tzinfo=UTC)
    except (ValueError, IndexError):
        return None


def _element(der: bytes, at: int) -> tuple[int, int, int]:
    """Return the tag, start and end of the contents of the DER element at an offset."""
    kind, length, start = der[at], der[at + 1], at + 2
    if length >= 0x80:
        count = length & 0x7F
        length, start = int.from_bytes(der[start : start + count]), start + count
    if start + length > len(der):
        raise ValueError("an element exceeds the certificate")
    return kind, start, start + length


def _read(path: Path, option: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise BadTlsFile(f"The TLS file {path} cannot be read: {error.strerror}.", f"Check {option}.", path=path) from None


def _context() -> ssl.SSLContext:
    # Imported only if needed: it takes 3 MB, which an agent without TLS can save.
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    # Leave the check of key lengths to gRPC's TLS implementation.
    context.set_ciphers("DEFAULT:@SECLEVEL=0")
    return context
