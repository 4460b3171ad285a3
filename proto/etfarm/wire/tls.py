"""TLS files: read, and refused with their names where gRPC would only fail to connect later."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from etfarm.wire.errors import UserError

if TYPE_CHECKING:
    import ssl


class BadTlsFile(UserError):
    """A file is not there, or holds nothing of what it is given for."""

    reason = "BAD_TLS_FILE"


def read_certificates(path: Path, option: str) -> bytes:
    """A file of PEM certificates, as it is.

    Args:
        option: what the file was named with, for the remedy.

    Raises:
        BadTlsFile: it cannot be read, or holds no certificate.
    """
    import ssl

    data = _read(path, option)
    try:
        _context().load_verify_locations(path)
    except ssl.SSLError:
        raise BadTlsFile(f"{path} holds no certificate (PEM).", f"Check {option}.", path=path) from None
    return data


def read_identity(cert: Path, key: Path) -> tuple[bytes, bytes]:
    """A PEM certificate chain and its key, as the files `--tls-cert` and `--tls-key` name have them.

    Raises:
        BadTlsFile: one of them cannot be read, or holds something else; the key has a password, or is of another certificate.
    """
    import ssl

    chain, secret = read_certificates(cert, "--tls-cert"), _read(key, "--tls-key")

    def ask() -> str:
        raise BadTlsFile(f"The key in {key} has a password.", "Give one without, which only its user may read.", path=key)

    try:
        _context().load_cert_chain(cert, key, password=ask)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            said = f"The key in {key} is not that of the certificate in {cert}."
            raise BadTlsFile(said, "Check --tls-cert and --tls-key.", path=key) from None
        raise BadTlsFile(f"{key} holds no private key (PEM).", "Check --tls-key.", path=key) from None
    return chain, secret


def _read(path: Path, option: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise BadTlsFile(f"The TLS file {path} cannot be read: {error.strerror}.", f"Check {option}.", path=path) from None


def _context() -> ssl.SSLContext:
    # Imported where it is needed: it takes 3 MB, which an agent without TLS has no use for.
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    # Whether a key is long enough is for gRPC's own TLS to say, which does the work.
    context.set_ciphers("DEFAULT:@SECLEVEL=0")
    return context
