"""Who serves a phone, and whether it lives: a shell on it that echoes what it is sent, and holds a lock.

The lock is the phone's own and ends with the shell, so that an agent that was killed leaves the phone free, and two agents
cannot serve one phone, from whatever machines. The echo tells a live link from one that adb only takes for alive, and costs the
phone no new process.
"""

from __future__ import annotations

import asyncio
import shlex
from contextlib import suppress
from typing import Final, Self

from etfarm.device_agents.adb import AdbServer, PhoneGone, PhoneSilent, ShellProcess
from etfarm.device_agents.targets.phones.errors import PhoneRefused, PhoneTaken
from etfarm.wire.errors import DeviceError

_TAKEN: Final = 75
_FIRST_S: Final = 10.0
"""For a few small programs of the phone's; no longer than a probe takes to find a dead link."""


def _script(root: str, owner: str) -> str:
    # The lock is on stderr: shells close other descriptors before they run a program. What has no flock goes without.
    return (
        f"mkdir -p {shlex.quote(root)} && cd {shlex.quote(root)} || exit 1; "
        f"if command -v flock >/dev/null; then exec 2>>lock; flock -n 2 || {{ cat owner; exit {_TAKEN}; }}; fi; "
        f"echo {shlex.quote(owner)} $$ 2>&1 >owner && echo mine && exec cat"
    )


class Pulse:
    """Tells whether a phone lives, until `release`. Made by `feel`, which needs no place on the phone."""

    def __init__(self, process: ShellProcess, serial: str) -> None:
        self._process = process
        self.serial = serial
        self._count = 0

    @classmethod
    async def feel(cls, adb: AdbServer, serial: str) -> Self:
        """Begins to.

        Raises:
            DeviceError: the phone is gone, or says nothing.
        """
        return cls(await adb.shell(serial, "exec cat"), serial)

    async def ended(self) -> None:
        """Returns when the shell has ended: the phone, or its link, is gone."""
        with suppress(DeviceError):
            await self._process.wait()

    async def probe(self, within_s: float) -> None:
        """Whether the phone answers.

        Raises:
            PhoneGone: the link ended.
            PhoneSilent: it did not within that time.
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
        """Ends the shell, and with it what it holds, as soon as the phone hears of it; harmless where it is gone."""
        self._process.kill()


class Claim(Pulse):
    """A phone that this agent serves alone, until `release`. Made by `take`."""

    @classmethod
    async def take(cls, adb: AdbServer, serial: str, root: str, owner: str, *, again: bool = False) -> Self:
        """Claims the phone.

        Args:
            root: the agent's folder there.
            owner: one line that tells people who claims it; another process's is another one.
            again: an own claim of before was ended.

        Raises:
            PhoneTaken: another agent has it.
            PhoneRefused: its folder cannot be made.
            DeviceError: it is gone, or says nothing.
        """
        process = await adb.shell(serial, _script(root, owner))
        try:
            async with asyncio.timeout(_FIRST_S):
                line = (await process.stdout.readline()).decode(errors="replace").strip()
                if line == "mine":
                    return cls(process, serial)
                told = (await process.stderr.read()).decode(errors="replace")
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
                # This agent's own, over a link that is dead and that the phone takes for alive.
                await adb.run(
                    serial, f'[ "$(readlink /proc/{pid}/cwd)" = {shlex.quote(root)} ] && kill -9 -{pid}', deadline_s=_FIRST_S
                )
                return await cls.take(adb, serial, root, owner, again=True)
            raise PhoneTaken(serial, former or line)
        raise PhoneRefused(serial, "make a folder for etfarm", told or line)
