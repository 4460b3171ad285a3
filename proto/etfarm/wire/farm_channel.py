"""Channels of an agent to its farm: with TLS, a server gets the agent's token once it has proven that it knows the token.

Python's gRPC does not show the certificate of a server, to which the proof belongs. So it is read by a handshake of its own, and
gRPC accepts no other afterwards. Further channels to a server need no other proof until its certificate is renewed.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import secrets
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

import grpc

from etfarm.v1.farm_pb2 import GetProofRequest
from etfarm.v1.farm_pb2_grpc import FarmServiceStub
from etfarm.wire.channel import Access, open_channel, parse_addresses
from etfarm.wire.errors import EtfarmError, Kind, UserError, error_for
from etfarm.wire.failover import settle
from etfarm.wire.farm_proof import METADATA, NONCE_BYTES, Proofs, hint_of, is_proof, key_of
from etfarm.wire.status import from_rpc_error

if TYPE_CHECKING:
    import ssl

_HANDSHAKE_S: Final = 5.0
_PROOF_S: Final = 10.0
_CONNECT_S: Final = 10.0
_ASK_AGAIN_S: Final = 60.0
"""Time for which a server that is not the farm's is not asked again while another one is reached, or while none has to prove."""
_AWAY_S: Final = 5.0
"""The same for a server that could not be asked."""
_UNSEEN: Final = 5
"""Number of times in a row that the certificate of a server that gRPC reaches is not seen, before an HTTP proxy is the reason: a
server that restarts or is overloaded may miss a few."""
NEW_TOKEN: Final = "otherwise enrol the agent again, with the ETFARM_TOKEN of a new `etfarm tokens create NAME --agent`."
"""The last remedy of every refusal."""


class FarmNotProven(UserError):
    """A server that does not prove to be of the farm that the agent's token belongs to."""

    reason = "FARM_NOT_PROVEN"
    kind = Kind.UNAUTHENTICATED

    def __init__(self, server: str, why: str, remedy: str, **metadata: str) -> None:
        super().__init__(f"The server at {server} {why}.", f"{remedy}; {NEW_TOKEN}", address=server, **metadata)


@asynccontextmanager
async def farm_channel(access: Access) -> AsyncIterator[grpc.aio.Channel]:
    """Open a channel to a server of the farm that answers. Without `Access.proofs`, it is any at the address.

    Raises:
        FarmNotProven: no server proves to be the farm's.
        EtfarmError: no server can be asked for a proof; or as `open_channel`.
    """
    async with await _open(access) as channel:
        yield channel


async def _open(access: Access) -> grpc.aio.Channel:
    proofs = access.proofs
    if proofs is not None and proofs.farm_id and can_prove(access):
        return await _open_proven(access, proofs)
    if proofs is not None and not proofs.farm_id:
        # Which farm is at the address that the token is bound to. It gets the token in any case.
        await _prove(access, proofs, _not_asked(proofs, _addresses(access)))
        if proofs.certificates:
            return await _open_proven(access, proofs)
    async with _opened(open_channel(access)) as channel:
        await settle(channel)
        return channel


def can_prove(access: Access) -> bool:
    """Return whether servers at the address can prove anything: a proof without TLS could be passed on by anybody."""
    return access.tls_ca is not None and not any(address.text.startswith("unix:") for address in parse_addresses(access.server))


async def _open_proven(access: Access, proofs: Proofs) -> grpc.aio.Channel:
    """Open a channel to the servers that have proven to be the farm's."""
    addresses = _addresses(access)
    missing = [address for address in addresses if address not in proofs.certificates]
    if len(missing) < len(addresses):
        missing = _not_asked(proofs, missing)
    errors = await _prove(access, proofs, missing)
    known = {address: proofs.certificates[address] for address in addresses if address in proofs.certificates}
    if not known:
        raise _worst(errors)
    async with _opened(open_channel(access, known)) as channel:
        if await _is_reached(channel):
            return channel
        # The certificates may have been renewed, or a server that was away may have taken over.
        errors = await _prove(access, proofs, addresses)
        renewed = {address: proofs.certificates[address] for address in addresses if address in proofs.certificates}
        if renewed == known:
            if errors and isinstance(error := _worst(errors), FarmNotProven):
                raise error
            return channel  # its calls say why it cannot connect
        await channel.close()
    async with _opened(open_channel(access, renewed)) as channel:
        await settle(channel)
        return channel


