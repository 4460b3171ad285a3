"""Servers of a farm that prove that they know an agent's token, over TLS on loopback, and a link that loses connections."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import trustme

from etfarm.v1.farm_pb2 import FarmProof, GetProofRequest, GetServerInfoRequest, ServerInfo
from etfarm.v1.farm_pb2_grpc import FarmServiceServicer
from etfarm.wire.channel import Access
from etfarm.wire.farm_proof import METADATA, Proofs, key_of, mac_of
from etfarm.wire.tls import first_of
from tests.support.fake_servers import ANY_PORT, serving

TOKEN, FARM = "etf_of-an-agent", "the-farm"


@dataclass
class Site:
    """An authority, and the servers that it has signed certificates for."""

    folder: Path
    ca: trustme.CA = field(default_factory=trustme.CA)

    def access(self, *addresses: str, farm_id: str = FARM, tls: bool = True) -> Access:
        path = self.folder / "ca.pem"
        self.ca.cert_pem.write_to_path(path)
        return Access(",".join(addresses), TOKEN, path if tls else None, proofs=Proofs(farm_id))


class FarmServer(FarmServiceServicer):
    """A server of a farm, which records the metadata of its calls.

    Args:
        token: the token that it knows.
        names: those in its certificate.
        certificate: PEM of the certificate that it says to have; its own if empty.
    """

    def __init__(
        self, site: Site, *names: str, farm_id: str = FARM, token: str = TOKEN, certificate: bytes = b"", tls: bool = True
    ) -> None:
        self._farm_id, self._key, self._tls = farm_id, key_of(token), tls
        self._names = names or ("localhost", "127.0.0.1")
        self.issue(site, certificate)
        self.address = ""
        self.proofs = 0
        self.tokens: list[str] = []

    def issue(self, site: Site, certificate: bytes = b"") -> None:
        """Give it a new certificate."""
        own = site.ca.issue_cert(*self._names)
        self._credentials = grpc.ssl_server_credentials([(own.private_key_pem.bytes(), own.cert_chain_pems[0].bytes())])
        self._certificate = first_of(certificate or own.cert_chain_pems[0].bytes())

    @asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        credentials = self._credentials if self._tls else None
        options = [("grpc.so_reuseport", 0)]
        async with serving(self, address=self.address or ANY_PORT, credentials=credentials, options=options) as self.address:
            yield self.address

    async def GetProof(self, request: GetProofRequest, context: Any) -> FarmProof:
        self._record(context)
        self.proofs += 1
        sent = GetProofRequest.FromString(dict(context.invocation_metadata())[METADATA])
        certificate = hashlib.sha256(self._certificate).digest() if self._tls else b""
        mac = mac_of(self._key, sent.nonce, b"s" * 32, self._farm_id, certificate)
        return FarmProof(farm_id=self._farm_id, server_nonce=b"s" * 32, mac=mac)

    async def GetServerInfo(self, request: GetServerInfoRequest, context: Any) -> ServerInfo:
        self._record(context)
        return ServerInfo(version=self.address)

    def _record(self, context: Any) -> None:
        self.tokens += [str(value) for name, value in context.invocation_metadata() if name == "authorization"]


class Old(FarmServer):
    """A server that has no GetProof."""

    async def GetProof(self, request: GetProofRequest, context: Any) -> FarmProof:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
        raise AssertionError("abort raises")


@asynccontextmanager
async def losing_link(target: str, is_lost: Callable[[int], bool]) -> AsyncIterator[str]:
    """Yield an address whose connections are passed on to another, except those for whose number `is_lost` is true."""
    host, _, port = target.rpartition(":")
    number = 0

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                writer.write(data)
        finally:
            writer.close()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal number
        number += 1
        if is_lost(number):
            writer.transport.abort()
            return
        there, onward = await asyncio.open_connection(host, int(port))
        await asyncio.gather(pump(reader, onward), pump(there, writer), return_exceptions=True)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
