"""Power cycles of hung devices: configured commands that switch a device off and on.

The server calls them, not the agents: a board that hangs takes its own agent along, and the server notices every silence,
that of phones included. A command is an argument vector without a shell. It is chosen by device ids that the operator listed,
or by labels that an admin set on the server: what an agent says about itself never selects whose power is cut.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from typing import Final

import structlog

from etfarm.server.devices.health.book import HealthBook
from etfarm.server.devices.health.standing import QUARANTINED
from etfarm.server.devices.registry import Registry
from etfarm.wire.errors import error_for

log = structlog.get_logger()

FAILED_RUNS: Final = 3
"""Number of failed health runs in a row after which a connected, quarantined device counts as hung."""

MAX_RULES: Final = 1_000
MAX_ARGUMENTS: Final = 64
POLL_S: Final = 1.0
"""Interval at which hung devices are looked for."""
_DAY: Final = timedelta(days=1)
_MAX_OUTPUT: Final = 400
"""Number of characters of a command's last output that the event keeps."""
_READ_BYTES: Final = 4 << 10
_DRAIN_S: Final = 1.0
"""Time to read what a command has printed after its end; a process that it left behind may keep its output open."""
_PLACEHOLDER: Final = re.compile(r"\{label\.([A-Za-z0-9._/-]{1,100})\}")
_PASSED_ON: Final = ("PATH", "HOME", "LANG", "TZ")
"""Environment variables that a command gets; the server's others may be secrets."""


@dataclass(frozen=True)
class PowerRule:
    """The command for some devices."""

    command: tuple[str, ...]
    """The program's absolute path, and its arguments. `{label.K}` stands for the value of a label that an admin set."""
    devices: frozenset[str] = frozenset()
    """Ids of the devices; empty for all that have the labels which `command` names."""
    after_s: float = 120.0
    """Time for which a device must have been silent: longer than an agent's restart, or a reboot."""
    timeout_s: float = 60.0
    """Time limit of the command."""
    min_interval_s: float = 900.0
    """Minimum time between two power cycles of a device: longer than it needs to boot and to be probed."""
    max_per_day: int = 6
    """Maximum number of power cycles of a device within 24 hours: more would wear it out without mending it."""

    def arguments(self, device_id: str, labels: Mapping[str, str]) -> list[str] | None:
        """Return the argument vector for a device; None if the rule does not apply to it.

        Args:
            labels: the labels that admins set for the device.
        """
        needed = {key for part in self.command for key in _PLACEHOLDER.findall(part)}
        if (self.devices and device_id not in self.devices) or not needed <= labels.keys():
            return None
        return [_PLACEHOLDER.sub(lambda match: labels[match[1]], part) for part in self.command]


def rules_of(entries: object) -> tuple[PowerRule, ...]:
    """Return the rules of the `[[power]]` tables of a TOML file.

    Raises:
        BAD_HEALTH_POLICY: a table has an unknown key, or a value of another type or range.
    """
    if not isinstance(entries, list) or len(entries) > MAX_RULES:
        raise error_for("BAD_HEALTH_POLICY", f"power must be a list of at most {MAX_RULES:,} tables: write [[power]].")
    return tuple(_rule_of(entry) for entry in entries)


def _rule_of(entry: object) -> PowerRule:
    known = [field.name for field in fields(PowerRule)]
    if not isinstance(entry, dict) or (unknown := sorted(entry.keys() - set(known))):
        names = f"{unknown[0]!r}" if isinstance(entry, dict) else repr(entry)
        raise error_for("BAD_HEALTH_POLICY", f"[[power]] has no setting {names}.", f"Settings: {', '.join(known)}.")
    command, devices = _texts(entry, "command"), _texts(entry, "devices")
    if not 1 <= len(command) <= MAX_ARGUMENTS or not command[0].startswith("/"):
        raise error_for(
            "BAD_HEALTH_POLICY",
            f"command must be 1 to {MAX_ARGUMENTS} strings, the first of them an absolute path, got {list(command)!r}.",
            'For example ["/usr/local/bin/pdu", "cycle", "7"].',
        )
    if not devices and not any(_PLACEHOLDER.search(part) for part in command):
        raise error_for(
            "BAD_HEALTH_POLICY",
            f"The power command {command[0]} names no device.",
            "Give devices = [ID, ...], or use {label.K} in the command.",
        )
    numbers: dict[str, float] = {}
    for name, least, most in (
        ("after_s", 1, 604_800), ("timeout_s", 1, 3_600), ("min_interval_s", 1, 604_800), ("max_per_day", 1, 1_000)
    ):  # fmt: skip
        value = entry.get(name, getattr(PowerRule, name))
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
            raise error_for("BAD_HEALTH_POLICY", f"{name} must be {least} to {most:,}, got {value!r}.", name=name)
        numbers[name] = value
    return PowerRule(command, frozenset(devices), **numbers)  # type: ignore[arg-type]  # max_per_day may be 2.0


