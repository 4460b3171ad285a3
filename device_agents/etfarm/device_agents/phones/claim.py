"""Who serves a phone, and whether it lives: a shell on it that holds a lock and echoes what it is sent.

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
from etfarm.device_agents.phones.errors import PhoneRefused, PhoneTaken
from etfarm.wire.errors import DeviceError

_TAKEN: Final = 75
_FIRST_S: Final = 15.0


def _script(root: str, owner: str) -> str:
    # The lock is on stderr: shells close other descriptors before they run a program. What has no flock goes without.
    return (
        f"mkdir -p {shlex.quote(root)} && cd {shlex.quote(root)} || exit 1; "
        f"if command -v flock >/dev/null; then exec 2>>lock; flock -n 2 || {{ cat owner; exit {_TAKEN}; }}; fi; "
        f"echo {shlex.quote(owner)} $$ 2>&1 >owner && echo mine && exec cat"
    )


class Claim:
    """A phone that this agent serves alone, until `release`. Made by `take`."""

    def __init__(self, process: ShellProcess, serial: str) -> None:
        self._process = process
        self._serial = serial
        self._count = 0

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
                        raise PhoneGone(self._serial, "its shell ended")
        except ConnectionError as error:
            raise PhoneGone(self._serial, "its shell ended") from error
        except TimeoutError as error:
            raise PhoneSilent(self._serial, "asking whether it lives", within_s) from error

    def release(self) -> None:
        """Gives the phone free as soon as it hears of it; harmless where it is gone."""
        self._process.kill()
