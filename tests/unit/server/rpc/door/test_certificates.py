"""TLS files that change under a server: new connections get the new certificate, and bad files change nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path

import grpc
import pytest
import trustme

from etfarm.server.config import Config
from etfarm.server.rpc.door.certificates import Certificates
from etfarm.wire.channel import Address
from tests.support.waiting import becomes

EXPIRES = datetime(2040, 1, 2, 3, 4, 5, tzinfo=UTC)


def issue(folder: Path, ca: trustme.CA, expires: datetime = EXPIRES) -> None:
    certificate = ca.issue_cert("localhost", not_after=expires)
    certificate.private_key_pem.write_to_path(folder / "key.pem")
    (folder / "key.pem").chmod(0o600)
    certificate.cert_chain_pems[0].write_to_path(folder / "cert.pem")


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[tuple[Certificates, str]]:
    """A gRPC server with the certificate of a CA, and its address."""
    issue(tmp_path, trustme.CA())
    certificates = Certificates(
        Config(Address("localhost:0"), tmp_path, tls_cert=tmp_path / "cert.pem", tls_key=tmp_path / "key.pem")
    )
    server = grpc.aio.server()
    credentials = certificates.credentials()
    assert credentials is not None
    port = server.add_secure_port("localhost:0", credentials)
    await server.start()
    try:
        yield certificates, f"localhost:{port}"
    finally:
        await server.stop(None)


async def is_trusted(address: str, ca: bytes) -> bool:
    """Return whether a new connection that trusts only this CA is established."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(ca), options=options) as channel:
        call = channel.unary_unary("/x/y")(b"", timeout=20)
        try:
            await call
        except grpc.aio.AioRpcError as error:
            return error.code() is grpc.StatusCode.UNIMPLEMENTED
    return False


async def test_new_connections_get_a_new_certificate_and_bad_files_change_nothing(
    served: tuple[Certificates, str], tmp_path: Path
) -> None:
    certificates, address = served
    former = (tmp_path / "cert.pem").read_bytes()
    assert certificates.expires_at == EXPIRES
    ca = trustme.CA()
    issue(tmp_path, ca, datetime(2041, 1, 1, tzinfo=UTC))
    assert not await is_trusted(address, ca.cert_pem.bytes()), "the files were not read yet"
    certificates.reload()
    assert certificates.expires_at == datetime(2041, 1, 1, tzinfo=UTC)
    assert await is_trusted(address, ca.cert_pem.bytes())
    good = (tmp_path / "cert.pem").read_bytes()
    for bad in (b"", b"nothing", former, good[: len(good) // 2]):
        (tmp_path / "cert.pem").write_bytes(bad)
        certificates.reload()
        assert certificates.expires_at == datetime(2041, 1, 1, tzinfo=UTC)
        assert await is_trusted(address, ca.cert_pem.bytes())


async def test_files_that_change_are_read_without_a_signal(tmp_path: Path) -> None:
    issue(tmp_path, trustme.CA())
    config = Config(Address("localhost:0"), tmp_path, tls_cert=tmp_path / "cert.pem", tls_key=tmp_path / "key.pem")
    certificates = Certificates(config, poll_s=0.02)
    watching = asyncio.create_task(certificates.watch())
    try:
        await asyncio.sleep(0.05)
        renewed = datetime(2041, 1, 1, tzinfo=UTC)
        issue(tmp_path, trustme.CA(), renewed)
        await becomes(lambda: certificates.expires_at == renewed)
        assert not watching.done(), "further changes are read, too"
    finally:
        watching.cancel()


async def test_without_tls_there_is_nothing_to_read(tmp_path: Path) -> None:
    certificates = Certificates(Config(Address("localhost:0"), tmp_path))
    certificates.reload()
    await certificates.watch()
    assert (certificates.credentials(), certificates.expires_at) == (None, None)