def _texts(entry: Mapping[str, object], name: str) -> tuple[str, ...]:
    value = entry.get(name, [])
    if not isinstance(value, list) or not all(isinstance(each, str) and each and "\0" not in each for each in value):
        raise error_for("BAD_HEALTH_POLICY", f"{name} must be a list of strings, got {value!r}.", name=name)
    return tuple(value)


class PowerCycles:
    """The task that power-cycles hung devices, one at a time.

    A device is hung if its agent or its link went silent without a farewell and stays away for `after_s`, or if it is connected
    and quarantined, and its health runs keep failing.
    """

    def __init__(
        self,
        registry: Registry,
        book: HealthBook,
        rules: Sequence[PowerRule],
        now: Callable[[], datetime],
        *,
        poll_s: float = POLL_S,
    ) -> None:
        self._poll_s = poll_s
        self._registry = registry
        self._book = book
        self._rules = rules
        self._now = now
        self._cycles: dict[str, list[datetime]] = {}
        """Times of the power cycles of the last day, by device id."""
        self._is_loaded = False

    async def run(self) -> None:
        """Power-cycle hung devices until the task is cancelled."""
        while self._rules:
            await asyncio.sleep(self._poll_s)
            try:
                await self.load()
                for device_id, arguments, rule in self.find_hung():
                    await self.cycle(device_id, arguments, rule)
            except Exception:
                log.exception("hung devices could not be power-cycled")

    async def load(self) -> None:
        """Load the power cycles of earlier servers, which count for the limits, unless that is done."""
        if not self._is_loaded:
            for device_id, at in await self._book.power_cycles(self._now() - _DAY):
                self._cycles.setdefault(device_id, []).append(at)
            self._is_loaded = True

    def find_hung(self) -> list[tuple[str, list[str], PowerRule]]:
        """Return the devices to power-cycle now, with their commands."""
        at, absent_since = self._now(), self._registry.absent_since()
        silent_s = {device_id: (at - since).total_seconds() for device_id, since in absent_since.items()}
        failing = {device_id for device_id in self._book.known() if self._is_failing(device_id)}
        hung = []
        for device_id in sorted(silent_s.keys() | failing):
            labels = self._registry.labels_set_by_admins(device_id)
            for rule in self._rules:
                if (arguments := rule.arguments(device_id, labels)) is None:
                    continue
                is_hung = device_id in failing or silent_s[device_id] >= rule.after_s
                if is_hung and self._may_cycle(device_id, rule, at):
                    hung.append((device_id, arguments, rule))
                break  # the first rule that applies
        return hung

    def _is_failing(self, device_id: str) -> bool:
        """Return whether a device is connected, and its health runs keep failing."""
        known = self._book.of(device_id)
        is_broken = known.state == QUARANTINED and known.failed_runs >= FAILED_RUNS
        return is_broken and self._registry.is_connected(device_id)

    def _may_cycle(self, device_id: str, rule: PowerRule, at: datetime) -> bool:
        # Those in the future were recorded before the clock was set back.
        cycles = [min(each, at) for each in self._cycles.pop(device_id, ()) if at - each <= _DAY]
        if cycles:
            self._cycles[device_id] = cycles
        is_rested = not cycles or (at - cycles[-1]).total_seconds() >= rule.min_interval_s
        return is_rested and len(cycles) < rule.max_per_day

    async def cycle(self, device_id: str, arguments: Sequence[str], rule: PowerRule) -> None:
        """Call the command for a device, and record that."""
        self._cycles.setdefault(device_id, []).append(self._now())
        log.warning("power-cycling a hung device", device=device_id, command=arguments[0])
        # A server that is killed meanwhile must not forget the cycle.
        cycle = await self._book.record_power_cycle(device_id, f"{arguments[0]}: it was called")
        message, exit_code = await call(arguments, rule.timeout_s)
        await self._book.record_power_cycled(cycle, f"{arguments[0]}: {message}", exit_code)


async def call(arguments: Sequence[str], timeout_s: float) -> tuple[str, int | None]:
    """Call a command without a shell; return what happened, and its exit code if it ended in time."""
    environment = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    try:
        process = await asyncio.create_subprocess_exec(
            *arguments, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
            env=environment, cwd="/", start_new_session=True,
        )  # fmt: skip
    except (OSError, ValueError) as error:
        return f"it could not be started: {error}", None
    assert process.stdout is not None
    tail = bytearray()
    reading = asyncio.create_task(_keep_tail(process.stdout, tail), name="power command's output")
    try:
        async with asyncio.timeout(timeout_s):
            await process.wait()
        await asyncio.wait({reading}, timeout=_DRAIN_S)
    except TimeoutError:
        return f"it was killed after {timeout_s:g} s", None
    finally:
        # Also what it left behind, which shares its process group.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        reading.cancel()
        await asyncio.gather(reading, process.wait(), return_exceptions=True)
    output = tail.decode(errors="replace").strip()[-_MAX_OUTPUT:]
    return f"exit code {process.returncode}{f': {output}' if output else ''}", process.returncode


async def _keep_tail(stream: asyncio.StreamReader, tail: bytearray) -> None:
    while data := await stream.read(_READ_BYTES):
        tail += data
        del tail[:-_READ_BYTES]
