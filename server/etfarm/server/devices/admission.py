"""Rules for which agent may serve which device, and for how many devices it may bring."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from etfarm.server.devices.errors import DeviceTooLarge, TooManyDevices
from etfarm.server.devices.session import AgentSession
from etfarm.v1.device_pb2 import Device

MAX_DEVICES_OF_AGENT: Final = 1_000
"""Maximum number of devices of one agent, including offline ones."""

MAX_DEVICES_OF_PRINCIPAL: Final = 5_000
"""Maximum number of devices of all agents with tokens of one principal, which leaves capacity for others."""

MAX_DEVICES: Final = 10_000
"""Maximum number of devices of the farm, including offline ones."""

MAX_DEVICE_BYTES: Final = 128 << 10
"""Maximum size of a device's serialized description."""

USUAL_DEVICE_BYTES: Final = 12 << 10
"""Size up to which a description takes nothing of the following limit; a real device has two to four thousand bytes."""

MAX_LARGE_BYTES: Final = 64 << 20
"""Maximum size of the larger descriptions of one principal, together."""

_OF_SERVER: Final = (
    "state",
    "attempt_id",
    "attempt_ids",
    "telemetry",
    "reservation",
    "health",
    "drain",
    "projects",
    "backends",
    "operator_count",
    "runner",
    "is_runner_coming",
)
"""Fields of a device that only the server sets."""


def clear_server_fields(device: Device) -> None:
    """Clear the fields that only the server may set, which an agent must not choose for its device."""
    for name in _OF_SERVER:
        device.ClearField(name)


class DeviceAdmission:
    """The rules, as functions of the registry's current devices.

    Args:
        known: the known devices by id.
        serving: the connections by the id of the device that they serve.
        projects: the projects that a device is restricted to, by device id; a device without an entry is not restricted.
        principal_of: returns the principal that an agent identity is bound to; empty if it is not bound.
    """

    def __init__(
        self,
        known: Mapping[str, Device],
        serving: Mapping[str, AgentSession],
        projects: Mapping[str, frozenset[str]],
        principal_of: Callable[[str], str],
    ) -> None:
        self._known = known
        self._serving = serving
        self._projects = projects
        self._principal_of = principal_of

    def may_serve(self, session: AgentSession, device_id: str) -> bool:
        """Return whether the agent may serve the device: a new one, its own, or one of another agent of the same principal."""
        known = self._known.get(device_id)
        # One without an agent was damaged in the database.
        if session.is_admin or known is None or known.agent_id in ("", session.agent_id):
            return True
        return self._principal_of(known.agent_id) == session.principal

    def rival(self, device: Device, agent_id: str) -> AgentSession | None:
        """Return the connection of another live agent that serves the device and continues to; None without one.

        Copies of a disk share the machine id from which device ids are derived. If two agents see the same phone, the one that
        can serve it takes precedence, since a phone may only authorize one of them.
        """
        serving = self._serving.get(device.id)
        if serving is None or serving.agent_id == agent_id or not serving.is_alive():
            return None
        return serving if device.HasField("problem") or not self._known[device.id].HasField("problem") else None

    def require_room(self, session: AgentSession, devices: Sequence[Device]) -> None:
        """Raise an error if new devices would exceed a limit.

        Raises:
            DeviceTooLarge: the description of a device is too large.
            TooManyDevices: the agent or the farm would have too many.
        """
        for device in devices:
            if (size := device.ByteSize()) > MAX_DEVICE_BYTES:
                raise DeviceTooLarge(
                    f"The description of device {device.id} must have at most {MAX_DEVICE_BYTES} bytes, got {size}.",
                    "Give it fewer or shorter labels.", device=device.id, limit=MAX_DEVICE_BYTES, got=size,
                )  # fmt: skip
        large = {device.id: size for device in devices if (size := device.ByteSize()) > USUAL_DEVICE_BYTES}
        if large and not session.is_admin:
            known_sizes = {device.id: device.ByteSize() for device in self._devices_of(session)}
            total = sum(size for size in (known_sizes | large).values() if size > USUAL_DEVICE_BYTES)
            if total > MAX_LARGE_BYTES:
                raise DeviceTooLarge(
                    f"The descriptions of {session.principal}'s devices with over {USUAL_DEVICE_BYTES} bytes must have at most "
                    f"{MAX_LARGE_BYTES} bytes together, got {total}.",
                    "Give devices fewer or shorter labels.", device=next(iter(large)), limit=MAX_LARGE_BYTES, got=total,
                )  # fmt: skip
        new = {device.id for device in devices} - self._known.keys()
        if not new:
            return
        of_agent = sum(device.agent_id == session.agent_id for device in self._known.values())
        of_token = 0 if session.is_admin else sum(1 for _ in self._devices_of(session))
        for limit, known, owner in (
            (MAX_DEVICES_OF_AGENT, of_agent, "the agent"),
            (MAX_DEVICES_OF_PRINCIPAL, of_token, session.principal),
            (MAX_DEVICES, len(self._known), "the farm"),
        ):
            if known + len(new) > limit:
                raise TooManyDevices(
                    f"{owner} would have more than {limit:,} devices; {known:,} are already registered.",
                    "Ask an admin to remove offline ones with `etfarm devices forget`.", limit=limit, known=known,
                )  # fmt: skip

    def projects_of_new(self, session: AgentSession) -> frozenset[str]:
        """Return the projects that new devices of an agent are restricted to; empty for no restriction.

        If all existing devices of the agent's principal are restricted, new devices get the union of their projects. Otherwise
        the agent could use a new device id to receive other projects' programs. An admin's agent is trusted.
        """
        projects: set[str] = set()
        if session.is_admin or not self._projects:
            return frozenset()
        for device in self._devices_of(session):
            if device.id not in self._projects:
                return frozenset()
            projects |= self._projects[device.id]
        return frozenset(projects)

    def _devices_of(self, session: AgentSession) -> Iterator[Device]:
        """Yield the known devices of the agent, and those of other agents of the same principal."""
        for device in self._known.values():
            if device.agent_id == session.agent_id or (
                session.principal and self._principal_of(device.agent_id) == session.principal
            ):
                yield device