@asynccontextmanager
async def _opened(channel: grpc.aio.Channel) -> AsyncIterator[grpc.aio.Channel]:
    """Yield a channel, and close it if the block fails."""
    try:
        yield channel
    except BaseException:
        await channel.close()
        raise


def _addresses(access: Access) -> list[str]:
    return [address.text for address in parse_addresses(access.server)]


def _not_asked(proofs: Proofs, addresses: Iterable[str]) -> list[str]:
    """Return the addresses whose servers were not asked recently."""
    now_s = time.monotonic()
    return [address for address in addresses if proofs.ask_again_s.get(address, now_s) <= now_s]


def _worst(errors: list[EtfarmError]) -> EtfarmError:
    """Return the error that decides: a server that cannot be asked now may be the farm's. It also says what another answered."""
    refusal = next((error for error in errors if isinstance(error, FarmNotProven)), None)
    away = next((error for error in errors if not isinstance(error, FarmNotProven)), None)
    if refusal is None or away is None:
        return errors[0]
    away.message = f"{away.message} {refusal.message}"
    away.advise(f"{away.remedy} {refusal.remedy}".strip())
    return away


async def _is_reached(channel: grpc.aio.Channel) -> bool:
    """Return whether a channel is connected, after its servers had time to accept."""
    await settle(channel)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_CONNECT_S):
            while (state := channel.get_state(try_to_connect=True)) is not grpc.ChannelConnectivity.READY:
                if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                    return False
                await channel.wait_for_state_change(state)
            return True
    return False


async def _prove(access: Access, proofs: Proofs, addresses: Iterable[str]) -> list[EtfarmError]:
    """Ask servers for proofs, and record them; return why the others have none."""

    async def prove(address: str) -> EtfarmError | None:
        try:
            farm_id, certificate = await _ask(dataclasses.replace(access, server=address), proofs)
            if proofs.farm_id and farm_id != proofs.farm_id:
                raise FarmNotProven(
                    address,
                    "is of a farm that was restored from a backup of this agent's farm, so that the token was not sent",
                    "Give --server an address of its own farm, or restore the backup with --keep-identity if that is gone",
                    farm=proofs.farm_id,
                    other=farm_id,
                )
        except EtfarmError as error:
            if isinstance(error, FarmNotProven) or proofs.certificates:
                pause_s = _ASK_AGAIN_S if isinstance(error, FarmNotProven) else _AWAY_S
                proofs.ask_again_s[address] = time.monotonic() + pause_s
            return error
        proofs.prove(farm_id, address, certificate)
        return None

    return [error for error in await asyncio.gather(*map(prove, addresses)) if error is not None]


async def _ask(access: Access, proofs: Proofs) -> tuple[str, bytes]:
    """Ask the server at one address for a proof; return its farm's id and its certificate (PEM; empty without TLS).

    Raises:
        FarmNotProven: it does not prove that it knows the token.
        EtfarmError: it cannot be asked.
    """
    key, nonce, former = key_of(access.token), secrets.token_bytes(NONCE_BYTES), b""
    request = GetProofRequest(hint=hint_of(key), nonce=nonce).SerializeToString()
    while True:
        certificate = await _read_certificate(access) if can_prove(access) else b""
        pinned = {access.server: _pem(certificate)} if certificate else None
        if pinned is not None and proofs.certificates.get(access.server) == pinned[access.server]:
            return proofs.farm_id, pinned[access.server]
        async with open_channel(dataclasses.replace(access, token="", project=""), pinned) as channel:
            try:
                proof = await FarmServiceStub(channel).GetProof(
                    GetProofRequest(), metadata=((METADATA, request),), timeout=_PROOF_S
                )
            except grpc.aio.AioRpcError as error:
                raise _refusal(error, access.server) from None
        digest = hashlib.sha256(certificate).digest() if certificate else b""
        if is_proof(proof.mac, key, nonce, proof.server_nonce, proof.farm_id, digest) and proof.farm_id:
            return proof.farm_id, _pem(certificate) if certificate else b""
        if not certificate or certificate == former:
            if proof.farm_id != proofs.farm_id:
                raise _other_farm(access, proofs, proof.farm_id)
            raise FarmNotProven(
                access.server,
                "does not prove that it knows this agent's token, which was not sent: the token was revoked, as of a board "
                "that was retired, or something between them has a certificate of its own",
                "Give --server and --tls-ca of the farm's own server",
                farm=proofs.farm_id,
            )
        former = certificate  # it may have been renewed between the two connections


