"""The server's TLS files, which are read again when they change, so that a renewed certificate needs no restart."""

from __future__ import annotations

import asyncio
import hashlib
from datetime import datetime
from pathlib import Path
from typing import Final

import grpc
import structlog

from etfarm.server.config import Config
from etfarm.wire.tls import BadTlsFile, expiry_of, first_of

log = structlog.get_logger()

POLL_S: Final = 2.0
"""Interval at which the files are checked. A change applies after two equal checks, so half-written files are not read."""

Signature = tuple[tuple[int, int, int] | None, ...]


class Certificates:
    """The certificate that the server shows, and the CAs that it accepts clients of. Bad new files leave the former in use.

    Open connections keep the certificate with which they were opened.

    Args:
        poll_s: seconds between two checks of the files.

    Raises:
        BadTlsFile: a file cannot be read, or has other content.
    """

    def __init__(self, config: Config, poll_s: float = POLL_S) -> None:
        self._config = config
        self._poll_s = poll_s
        self._paths = [path for path in (config.tls_cert, config.tls_key, config.tls_client_ca) if path is not None]
        self._seen = self._loaded = self._signature()
        self._current = self._read()
        self._shown = self._current[0]

    @property
    def expires_at(self) -> datetime | None:
        """The end of the certificate's validity; None without TLS."""
        return self._current[1]

    @property
    def sha256(self) -> bytes:
        """The digest of the certificate that new connections get, in DER; empty without TLS."""
        return self._current[2]

    def credentials(self) -> grpc.ServerCredentials | None:
        """Return gRPC's credentials, which ask for the current certificate at each new connection; None without TLS."""
        if self._shown is None:
            return None
        return grpc.dynamic_ssl_server_credentials(
            self._shown,
            self._fetch,  # type: ignore[arg-type]  # None keeps the current one
            require_client_authentication=self._config.tls_client_ca is not None,
        )

    def _fetch(self) -> grpc.ServerCertificateConfiguration | None:
        """Return the new certificate; None if it is that of the former connection. gRPC calls it in a thread of its own."""
        if self._current[0] is self._shown:
            return None
        self._shown = self._current[0]
        return self._shown

    async def watch(self) -> None:
        """Read files that change, until the task is cancelled."""
        while self._paths:
            await asyncio.sleep(self._poll_s)
            signature = await asyncio.to_thread(self._signature)
            if signature == self._seen != self._loaded:
                await asyncio.to_thread(self.reload)
            self._seen = signature

    def reload(self) -> None:
        """Read the files again; keep the current certificate if they cannot be used."""
        self._loaded = self._signature()
        try:
            self._current = self._read()
        except BadTlsFile as error:
            log.error("new TLS files cannot be used; the former certificate stays", why=str(error))
        else:
            log.info("read the TLS files again", expires=str(self.expires_at))

    def _read(self) -> tuple[grpc.ServerCertificateConfiguration | None, datetime | None, bytes]:
        if (identity := self._config.identity()) is None:
            return None, None, b""
        chain, key = identity
        shown = grpc.ssl_server_certificate_configuration([(key, chain)], self._config.client_ca())
        return shown, expiry_of(chain), hashlib.sha256(first_of(chain)).digest()

    def _signature(self) -> Signature:
        return tuple(map(signature_of, self._paths))


def signature_of(path: Path) -> tuple[int, int, int] | None:
    """Return what changes when a file is replaced or written; None if it cannot be examined."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size
