"""The embedded farm: a server and an agent of this user that run while commands use them.

A supervisor process owns both. Each command holds a connection to the supervisor's unix socket for its lifetime, however
it ends. When the last connection closes, the supervisor stops both children, removes the socket and exits. Every process
that dies closes a stream that another process reads: a command its connection, the supervisor its children's stdin.

There are two locks. `lock` is held while a command joins, and by the supervisor while it stops answering, so that no
command joins a farm that is about to exit. `running` is held by the supervisor and, inherited, by its children: a new
farm starts only after all processes of the previous one are gone.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etfarm.client.errors import EmbeddedFarmFailed
from etfarm.wire import names
from etfarm.wire.channel import token_file_of
from etfarm.wire.private import FolderNotPrivate, make_private

LONGEST_SOCKET_PATH = 100
"""Maximum length in bytes of a unix socket's path; Linux allows 107, macOS 103."""

LEAVE_TIMEOUT_S = 8.0
"""Seconds that the last command waits for the farm to exit; its children are killed after 5 s."""

REAP_TIMEOUT_S = 1.0
"""Seconds to wait for a supervisor that has closed its connection; it exits within milliseconds."""

_TRIES = 5

Say = Callable[[str], None]


@dataclass(frozen=True)
class Place:
    """The files of an embedded farm; each data folder has one farm."""

    data: Path
    """The data folder; private (mode 0700)."""

    @classmethod
    def of_user(cls) -> Place:
        """Return the place in this user's data folder."""
        return cls(names.embedded_farm_folder())

    def make(self) -> None:
        """Create the private folders.

        Raises:
            EmbeddedFarmFailed: a folder cannot be created.
            FolderNotPrivate: another user owns it.
        """
        for folder in (self.data, self.sockets, self.held_jobs):
            try:
                try:
                    make_private(folder)
                except FileNotFoundError:  # a farm that ended at this moment removed the one above
                    make_private(folder)
            except FolderNotPrivate as error:
                raise FolderNotPrivate(error.message, "Set ETFARM_DATA to another folder.", folder=folder) from None
            except OSError as error:
                raise EmbeddedFarmFailed(
                    f"The folder {folder} cannot be created: {error.strerror}.", "Set ETFARM_DATA to another.", folder=folder
                ) from None

    @property
    def sockets(self) -> Path:
        """The folder of the unix sockets: the data folder, or a private temporary one if its path is too long."""
        if len(os.fsencode(self.data / "supervisor.sock")) <= LONGEST_SOCKET_PATH:
            return self.data
        key = hashlib.sha256(os.fsencode(self.data.resolve())).hexdigest()[:16]
        return Path(tempfile.gettempdir()) / f"etfarm-{os.getuid()}-{key}"

    @property
    def supervisor_socket(self) -> Path:
        """Path of the socket that commands join through."""
        return self.sockets / "supervisor.sock"

    @property
    def server_socket(self) -> Path:
        """Path of the socket that the server listens on."""
        return self.sockets / "server.sock"

    @property
    def token_file(self) -> Path:
        """File with the secret that the server requires of every caller; access to the socket does not suffice."""
        return token_file_of(self.server_socket)

    @property
    def held_jobs(self) -> Path:
        """Folder with an empty file for each job that ends with its command."""
        return self.data / "held"

    @property
    def address_file(self) -> Path:
        """File with the server's address while it runs."""
        return self.data / "address"

    def lock(self, name: str, *, wait: bool = True) -> int:
        """Acquire the lock file `name` and return its descriptor.

        Closing the descriptor and all inherited copies releases the lock.

        Raises:
            BlockingIOError: another process holds it, and `wait` is False.
        """
        fd = os.open(self.data / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def holders(self) -> list[int]:
        """Return the ids of the other processes that hold one of the lock files, as far as this user may see them."""
        paths = {(self.data / name).resolve() for name in ("lock", "running")}
        holders = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                opened = [entry.name for entry in (process / "fd").iterdir() if entry.readlink() in paths]
                if any("FLOCK" in (process / "fdinfo" / number).read_text() for number in opened):
                    holders.append(int(process.name))
            except OSError:  # another user's process, or one that has ended
                continue
        return sorted({*holders} - {os.getpid()})


class Lease:
    """A lease on the embedded farm.

    The farm runs while a lease is held.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        address: str,
        keeper_pid: int | None,
        data: Path,
    ) -> None:
        """Wrap a connection to the supervisor; `join` creates instances."""
        self.address = address
        self.keeper_pid = keeper_pid
        """Process id of the `etfarm up` that keeps the farm; the first one of several, None without one."""
        self.lasting = keeper_pid is not None
        """Whether `etfarm up` keeps the farm, so that jobs may continue without this command."""
        self.data = data
        self._reader, self._writer = reader, writer
        self._leaving = False
        self._stays = False
        self._ended = asyncio.create_task(self._read_on(), name="hold on the embedded farm")

    async def lost(self) -> None:
        """Wait until the farm ends.

        Raises:
            EmbeddedFarmFailed: the farm ended although this lease is held.
        """
        why = await asyncio.shield(self._ended)
        if not self._leaving:
            raise EmbeddedFarmFailed(why or "The embedded farm ended.", f"Its logs are in {self.data}.", folder=self.data)

    def hold_job(self, job_id: str) -> None:
        """Tie a job to this command.

        If the command dies, the job is cancelled, at the latest when a farm starts again.
        """
        self._send(job=job_id)

    def release_job(self, job_id: str) -> None:
        """Release a job that is finished."""
        self._send(done=job_id)

    def _send(self, **message: str) -> None:
        if not self._writer.is_closing():
            self._writer.write(json.dumps(message).encode() + b"\n")

    async def leave(self) -> None:
        """Release the lease; the last one waits until the farm is gone."""
        self._leaving = True
        try:
            if not self._ended.done() and self._writer.can_write_eof():
                self._writer.write_eof()
            await asyncio.wait({self._ended}, timeout=LEAVE_TIMEOUT_S)
        finally:
            self._ended.cancel()
            self._writer.close()
        if not self._stays:
            await asyncio.to_thread(_reap)

    async def _read_on(self) -> str:
        try:
            while line := await self._reader.readline():
                message = json.loads(line)
                self._stays = self._stays or "stays" in message
                if error := message.get("error"):
                    return str(error)
        except (OSError, ValueError):
            return ""  # truncated line: the farm is gone, which ends the wait
        return ""


async def join(*, place: Place | None = None, kind: str = "command", on_status: Say | None = None, prewarm: bool = True) -> Lease:
    """Take a lease on the embedded farm and start it if it does not run.

    Its server and agent answer when this returns.

    Args:
        place: the farm's files; those of the user when None.
        kind: `command`, or `up` for one that keeps the farm running.
        on_status: called with one sentence about what the start waits for.
        prewarm: whether the server, if this starts it, loads the compiler at once.

    Raises:
        EmbeddedFarmFailed: the farm did not start.
    """
    place = place or Place.of_user()
    place.make()
    for _ in range(_TRIES):
        connection = await asyncio.to_thread(_connect, place, prewarm)
        lease = await _hold(connection, place, kind, on_status)
        if lease is not None:
            return lease
    raise EmbeddedFarmFailed("The embedded farm ended repeatedly while it started.", f"Its logs are in {place.data}.")


def does_answer(place: Place, within_s: float) -> bool | None:
    """Return whether the supervisor of a running farm answers within some seconds; None if no farm runs."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(within_s)
        try:
            connection.connect(str(place.supervisor_socket))
        except TimeoutError:
            return False
        except OSError:
            return None
        try:
            connection.sendall(json.dumps({"kind": "command", "pid": os.getpid()}).encode() + b"\n")
            return bool(connection.recv(1))
        except OSError:
            return False


async def is_lasting(place: Place | None = None) -> bool:
    """Return whether `etfarm up` keeps an embedded farm running."""
    place = place or Place.of_user()
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(str(place.supervisor_socket))
    except OSError:
        connection.close()
        return False
    lease = await _hold(connection, place, "command", None)
    if lease is None:
        return False
    await lease.leave()
    return lease.lasting


async def _hold(connection: socket.socket, place: Place, kind: str, on_status: Say | None) -> Lease | None:
    """Return a lease on a connection once the farm answers; None if the farm exited before."""
    reader, writer = await asyncio.open_connection(sock=connection)
    try:
        writer.write(json.dumps({"kind": kind, "pid": os.getpid()}).encode() + b"\n")
        while line := await reader.readline():
            message: dict[str, Any] = json.loads(line)
            if "error" in message:
                raise EmbeddedFarmFailed(message["error"], f"Its logs are in {place.data}.", folder=place.data)
            if "address" in message:
                return Lease(reader, writer, message["address"], message.get("keeper"), place.data)
            if on_status is not None:
                on_status(message["status"])
    except (ConnectionError, ValueError):
        writer.close()
        return None
    except BaseException:
        writer.close()
        raise
    writer.close()
    return None


def _connect(place: Place, prewarm: bool) -> socket.socket:
    """Connect to the supervisor, starting it if it does not answer.

    Its listening socket is created here, under the lock, so that the next command can connect to it at once.
    """
    path = place.supervisor_socket
    lock = place.lock("lock")
    try:
        place.make()  # the farm that exited may have removed the sockets' folder
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(str(path))
            return connection
        except OSError:  # no listener: the socket was left by a killed process
            path.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            path.chmod(0o600)
            listener.listen(64)
            _spawn(place, listener.fileno(), prewarm)
        connection.connect(str(path))
        return connection
    finally:
        os.close(lock)


_spawned: list[subprocess.Popen[bytes]] = []
"""Supervisors that this process started; kept so that their exit codes can be collected."""


def _spawn(place: Place, listener: int, prewarm: bool) -> None:
    environment = {
        key: value
        for key, value in os.environ.items()
        if key not in (names.SERVER_VARIABLE, names.TOKEN_VARIABLE, names.TLS_CA_VARIABLE)
        # These are meant for a team's server, whose addresses and files the farm would take.
        and not key.startswith(names.SETTING_PREFIX)
    }
    with (place.data / "supervisor.log").open("ab") as log:
        process = subprocess.Popen(
            # -P: modules in the user's working folder must not shadow others.
            [sys.executable, "-P", "-m", "etfarm.client.embedded.supervisor", str(place.data.resolve()), str(listener),
             *([] if prewarm else ["--no-prewarm"])],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=(listener,),
            start_new_session=True,
            cwd=place.data,
            env=environment,
        )  # fmt: skip
    _spawned.append(process)


def _reap() -> None:
    """Collect the exit codes of supervisors that this process started, so that no zombie is left."""
    for process in list(_spawned):
        try:
            process.wait(REAP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            continue
        _spawned.remove(process)
