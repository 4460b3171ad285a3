"""Enrolment: an agent exchanges its one-time token for its own token, and keeps that in its data folder with the farm's id.

With TLS, the token is for the farm, whose servers prove that they know it (`farm_channel`); without, it is for the address.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Final

import grpc

from etfarm.device_agents.daemon.data_folder import usable
from etfarm.device_agents.daemon.device_choice import DeviceChoice
from etfarm.device_agents.errors import FolderUnusable
from etfarm.v1 import agent_pb2
from etfarm.v1.agent_pb2_grpc import AgentServiceStub
from etfarm.wire.atomic_write import write_atomically
from etfarm.wire.channel import Access
from etfarm.wire.errors import EtfarmError, Kind, error_for
from etfarm.wire.farm_channel import NEW_TOKEN, can_prove, farm_channel
from etfarm.wire.farm_proof import Proofs
from etfarm.wire.names import ENROLMENT_PREFIX, OLDEST_PROTOCOL_VERSION, PROTOCOL_VERSION, TLS_CA_VARIABLE, TOKEN_VARIABLE
from etfarm.wire.status import from_rpc_error

log = logging.getLogger(__name__)

TOKEN_FILE: Final = "token"
"""Name of the file in the agent's data folder that holds the token, with mode 0600."""


@dataclass(frozen=True)
class _Kept:
    """The agent's own token, as the data folder has it."""

    server: str
    """The address where it worked last."""
    token: str
    enrolment_sha256: str
    farm_id: str = ""
    """The farm's id; empty if no server has proven it yet."""

    def write(self, path: Path) -> None:
        """Write the token for the next start, readable by the agent's user alone.

        Raises:
            FolderUnusable: the token cannot be written to the data folder.
        """
        with usable(path.parent):
            write_atomically(path, json.dumps(dataclasses.asdict(self)).encode(), durable=True, mode=0o600)


@dataclass(frozen=True)
class Enrolment:
    """How an agent connects."""

    access: Access
    withheld: EtfarmError | None = None
    """Why its own token is not used, if it has one for another address."""


async def enroll(
    access: Access, folder: Path, agent_id: str, pauses: Iterable[float], choice: DeviceChoice | None, boot: str
) -> Enrolment:
    """Return the access with the agent's own token: kept from an earlier enrolment, or obtained for an enrolment token.

    A token that is not for enrolment is used as it is. Without a token, that of an earlier enrolment is used, if `access` is for
    the same address, or if its servers can prove that they are of the same farm.
    A refusal leaves the enrolment token as it is.

    Args:
        folder: the agent's data folder.
        choice: the id of the device, which a refusal may change; None if the agent does not serve its machine.
        boot: the id of this machine's boot.
        pauses: seconds to wait before each retry while the server does not answer.

    Raises:
        EtfarmError: the server refuses the enrolment.
        TOKEN_WITHHELD: the enrolment token was exchanged before for a token that is for another address.
        FolderUnusable: the token cannot be written to the data folder.
    """
    path = folder / TOKEN_FILE
    is_enrolment = access.token.startswith(ENROLMENT_PREFIX)
    kept = _read(path)
    if access.token and not is_enrolment:
        if kept is not None and kept.token != access.token:
            log.warning("the token in %s is used, not this agent's own in %s; unset it to use that", TOKEN_VARIABLE, path)
        return Enrolment(access)
    if kept is not None and access.token and kept.enrolment_sha256 != _sha256(access.token):
        kept = None
    if kept is not None:
        # A token must not be sent to another farm than the one that gave it.
        if kept.server == access.server or (kept.farm_id and can_prove(access)):
            return Enrolment(_own_access(access, path, kept))
        withheld = _withhold(kept, access)
        if is_enrolment:
            raise withheld
        return Enrolment(access, withheld)
    if not is_enrolment:
        return Enrolment(access)
    token = await _exchange(access, agent_id, pauses, choice, boot)
    kept = _Kept(access.server, token, _sha256(access.token))
    kept.write(path)
    log.info("enrolled as agent %s; its token is in %s", agent_id, path)
    return Enrolment(_own_access(access, path, kept))


def _withhold(kept: _Kept, access: Access) -> EtfarmError:
    """Return the error of an agent whose own token is for another address than the server's, which refuses it without a token."""
    if kept.farm_id:
        why = "without TLS, nothing proves that the same farm is there"
        remedy = f"Give --tls-ca (or {TLS_CA_VARIABLE}) if the farm has a certificate, or --server {kept.server};"
    else:
        why = "the agent has not connected there since it can recognize its farm"
        remedy = f"Start it once with --server {kept.server}, without an HTTP proxy, where it learns which farm that is;"
    return error_for(
        "TOKEN_WITHHELD",
        f"This agent's token is for the server at {kept.server}, and was not sent to {access.server}: {why}.",
        f"{remedy} {NEW_TOKEN}", server=access.server, kept=kept.server,
    )  # fmt: skip


def _own_access(access: Access, path: Path, kept: _Kept) -> Access:
    """Return the access with the agent's own token, which records in the file what servers prove."""

    def proven(farm_id: str) -> None:
        nonlocal kept
        current = dataclasses.replace(kept, server=access.server, farm_id=farm_id)
        if current == kept:
            return
        if kept.farm_id and kept.server != current.server:
            log.info("the server at %s has proven to be of this agent's farm, which was at %s before", access.server, kept.server)
        try:
            current.write(path)
        except FolderUnusable as error:  # such as a full disk: the next proof tries again, and the farm is known until the end
            log.warning("the farm that the server at %s has proven to be of is not kept: %s", access.server, error.message)
            return
        kept = current

    return dataclasses.replace(access, token=kept.token, proofs=Proofs(kept.farm_id, proven))


async def _exchange(access: Access, agent_id: str, pauses: Iterable[float], choice: DeviceChoice | None, boot: str) -> str:
    """Exchange the enrolment token for the agent's own token and return that one."""
    for pause in pauses:
        request = agent_pb2.EnrollAgentRequest(
            agent_id=agent_id, device_ids=[] if choice is None else [choice.id], boot_id=boot, protocol_version=PROTOCOL_VERSION,
            oldest_protocol_version=OLDEST_PROTOCOL_VERSION, agent_version=version("etfarm"),
        )  # fmt: skip
        async with farm_channel(access) as channel:
            try:
                answer = await AgentServiceStub(channel).Enroll(request)
            except grpc.aio.AioRpcError as error:
                refusal: EtfarmError = from_rpc_error(error, server=access.server)
            else:
                return answer.token
        if choice is not None and choice.give_way(refusal):
            continue
        if refusal.kind is not Kind.UNAVAILABLE:
            raise refusal
        log.warning("%s Trying again.", refusal.message)
        await asyncio.sleep(pause)
    raise refusal


def _read(path: Path) -> _Kept | None:
    """Return the token of an earlier enrolment; None without one."""
    try:
        kept = json.loads(path.read_bytes())
        return _Kept(str(kept["server"]), str(kept["token"]), str(kept["enrolment_sha256"]), str(kept.get("farm_id", "")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("%s cannot be read: %s", path, error)
        return None


def kept_access(folder: Path) -> Access | None:
    """Return the access with which an agent enrolled, without a CA; None if the data folder has no token."""
    kept = _read(folder / TOKEN_FILE)
    return None if kept is None else Access(kept.server, kept.token, proofs=Proofs(kept.farm_id))


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
