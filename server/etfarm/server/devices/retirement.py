"""Retirement: a device leaves the farm for good, and its agent is refused from then on."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from etfarm.server.access.identities import Identities, Identity
from etfarm.server.access.tokens import TokenTable
from etfarm.server.devices.errors import agent_has_devices
from etfarm.server.devices.registry import Registry
from etfarm.server.devices.runs import Runs
from etfarm.v1.device_pb2 import Device
from etfarm.wire.errors import error_for

log = structlog.get_logger()

REASON = "it is being retired"
"""The reason with which a retirement drains a device."""


@dataclass(frozen=True)
class Retired:
    """What a retirement did."""

    device: Device
    """The device as it was."""
    revoked: Sequence[str]
    """Ids of the tokens that were its agent's alone."""
    others: Sequence[str]
    """Ids of its agent's other devices, because of which the agent stays admitted."""
    ended: Sequence[str]
    """The attempts that were ended."""


class Retirement:
    """Removes devices and agents, and keeps them from coming back."""

    def __init__(self, registry: Registry, runs: Runs, identities: Identities, tokens: TokenTable) -> None:
        self._registry = registry
        self._runs = runs
        self._identities = identities
        self._tokens = tokens

    async def retire(self, key: str, *, at_once: bool, drain_s: float, principal: str) -> Retired:
        """Drain a device, let what it runs end, refuse its agent from then on, and forget the device.

        Each step can be repeated, so that a call continues what an interrupted one has begun.

        Args:
            at_once: whether to end what it runs instead of waiting for it.
            drain_s: how long what it runs may take.
            principal: who retires it.

        Raises:
            DeviceNotFound: as `Registry.get`.
            DEVICES_BUSY: what it runs did not end in time.
        """
        device = await self._registry.drain(key, REASON, principal)
        if not at_once:
            await self._wait_idle(device, drain_s)
            device = self._registry.get(device.id)  # meanwhile it may have come to another agent, or be retired already
        others = sorted({*self._registry.agents().get(device.agent_id, ())} - {device.id})
        revoked: Sequence[str] = []
        if not others:
            await self._identities.retire(device.agent_id, by=principal)
            revoked = await self._tokens.revoke_of_agent(device.agent_id)
        ended = self._registry.end_runs(device.id, "was retired")
        if others:
            self._registry.detach(device.id)
        else:
            await self._registry.end_agent(device.agent_id)
        await self._wait_idle(device, drain_s, is_ending=True)
        await self._registry.forget(device.id)
        log.info("a device is retired", device=device.id, agent=device.agent_id, tokens=revoked, others=len(others))
        return Retired(device, revoked, others, ended)

    async def remove_agent(self, key: str) -> tuple[Identity, Sequence[str]]:
        """Remove an agent without devices; return its identity as it was, and the ids of the tokens that were its alone.

        Args:
            key: the agent's id, or the name of a principal with this agent only.

        Raises:
            AGENT_NOT_FOUND, AGENT_AMBIGUOUS: as `Identities.find`.
            AGENT_HAS_DEVICES: the farm knows devices of the agent.
        """
        devices = self._registry.agents()
        identity = self._identities.find(key, devices)
        if of_agent := devices.get(identity.agent_id):
            raise agent_has_devices(identity.agent_id, sorted(of_agent))
        revoked = await self._tokens.revoke_of_agent(identity.agent_id)
        await self._identities.remove(identity.agent_id)
        await self._registry.end_agent(identity.agent_id)
        return identity, revoked

    async def _wait_idle(self, device: Device, drain_s: float, *, is_ending: bool = False) -> None:
        """Wait until a device runs nothing.

        Args:
            is_ending: whether what it runs was told to end.

        Raises:
            DEVICES_BUSY: that takes longer than `drain_s` seconds.
        """
        try:
            async with asyncio.timeout(drain_s):
                await self._runs.wait_idle(device.id)
        except TimeoutError:
            if is_ending:
                raise error_for(
                    "DEVICES_BUSY",
                    f"What {device.name} runs was ended, and is not gone within {drain_s:g} s; the device is not forgotten yet.",
                    f"Run `etfarm devices retire {device.id} --now` again in a moment: it continues.", device=device.id,
                ) from None  # fmt: skip
            raise error_for(
                "DEVICES_BUSY",
                f"What {device.name} runs did not end within {drain_s:g} s; it stays drained.",
                f"Raise --drain-timeout, or end it: `etfarm devices retire {device.id} --now`.", device=device.id,
            ) from None  # fmt: skip
