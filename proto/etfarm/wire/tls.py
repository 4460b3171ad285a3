"""Reading and validation of TLS files, with errors that name the file; gRPC would only fail to connect later."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from etfarm.wire.errors import UserError

if TYPE_CHECKING:
    import ssl


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
        BadTlsFile: a file cannot be read or has other content, or the key has a password or belongs to another certificate.
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
    return chain, secret


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
