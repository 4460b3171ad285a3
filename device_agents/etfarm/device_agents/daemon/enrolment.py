"""Enrolment: an agent exchanges its one-time token for its own token, and keeps that in its data folder."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import grpc

from etfarm.device_agents.daemon.device_choice import DeviceChoice
from etfarm.device_agents.errors import FolderUnusable
from etfarm.v1 import agent_pb2
from etfarm.v1.agent_pb2_grpc import AgentServiceStub
from etfarm.wire.atomic_write import write_atomically
from etfarm.wire.channel import Access, open_channel
from etfarm.wire.errors import EtfarmError, Kind
from etfarm.wire.failover import settle
from etfarm.wire.names import ENROLMENT_PREFIX
from etfarm.wire.status import from_rpc_error

log = logging.getLogger(__name__)

TOKEN_FILE: Final = "token"
"""Name of the file in the agent's data folder that holds the token, with mode 0600."""


async def enroll(
    access: Access, folder: Path, agent_id: str, pauses: Iterable[float], choice: DeviceChoice | None, boot: str
) -> Access:
    """Return the access with the agent's own token: kept from an earlier enrolment, or obtained for an enrolment token.

    A token that is not for enrolment is used as it is. Without a token, that of an earlier enrolment at the same server is used.
    A refusal leaves the enrolment token as it is.

    Args:
        folder: the agent's data folder.
        choice: the id of the device, which a refusal may change; None if the agent does not serve its machine.
        boot: the id of this machine's boot.
        pauses: seconds to wait before each retry while the server does not answer.

    Raises:
        EtfarmError: the server refuses the enrolment.
        FolderUnusable: the token cannot be written to the data folder.
    """
    path = folder / TOKEN_FILE
    is_enrolment = access.token.startswith(ENROLMENT_PREFIX)
    if access.token and not is_enrolment:
        return access
    if (kept := _kept_token(path, access)) is not None:
        return dataclasses.replace(access, token=kept)
    if not is_enrolment:
        return access
    token = await _exchange(access, agent_id, pauses, choice, boot)
    _keep(path, access, token)
    log.info("enrolled as agent %s; its token is in %s", agent_id, path)
    return dataclasses.replace(access, token=token)


async def _exchange(access: Access, agent_id: str, pauses: Iterable[float], choice: DeviceChoice | None, boot: str) -> str:
    """Exchange the enrolment token for the agent's own token and return that one."""
    for pause in pauses:
        request = agent_pb2.EnrollAgentRequest(agent_id=agent_id, device_ids=[] if choice is None else [choice.id], boot_id=boot)
        async with open_channel(access) as channel:
            await settle(channel)
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


def _kept_token(path: Path, access: Access) -> str | None:
    """Return the token of an earlier enrolment at this server; None without one, or if there is a new enrolment token."""
    try:
        kept = json.loads(path.read_bytes())
        server, token, enrolment = str(kept["server"]), str(kept["token"]), str(kept["enrolment_sha256"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("%s cannot be read: %s", path, error)
        return None
    # A token must not be sent to another server than the one that gave it.
    if server != access.server or (access.token and enrolment != _sha256(access.token)):
        return None
    return token


def kept_access(folder: Path) -> Access | None:
    """Return the access with which an agent enrolled, without a CA; None if the data folder has no token."""
    try:
        kept = json.loads((folder / TOKEN_FILE).read_bytes())
        return Access(str(kept["server"]), str(kept["token"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _keep(path: Path, access: Access, token: str) -> None:
    """Write the token for the next start, readable by the agent's user alone."""
    document = {"server": access.server, "token": token, "enrolment_sha256": _sha256(access.token)}
    try:
        write_atomically(path, json.dumps(document).encode(), durable=True, mode=0o600)
    except OSError as error:
        raise FolderUnusable(path.parent, error.strerror or str(error)) from None


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
