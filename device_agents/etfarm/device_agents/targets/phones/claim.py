"""Exclusive use of a phone and its liveness: a shell on the phone that echoes its input and holds a lock.

The phone itself holds the lock, which ends with the shell: a killed agent leaves the phone free, and two agents cannot serve one
phone, whatever machines they run on. The echo distinguishes a live link from one that adb only believes to be alive, and starts
no process on the phone.
"""

from __future__ import annotations

import asyncio
import shlex
from contextlib import suppress
from typing import Final, Self

from etfarm.device_agents.adb import AdbServer, PhoneGone, PhoneSilent, ShellProcess
from etfarm.device_agents.targets.phones.errors import PhoneRefused
from etfarm.wire.errors import DeviceError, error_for

_TAKEN: Final = 75
_FIRST_S: Final = 10.0
"""Deadline in seconds for a few small programs on the phone; no longer than a probe takes to detect a dead link."""


def _script(root: str, owner: str) -> str:
    # The lock is on stderr, because shells close other descriptors before they run a program. A phone without flock is not
    # locked.
    return (
        f"mkdir -p {shlex.quote(root)} && cd {shlex.quote(root)} || exit 1; "
        f"if command -v flock >/dev/null; then exec 2>>lock; flock -n 2 || {{ cat owner; exit {_TAKEN}; }}; fi; "
        f"echo {shlex.quote(owner)} $$ 2>&1 >owner && echo mine && exec cat"
    )


def _end_script(root: str, pid: int) -> str:
    # A killed shell keeps its lock, which is its stderr, until the kernel has ended it.
    return (
        f'[ "$(readlink /proc/{pid}/cwd)" = {shlex.quote(root)} ] && kill -9 -{pid}; '
        f"while [ -e /proc/{pid}/fd/2 ]; do sleep 0.1; done"
    )


class LivenessProbe:
    """A shell on a phone that answers as long as the phone lives, until `release`. `open` needs no folder on the phone."""

    def __init__(self, process: ShellProcess, serial: str) -> None:
        self._process = process
        self.serial = serial
        self._count = 0

    @classmethod
    async def open(cls, adb: AdbServer, serial: str) -> Self:
        """Start the shell on the phone.

        Raises:
            DeviceError: the phone is disconnected or does not answer.
        """
        return cls(await adb.shell(serial, "exec cat"), serial)

    async def ended(self) -> None:
        """Wait until the shell has ended, because the phone or its link is lost."""
        with suppress(DeviceError):
            await self._process.wait()

    async def check(self, within_s: float) -> None:
        """Wait for the phone's answer.

        Raises:
            PhoneGone: the link ended.
            PhoneSilent: the phone did not answer within that time.
        """
        self._count += 1
        sent = b"%d\n" % self._count
        try:
            async with asyncio.timeout(within_s):
                self._process.stdin.write(sent)
                await self._process.stdin.drain()
                while (line := await self._process.stdout.readline()) != sent:
                    if not line:
                        raise PhoneGone(self.serial, "its shell ended")
        except ConnectionError as error:
            raise PhoneGone(self.serial, "its shell ended") from error
        except TimeoutError as error:
            raise PhoneSilent(self.serial, "asking whether it lives", within_s) from error

    def release(self) -> None:
        """End the shell, and with it the lock, as soon as the phone notices; does nothing if the shell has ended."""
        self._process.kill()


class Claim(LivenessProbe):
    """An exclusive claim on a phone, until `release`; created by `take`."""

    @classmethod
    async def take(cls, adb: AdbServer, serial: str, root: str, owner: str, *, again: bool = False) -> Self:
        """Claim the phone.

        Args:
            adb: the adb server that knows the phone.
            serial: the phone's serial.
            root: the agent's folder on the phone.
            owner: one line that names the claiming process to people, different for each process.
            again: whether an earlier claim of this agent was just ended.

        Raises:
            PHONE_TAKEN: another agent has claimed it.
            PhoneRefused: its folder cannot be created.
            DeviceError: the phone is disconnected or does not answer.
        """
        process = await adb.shell(serial, _script(root, owner))
        try:
            async with asyncio.timeout(_FIRST_S):
                line = (await process.stdout.readline()).decode(errors="replace").strip()
                if line == "mine":
                    return cls(process, serial)
                complaint = (await process.stderr.read()).decode(errors="replace")
                code = await process.wait()
        except TimeoutError as error:
            process.kill()
            raise PhoneSilent(serial, "claiming it", _FIRST_S) from error
        except BaseException:
            process.kill()
            raise
        process.kill()
        if code == _TAKEN:
            former, _, pid = line.rpartition(" ")
            if former == owner and pid.isdigit() and not again:
                # This agent's own claim, over a dead link that the phone still considers alive.
                await adb.run(serial, _end_script(root, int(pid)), deadline_s=_FIRST_S)
                return await cls.take(adb, serial, root, owner, again=True)
            raise error_for(
                "PHONE_TAKEN",
                f"The phone {serial} is served by another agent ({former or line or 'unknown'}).",
                "Stop that one, or leave the phone to it; two at once would disturb each other's measurements.",
                serial=serial,
                owner=former or line,
            )
        raise PhoneRefused(serial, "make a folder for etfarm", complaint or line)
