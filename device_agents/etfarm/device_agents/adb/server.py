"""The adb server's interface: phones, changes to the list, commands and files on phones."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from etfarm.device_agents.adb.address import DEFAULT_ADDRESS, server_address
from etfarm.device_agents.adb.commands import READ_BYTES, Completed, complete
from etfarm.device_agents.adb.errors import (
    AdbRefused,
    AdbServerMissing,
    PhoneFileMissing,
    PhoneSilent,
    adb_missing,
)
from etfarm.device_agents.adb.link import Link
from etfarm.device_agents.adb.phones import Phone, phones_of
from etfarm.device_agents.adb.shell import MAX_LINE_BYTES, ShellProcess
from etfarm.device_agents.adb.sync import OnProgress, RemoteFile, Sync

SILENCE_S: Final = 20.0
"""Time without a byte of a transfer, in seconds, after which the link counts as dead."""
RECHECK_S: Final = 3.0
"""Interval of a local request of a few hundred bytes; short compared with how long a person waits after unplugging a phone."""
_ANSWER_S: Final = 10.0
_CONNECT_S: Final = 30.0
"""Limit for connecting to a phone; adb itself gives the phone 10 s to accept the connection, then waits for its handshake."""
_START_S: Final = 30.0
_OVER_TCP: Final = re.compile(r".+:\d+")


class AdbServer:
    """The adb server at an address.

    No connection is kept: each call opens its own, and any number of calls may be in progress.

    Every call may raise AdbServerMissing. Calls about one phone may raise PhoneGone (adb does not know it, or it vanished),
    AdbRefused (`device offline`, `device unauthorized`, ...) and PhoneSilent (it did not answer in time).
    """

    def __init__(self, address: str | None = None, *, answer_s: float = _ANSWER_S) -> None:
        """Store the address without connecting.

        Args:
            address: `tcp:HOST:PORT`, `tcp:PORT`, `localfilesystem:PATH` or `localabstract:NAME`; by default the result of
                `server_address`, read now.
            answer_s: limit for each answer of the server, and for a phone to begin a command or a transfer.
        """
        self.address = server_address() if address is None else address
        self._answer_s = answer_s

    async def version(self) -> int:
        """Return the server's protocol version, which is 41 in every adb since 2018."""
        text = await self._request_text("host:version")
        try:
            return int(text, 16)
        except ValueError as error:
            raise AdbServerMissing(self.address, f"its version is {text!r}, which is not adb") from error

    async def phones(self) -> tuple[Phone, ...]:
        """Return the phones that the server knows now, in its order and in any state."""
        return phones_of(await self._request_text("host:devices-l"))

    async def track(self, *, recheck_s: float = RECHECK_S) -> AsyncGenerator[tuple[Phone, ...], None]:
        """Yield the current phones, then the whole list again at each change, without end.

        Close the generator when done: `async with contextlib.aclosing(server.track()) as lists`. A dead link does not change the
        list.

        Args:
            recheck_s: interval after which the list is requested even if no change was reported.

        Raises:
            AdbServerMissing: the server is not running, or was stopped meanwhile.
        """
        link = await self._open_service("host:track-devices-l")
        reply = asyncio.create_task(link.text(), name="adb's list of phones")
        latest = None
        try:
            while True:
                # adb 29 sets a phone with a broken connection to offline without a notification, until it returns or is removed.
                await asyncio.wait({reply}, timeout=None if latest is None else recheck_s)
                if reply.done():
                    phones = phones_of(reply.result())
                    reply = asyncio.create_task(link.text(), name="adb's list of phones")
                else:
                    phones = await self.phones()
                if phones != latest:
                    latest = phones
                    yield phones
        finally:
            link.abort()
            reply.cancel()
            await asyncio.wait({reply})
            if not reply.cancelled():
                reply.exception()  # the end of the connection, which no task awaits any more

    async def connect(self, host_port: str) -> str:
        """Connect the server to a phone on the network and return the phone's serial. Harmless if it is already connected.

        Raises:
            AdbRefused: nothing listens at the address, or the phone does not know this machine's key.
        """
        text = await self._request_text(f"host:connect:{host_port}", serial=host_port, seconds=_CONNECT_S)
        # Failures are reported with OKAY as well.
        if (match := re.match(r"(?:already )?connected to (\S+)", text)) is None:
            raise AdbRefused(host_port, text)
        return match[1]

    async def disconnect(self, host_port: str) -> bool:
        """Disconnect the server from a phone on the network; return whether the server knew it."""
        try:
            await self._request_text(f"host:disconnect:{host_port}")
        except AdbRefused as error:
            if "no such device" in error.text:
                return False
            raise
        return True

    async def reconnect(self, serial: str) -> None:
        """Give a phone a new connection, which is the remedy for a dead one. The phone is offline for a moment: see `track`.

        For a phone on the network that does not answer, adb takes 10 s. The phone stays in the list as offline, and becomes a
        device again once it answers.

        Raises:
            AdbRefused, PhoneGone: the phone cannot be reached.
        """
        if _OVER_TCP.fullmatch(serial):
            await self.disconnect(serial)
            await self.connect(serial)
        else:
            await self._request_text(f"host-serial:{serial}:reconnect", serial=serial)

    async def features(self, serial: str) -> frozenset[str]:
        """Return the features of the phone's adbd, such as `shell_v2` and `stat_v2`."""
        return frozenset((await self._request_text(f"host-serial:{serial}:features", serial=serial)).strip().split(","))

    async def shell(self, serial: str, command: str, *, limit: int = MAX_LINE_BYTES) -> ShellProcess:
        """Start a command line in the phone's shell, without a terminal. The phone needs the feature `shell_v2` (Android 7).

        The command ends for the caller when no process on the phone holds its outputs open: redirect the outputs of background
        processes. When the connection closes, adbd sends SIGHUP to the shell but not to the processes it forked: `exec` what must
        end with it.

        Args:
            serial: the phone's serial.
            command: up to 65 kB, 4 kB on old phones; pass longer ones as input to `sh`.
            limit: maximum length of a line, in bytes; each of the two outputs buffers at most twice that while it is not read.

        Raises:
            AdbRefused, PhoneGone, PhoneSilent: the command was not started; after PhoneSilent it may still start.
        """
        link = await self._open(serial, f"shell,v2,raw:{command}", f"starting {command[:40]!r}")
        return ShellProcess(link, serial, command, limit)

    async def run(
        self, serial: str, command: str, *, input: bytes = b"", deadline_s: float, max_bytes: int = 16 << 20
    ) -> Completed:
        """Run a whole command. Fetch many facts in one command, since each command takes at least one round trip.

        Args:
            serial: the phone's serial.
            command: as in `shell`.
            input: everything the command reads, followed by the end of its input.
            deadline_s: limit for the whole command; whatever still runs on the phone then receives a hang-up.
            max_bytes: limit for stdout and stderr together.

        Raises:
            PhoneSilent: the command did not end within the deadline.
            PHONE_ANSWER_TOO_LONG: it wrote more than `max_bytes`.
            AdbRefused, PhoneGone: it could not be started, or its end is not known.
        """
        during = f"running {command[:40]!r}"
        try:
            async with asyncio.timeout(deadline_s):
                # Signalling an empty input races with the end of a short command: data that reaches a connection closed by the
                # peer discards what has not been read from it yet.
                line = command if input else f"exec </dev/null\n{command}"
                process = await self.shell(serial, line, limit=READ_BYTES)
                try:
                    return await complete(process, input, during, max_bytes)
                finally:
                    process.kill()
        except TimeoutError as error:
            raise PhoneSilent(serial, during, deadline_s) from error

    async def stat(self, serial: str, remote: str) -> RemoteFile | None:
        """Return the file at `remote` on the phone, with links followed; None if there is none.

        Raises:
            PhoneFileRefused: the phone refuses to report it.
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
        """Write a file on the phone, creating its parent folders; return the number of bytes sent.

        An existing file is overwritten in place, not replaced: if others may read or run it, push beside it and rename.
        Cancelling closes the connection at once. adbd removes an incomplete file, a moment after this call ends.

        Args:
            serial: the phone's serial.
            source: the file's content, or the local file that holds it.
            remote: the file's path on the phone.
            mode: permissions; adbd grants the owner's permissions to everybody.
            mtime_s: modification time in seconds since the epoch; now if None.
            on_progress: called after each 64 KiB. It may run ahead of the phone by what the buffers in between hold.
            silence_s: limit for transferring 64 KiB, and for draining the buffers at the end.

        Raises:
            PhoneFull: the phone has no room.
            PhoneFileRefused: the phone refuses to write there.
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
        """Copy a file from the phone to `path`; return the number of bytes received.

        `path` appears whole or not at all, and replaces an existing file; a failed or cancelled pull leaves nothing behind.

        Raises:
            PhoneFileMissing: the phone has no such file.
            PhoneFileRefused: the phone refuses to read it.
            PHONE_ANSWER_TOO_LONG: the file has more than `max_bytes`.
            OSError: `path` cannot be written.
        """
        partial = path.with_name(f".{path.name}.{os.urandom(4).hex()}.partial")
        try:
            with partial.open("xb") as file:
                async with self._sync(serial, silence_s) as (sync, v2):
                    info = await sync.stat(remote, v2=v2)
                    if info is None:
                        raise PhoneFileMissing(serial, remote, "No such file or directory")
                    done = await sync.pull(remote, file, info.size_bytes, on_progress, max_bytes)
            partial.replace(path)
            return done
        finally:
            partial.unlink(missing_ok=True)

    async def start_server(self) -> None:
        """Start a server at the default address with `adb start-server`, unless a server already answers there.

        Raises:
            AdbServerMissing: no server answers at this address, and it is not the default one.
            ADB_MISSING: adb is not installed or did not start its server; its output is in the message.
        """
        try:
            await self.version()
            return
        except AdbServerMissing:
            if self.address not in (DEFAULT_ADDRESS, "tcp:localhost:5037", "tcp:5037"):
                raise
        program = shutil.which("adb")
        if program is None:
            raise adb_missing("no program `adb` is on PATH")
        # The server outlives this process and serves others, so it must not inherit our tokens.
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
            raise adb_missing(f"{program}: {error.strerror or error}") from error
        try:
            async with asyncio.timeout(_START_S):
                output, _ = await process.communicate()
        except TimeoutError as error:
            raise adb_missing(f"`adb start-server` did not end within {_START_S:g} s") from error
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode != 0:
            raise adb_missing(" ".join(output.decode(errors="replace").split()) or f"it ended with {process.returncode}")
        await self.version()

    async def _request_text(self, service: str, *, serial: str = "", seconds: float | None = None) -> str:
        """Return the text that the server answers at once."""
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

    async def _open_service(self, service: str) -> Link:
        """Return a connection on which the server itself has begun a service."""
        try:
            async with asyncio.timeout(self._answer_s):
                return await self._begin([(service, "")])
        except TimeoutError as error:
            raise AdbServerMissing(self.address, f"it did not answer within {self._answer_s:g} s") from error

    async def _open(self, serial: str, service: str, during: str) -> Link:
        """Return a connection on which the phone has begun a service."""
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
