"""The adb server, asked: its phones, their coming and going, commands and files on them."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from etfarm.device_agents.adb.address import DEFAULT_ADDRESS, server_address
from etfarm.device_agents.adb.errors import (
    AdbMissing,
    AdbRefused,
    AdbServerMissing,
    PhoneAnswerTooLong,
    PhoneFileMissing,
    PhoneSilent,
)
from etfarm.device_agents.adb.link import Link
from etfarm.device_agents.adb.phones import Phone, phones_of
from etfarm.device_agents.adb.shell import MAX_LINE_BYTES, ShellProcess
from etfarm.device_agents.adb.sync import OnProgress, RemoteFile, Sync

SILENCE_S: Final = 20.0
"""Without a byte of a transfer, after which the link counts as dead."""
RECHECK_S: Final = 3.0
"""A local question of a few hundred bytes; short beside what a person waits who has unplugged a phone."""
_ANSWER_S: Final = 10.0
_CONNECT_S: Final = 30.0
"""adb itself gives a phone 10 s to take the connection, and then waits for its handshake."""
_START_S: Final = 30.0
_READ_BYTES: Final = 1 << 16
_OVER_TCP: Final = re.compile(r".+:\d+")


@dataclass(frozen=True)
class Completed:
    """A command that ended."""

    stdout: bytes
    stderr: bytes
    exit_code: int
    """See `ShellProcess.returncode`."""


class AdbServer:
    """The adb server at an address. It holds no connection: each call makes its own, and any number may be under way.

    Every call may raise AdbServerMissing. Those about one phone may raise PhoneGone (adb does not know it, or it vanished),
    AdbRefused (`device offline`, `device unauthorized`, ...) and PhoneSilent (it did not answer in time).
    """

    def __init__(self, address: str | None = None, *, answer_s: float = _ANSWER_S) -> None:
        """Does nothing yet.

        Args:
            address: `tcp:HOST:PORT`, `tcp:PORT`, `localfilesystem:PATH` or `localabstract:NAME`; without one that of
                `server_address`, which is read now.
            answer_s: for each answer of the server, and for a phone to begin a command or a transfer.
        """
        self.address = server_address() if address is None else address
        self._answer_s = answer_s

    async def version(self) -> int:
        """The protocol version of the server: 41 of every adb since 2018."""
        text = await self._text("host:version")
        try:
            return int(text, 16)
        except ValueError as error:
            raise AdbServerMissing(self.address, f"its version is {text!r}, which is no adb") from error

    async def phones(self) -> tuple[Phone, ...]:
        """The phones that the server knows now, in its order, whatever their state."""
        return phones_of(await self._text("host:devices-l"))

    async def track(self, *, recheck_s: float = RECHECK_S) -> AsyncGenerator[tuple[Phone, ...], None]:
        """The phones now, then the whole list again at each change, for ever.

        Close it when done: `async with contextlib.aclosing(server.track()) as lists`. A link that is dead changes nothing.

        Args:
            recheck_s: after which the list is asked for without having been told of a change.

        Raises:
            AdbServerMissing: the server is not there, or was stopped meanwhile.
        """
        link = await self._ask("host:track-devices-l")
        told = asyncio.create_task(link.text(), name="adb's list of phones")
        latest = None
        try:
            while True:
                # adb 29 sets a phone whose connection broke to offline without telling, until it is back or given up.
                await asyncio.wait({told}, timeout=None if latest is None else recheck_s)
                if told.done():
                    phones = phones_of(told.result())
                    told = asyncio.create_task(link.text(), name="adb's list of phones")
                else:
                    phones = await self.phones()
                if phones != latest:
                    latest = phones
                    yield phones
        finally:
            link.abort()
            told.cancel()
            await asyncio.wait({told})
            if not told.cancelled():
                told.exception()  # the connection's end, which nobody waits for any more

    async def connect(self, host_port: str) -> str:
        """Makes the server connect to a phone in the network; its serial. Harmless where it is connected.

        Raises:
            AdbRefused: it cannot: nobody listens there, or the phone does not know this machine's key.
        """
        text = await self._text(f"host:connect:{host_port}", serial=host_port, seconds=_CONNECT_S)
        # A failure, too, comes with OKAY.
        if (found := re.match(r"(?:already )?connected to (\S+)", text)) is None:
            raise AdbRefused(host_port, text)
        return found[1]

    async def disconnect(self, host_port: str) -> bool:
        """Makes the server forget a phone in the network; whether it knew it."""
        try:
            await self._text(f"host:disconnect:{host_port}")
        except AdbRefused as error:
            if "no such device" in error.text:
                return False
            raise
        return True

    async def reconnect(self, serial: str) -> None:
        """Gives a phone a new connection, which is the remedy for a dead one. The phone is offline for a moment: see `track`.

        One in the network that does not answer takes adb 10 s. It stays in the list as offline, and is a device again when it
        answers after all.

        Raises:
            AdbRefused, PhoneGone: it cannot be reached.
        """
        if _OVER_TCP.fullmatch(serial):
            await self.disconnect(serial)
            await self.connect(serial)
        else:
            await self._text(f"host-serial:{serial}:reconnect", serial=serial)

    async def features(self, serial: str) -> frozenset[str]:
        """What the phone's adbd can do, such as `shell_v2` and `stat_v2`."""
        return frozenset((await self._text(f"host-serial:{serial}:features", serial=serial)).strip().split(","))

    async def shell(self, serial: str, command: str, *, limit: int = MAX_LINE_BYTES) -> ShellProcess:
        """Starts a command line of the phone's shell, without a terminal. The phone needs the feature `shell_v2` (Android 7).

        It ends for us when nobody on the phone holds its outputs open any more: redirect those of what stays in the background.
        When the connection closes, adbd sends SIGHUP to the shell, and not to what it has forked: `exec` what shall end with it.

        Args:
            command: up to 65 kB, 4 kB on old phones; longer ones go as input to `sh`.
            limit: of a line, in bytes; each of the two outputs holds twice that at most while nobody reads it.

        Raises:
            AdbRefused, PhoneGone, PhoneSilent: it was not started; after PhoneSilent it may still start.
        """
        link = await self._open(serial, f"shell,v2,raw:{command}", f"starting {command[:40]!r}")
        return ShellProcess(link, serial, command, limit)

    async def run(
        self, serial: str, command: str, *, input: bytes = b"", deadline_s: float, max_bytes: int = 16 << 20
    ) -> Completed:
        """Runs a whole command: for facts, fetched many in one command since each takes a round trip or more.

        Args:
            input: all that it reads; it sees the end of it.
            deadline_s: for all of it. What then still runs on the phone is hung up on.
            max_bytes: of stdout and stderr together.

        Raises:
            PhoneSilent: it did not end within the deadline.
            PhoneAnswerTooLong: it wrote more than `max_bytes`.
            AdbRefused, PhoneGone: it could not be started, or its end is not known.
        """
        during = f"running {command[:40]!r}"
        try:
            async with asyncio.timeout(deadline_s):
                # To say that there is no input races with the end of a short command, and what reaches a connection that was
                # closed at the other end takes with it what was not read from it yet.
                line = command if input else f"exec </dev/null\n{command}"
                process = await self.shell(serial, line, limit=_READ_BYTES)
                try:
                    return await _complete(process, input, during, max_bytes)
                finally:
                    process.kill()
        except TimeoutError as error:
            raise PhoneSilent(serial, during, deadline_s) from error

    async def stat(self, serial: str, remote: str) -> RemoteFile | None:
        """What is at `remote` on the phone, links followed; None where nothing is.

        Raises:
            PhoneFileRefused: the phone does not say.
        """
        async with self._sync(serial, self._answer_s) as (sync, v2):
            return await sync.stat(remote, v2=v2)

    async def push(
        self,
        serial: str,
        source: Path | bytes,
        remote: str,
        mode: int = 0o644,
        *,
        mtime_s: int | None = None,
        on_progress: OnProgress | None = None,
        silence_s: float = SILENCE_S,
    ) -> int:
        """Writes a file on the phone, making the folders above it; the bytes that were sent.

        A file of that name is written over, not replaced: push beside it and rename what others may read or run. Cancelled, it
        closes the connection at once. adbd removes what it has of a file that does not come whole, a moment after this ended.

        Args:
            mode: its permissions; adbd gives those of the owner to everybody.
            mtime_s: since the epoch; now, if None.
            on_progress: after each 64 KiB. It may run ahead of the phone by what the buffers on the way take.
            silence_s: how long the link may take for 64 KiB, and for what the buffers hold in the end.

        Raises:
            PhoneFull: the phone has no room.
            PhoneFileRefused: it does not write there.
            OSError: `source` cannot be read.
        """
        async with self._sync(serial, silence_s) as (sync, _):
            return await sync.push(source, remote, mode, int(time.time()) if mtime_s is None else mtime_s, on_progress)

    async def pull(
        self,
        serial: str,
        remote: str,
        path: Path,
        *,
        on_progress: OnProgress | None = None,
        silence_s: float = SILENCE_S,
        max_bytes: int | None = None,
    ) -> int:
        """Reads a file of the phone into `path`; the bytes that came.

        `path` appears whole or not at all, in place of what was there: what came of a pull that fails or is cancelled is removed.

        Raises:
            PhoneFileMissing: the phone has no such file.
            PhoneFileRefused: it does not let it be read.
            PhoneAnswerTooLong: it has more than `max_bytes`.
            OSError: `path` cannot be written.
        """
        partial = path.with_name(f".{path.name}.{os.urandom(4).hex()}.partial")
        try:
            with partial.open("xb") as file:
                async with self._sync(serial, silence_s) as (sync, v2):
                    told = await sync.stat(remote, v2=v2)
                    if told is None:
                        raise PhoneFileMissing(serial, remote, "No such file or directory")
                    done = await sync.pull(remote, file, told.size_bytes, on_progress, max_bytes)
            partial.replace(path)
            return done
        finally:
            partial.unlink(missing_ok=True)

    async def start_server(self) -> None:
        """Makes sure that a server runs at the default address, with `adb start-server`; does nothing where one answers.

        Raises:
            AdbServerMissing: none answers at this address, which is not the default one.
            AdbMissing: adb is not installed, or did not start its server; its words are in the message.
        """
        try:
            await self.version()
            return
        except AdbServerMissing:
            if self.address not in (DEFAULT_ADDRESS, "tcp:localhost:5037", "tcp:5037"):
                raise
        program = shutil.which("adb")
        if program is None:
            raise AdbMissing("no program `adb` is on PATH")
        # The server stays for others: our tokens are none of its business.
        environment = {key: value for key, value in os.environ.items() if not key.startswith("ETFARM_")}
        try:
            process = await asyncio.create_subprocess_exec(
                program,
                "start-server",
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env=environment,
            )
        except OSError as error:
            raise AdbMissing(f"{program}: {error.strerror or error}") from error
        try:
            async with asyncio.timeout(_START_S):
                told, _ = await process.communicate()
        except TimeoutError as error:
            raise AdbMissing(f"`adb start-server` did not end within {_START_S:g} s") from error
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode != 0:
            raise AdbMissing(" ".join(told.decode(errors="replace").split()) or f"it ended with {process.returncode}")
        await self.version()

    async def _text(self, service: str, *, serial: str = "", seconds: float | None = None) -> str:
        """The text that the server answers, which tells it at once."""
        seconds = self._answer_s if seconds is None else seconds
        try:
            async with asyncio.timeout(seconds):
                link = await Link.open(self.address)
                try:
                    await link.request(service, serial)
                    return await link.text()
                finally:
                    link.abort()
        except TimeoutError as error:
            if serial:
                raise PhoneSilent(serial, f"adb's {service}", seconds) from error
            raise AdbServerMissing(self.address, f"it did not answer within {seconds:g} s") from error

    async def _ask(self, service: str) -> Link:
        """A connection on which the server has begun a service of its own."""
        try:
            async with asyncio.timeout(self._answer_s):
                return await self._begin([(service, "")])
        except TimeoutError as error:
            raise AdbServerMissing(self.address, f"it did not answer within {self._answer_s:g} s") from error

    async def _open(self, serial: str, service: str, during: str) -> Link:
        """A connection on which the phone has begun a service."""
        try:
            async with asyncio.timeout(self._answer_s):
                return await self._begin([(f"host:transport:{serial}", serial), (service, serial)])
        except TimeoutError as error:
            raise PhoneSilent(serial, during, self._answer_s) from error

    async def _begin(self, services: list[tuple[str, str]]) -> Link:
        link = await Link.open(self.address)
        try:
            for service, serial in services:
                await link.request(service, serial)
        except BaseException:
            link.abort()
            raise
        return link

    @asynccontextmanager
    async def _sync(self, serial: str, silence_s: float) -> AsyncIterator[tuple[Sync, bool]]:
        v2 = "stat_v2" in await self.features(serial)
        link = await self._open(serial, "sync:", "beginning a transfer")
        try:
            yield Sync(link, serial, silence_s), v2
        finally:
            link.abort()


async def _complete(process: ShellProcess, input: bytes, during: str, max_bytes: int) -> Completed:
    left = max_bytes

    async def read(stream: asyncio.StreamReader) -> bytes:
        nonlocal left
        parts = []
        while part := await stream.read(_READ_BYTES):
            left -= len(part)
            if left < 0:
                raise PhoneAnswerTooLong(process.serial, during, max_bytes)
            parts.append(part)
        return b"".join(parts)

    async def write() -> None:
        try:
            for start in range(0, len(input), _READ_BYTES):
                process.stdin.write(input[start : start + _READ_BYTES])
                await process.stdin.drain()
        except ConnectionError:
            return  # a command need not read its input to the end; what became of it, its exit code tells
        if input:
            process.stdin.close()

    outputs = [asyncio.create_task(read(stream)) for stream in (process.stdout, process.stderr)]
    writing = asyncio.create_task(write())
    try:
        stdout, stderr = await asyncio.gather(*outputs)
    finally:
        for task in (*outputs, writing):
            task.cancel()
        await asyncio.wait({*outputs, writing})
    code = await process.wait()
    assert code is not None  # only `kill` makes it so
    return Completed(stdout, stderr, code)