async def refused_by_farm(access: Access, refusal: EtfarmError) -> EtfarmError:
    """Return why a server without TLS, which proves nothing beforehand, does not know the agent's token."""
    proofs = access.proofs
    if proofs is None or not proofs.farm_id or can_prove(access):
        return refusal
    for error in await _prove(access, Proofs(proofs.farm_id), _addresses(access)):
        if error.metadata.get("other"):
            return error
    return refusal


def _other_farm(access: Access, proofs: Proofs, other: str) -> FarmNotProven:
    return FarmNotProven(
        access.server,
        "is of another farm than this agent, whose token it does not know",
        "Give --server an address of the farm that the agent enrolled at",
        farm=proofs.farm_id,
        other=other,
    )


def _refusal(error: grpc.aio.AioRpcError, server: str) -> EtfarmError:
    if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
        return from_rpc_error(error, server=server)
    return FarmNotProven(
        server, "is of a version that cannot prove that it knows this agent's token, which was not sent", "Update the server"
    )


async def _read_certificate(access: Access) -> bytes:
    """Return the certificate (DER) of the server at one address, which an authority of `Access.tls_ca` has signed.

    The host's name in it is for gRPC to check.

    Raises:
        FarmNotProven: gRPC has reached the server several times, while its certificate was never seen.
        EtfarmError: the server cannot be reached at the moment, or its certificate is not trusted.
    """
    import ssl  # only with TLS: it takes 3 MB

    host, _, port = access.server.rpartition(":")
    try:
        async with asyncio.timeout(_HANDSHAKE_S):
            _, writer = await asyncio.open_connection(
                host.strip("[]"), int(port), ssl=_context(access), server_hostname=host.strip("[]")
            )
    except (OSError, TimeoutError, ssl.SSLError, UnicodeError) as error:
        # gRPC fails in the same way, and its failures have sentences.
        async with open_channel(dataclasses.replace(access, token="", project="")) as channel:
            try:
                await FarmServiceStub(channel).GetProof(GetProofRequest(), timeout=_PROOF_S)
            except grpc.aio.AioRpcError as failure:
                if failure.code() is grpc.StatusCode.UNAVAILABLE:
                    raise from_rpc_error(failure, server=access.server) from None
        why = f"does not show this agent its certificate ({error or 'no answer in time'}), so that the token was not sent"
        remedy = "Let the agent connect to it without an HTTP proxy"
        proofs = access.proofs
        assert proofs is not None  # nothing has to be proven without
        proofs.unseen[access.server] = unseen = proofs.unseen.get(access.server, 0) + 1
        if unseen < _UNSEEN or proofs.certificates:
            raise error_for(
                "SERVER_UNREACHABLE", f"The server at {access.server} {why}.", f"{remedy}, if it stays so.", server=access.server
            ) from None
        raise FarmNotProven(access.server, why, remedy) from None
    if access.proofs is not None:
        access.proofs.unseen.pop(access.server, None)
    try:
        certificate = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        assert isinstance(certificate, bytes)
        return certificate
    finally:
        writer.transport.abort()


def _context(access: Access) -> ssl.SSLContext:
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN  # as gRPC: --tls-ca may be the server's own certificate
    context.set_alpn_protocols(["h2"])
    context.load_verify_locations(access.tls_ca)
    if access.tls_cert is not None and access.tls_key is not None:
        context.load_cert_chain(access.tls_cert, access.tls_key)
    return context


def _pem(certificate: bytes) -> bytes:
    import ssl

    return ssl.DER_cert_to_PEM_cert(certificate).encode()
