"""Steps 1 and 10, client: the embedded farm, a server and an agent of this user that live while commands use them.

A supervisor process owns both. Each command holds a connection to the supervisor's unix socket for its life, whatever way
that life ends; when the last connection closes, the supervisor stops both, removes the socket and leaves. Everything that
dies closes something that somebody reads: a command its connection, the supervisor its children's stdin.

Two locks: `lock` is held for the moment of joining, and by the supervisor for the moment in which it stops answering, so
that nobody joins a farm that is leaving. `running` is held by the supervisor and, inherited, by its children: a new farm
starts only when all of the one before are gone.
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

LONGEST_SOCKET_PATH = 100
"""Bytes of a unix socket's path; Linux takes 107, macOS 103."""

LEAVE_TIMEOUT_S = 8.0
"""How long the last command waits for the farm to be gone; its children are killed after 5 s."""

REAP_TIMEOUT_S = 1.0
"""Between a supervisor's last word and its end there are milliseconds."""

_TRIES = 5

Say = Callable[[str], None]


@dataclass(frozen=True)
class Place:
    """Where an embedded farm keeps its things: one per data folder."""

    data: Path
    """Private (mode 0700)."""

    @classmethod
    def of_user(cls) -> Place:
        """The farm of this user's data folder."""
        return cls(names.data_folder() / "farm")

    def make(self) -> None:
        """Makes its folders, private ones.

        Raises:
            EmbeddedFarmFailed: a folder cannot be made, or is somebody else's.
        """
        for folder in (self.data, self.sockets, self.held_jobs):
            try:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                owner = folder.lstat()
                if owner.st_uid != os.getuid():
                    raise EmbeddedFarmFailed(f"The folder {folder} belongs to somebody else.", "Set ETFARM_DATA.", folder=folder)
                if owner.st_mode & 0o077:
                    folder.chmod(0o700)
            except OSError as error:
                raise EmbeddedFarmFailed(
                    f"The folder {folder} cannot be made: {error.strerror}.", "Set ETFARM_DATA to another.", folder=folder
                ) from None

    @property
    def sockets(self) -> Path:
        """The folder of the unix sockets: the data folder, or a private temporary one where its path is too long."""
        if len(os.fsencode(self.data / "supervisor.sock")) <= LONGEST_SOCKET_PATH:
            return self.data
        key = hashlib.sha256(os.fsencode(self.data.resolve())).hexdigest()[:16]
        return Path(tempfile.gettempdir()) / f"etfarm-{os.getuid()}-{key}"

    @property
    def supervisor_socket(self) -> Path:
        """Where commands join."""
        return self.sockets / "supervisor.sock"

    @property
    def server_socket(self) -> Path:
        """Where the server listens."""
        return self.sockets / "server.sock"

    @property
    def token_file(self) -> Path:
        """The file with the secret that the server asks every caller for; reaching the socket is not enough."""
        return token_file_of(self.server_socket)

    @property
    def held_jobs(self) -> Path:
        """A folder with an empty file for each job that goes with its command."""
        return self.data / "held"

    @property
    def address_file(self) -> Path:
        """Holds the server's address while it runs."""
        return self.data / "address"

    def lock(self, name: str, *, wait: bool = True) -> int:
        """Waits for the lock file `name`. Closing the descriptor, and all that inherited it, gives it back.

        Raises:
            BlockingIOError: it is held by another, and not to be waited for.
        """
        fd = os.open(self.data / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            os.close(fd)
            raise
        return fd


class Lease:
    """A hold on the embedded farm. While one is held, the farm stays."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, address: str, lasting: bool, data: Path
    ) -> None:
        """Made by `join`."""
        self.address = address
        self.lasting = lasting
        """Whether `etfarm up` keeps the farm, so that jobs may go on without this command."""
        self.data = data
        self._reader, self._writer = reader, writer
        self._leaving = False
        self._stays = False
        self._ended = asyncio.create_task(self._read_on(), name="hold on the embedded farm")

    async def lost(self) -> None:
        """Waits for as long as the farm runs.

        Raises:
            EmbeddedFarmFailed: it ended although this lease is held.
        """
        why = await asyncio.shield(self._ended)
        if not self._leaving:
            raise EmbeddedFarmFailed(why or "The embedded farm ended.", f"Its logs are in {self.data}.", folder=self.data)

    def hold_job(self, job_id: str) -> None:
        """Says that a job is this command's: if it dies, the job is cancelled, at the latest when a farm starts again."""
        self._say(job=job_id)

    def release_job(self, job_id: str) -> None:
        """Says that a job is done with."""
        self._say(done=job_id)

    def _say(self, **said: str) -> None:
        if not self._writer.is_closing():
            self._writer.write(json.dumps(said).encode() + b"\n")

    async def leave(self) -> None:
        """Gives the lease back; the last one's waits until the farm is gone."""
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
                said = json.loads(line)
                self._stays = self._stays or "stays" in said
                if error := said.get("error"):
                    return str(error)
        except (OSError, ValueError):
            return ""  # cut off in the middle: the farm is gone, which is what we wait to hear
        return ""


async def join(*, place: Place | None = None, kind: str = "command", on_status: Say | None = None) -> Lease:
    """A hold on the embedded farm, which is started if it does not run; its server and agent answer then.

    Args:
        place: where the farm is; the user's when None.
        kind: `command`, or `up` for one that stays.
        on_status: told in one sentence what starting waits for.

    Raises:
        EmbeddedFarmFailed: it did not start.
    """
    place = place or Place.of_user()
    place.make()
    for _ in range(_TRIES):
        connection = await asyncio.to_thread(_connect, place)
        lease = await _hold(connection, place, kind, on_status)
        if lease is not None:
            return lease
    raise EmbeddedFarmFailed("The embedded farm ended again and again while it started.", f"Its logs are in {place.data}.")


async def is_lasting(place: Place | None = None) -> bool:
    """Whether an embedded farm runs that `etfarm up` keeps."""
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
    """A lease over a connection once the farm answers; None when the farm left before."""
    reader, writer = await asyncio.open_connection(sock=connection)
    try:
        writer.write(json.dumps({"kind": kind, "pid": os.getpid()}).encode() + b"\n")
        while line := await reader.readline():
            said: dict[str, Any] = json.loads(line)
            if "error" in said:
                raise EmbeddedFarmFailed(said["error"], f"Its logs are in {place.data}.", folder=place.data)
            if "address" in said:
                return Lease(reader, writer, said["address"], said["lasting"], place.data)
            if on_status is not None:
                on_status(said["status"])
    except (ConnectionError, ValueError):
        writer.close()
        return None
    except BaseException:
        writer.close()
        raise
    writer.close()
    return None


def _connect(place: Place) -> socket.socket:
    """A connection to the supervisor, which is started if nobody answers.

    Its listening socket is made here, under the lock: whoever comes next finds it, and nobody waits for it to appear.
    """
    path = place.supervisor_socket
    lock = place.lock("lock")
    try:
        place.make()  # the farm that left may have taken the sockets' folder along
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(str(path))
            return connection
        except OSError:  # nobody listens; what lies there was left by one that was killed
            path.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            path.chmod(0o600)
            listener.listen(64)
            _spawn(place, listener.fileno())
        connection.connect(str(path))
        return connection
    finally:
        os.close(lock)


_spawned: list[subprocess.Popen[bytes]] = []
"""Supervisors that this process started; kept so that they are waited for when they have ended."""


def _spawn(place: Place, listener: int) -> None:
    environment = {
        key: value
        for key, value in os.environ.items()
        if key not in (names.SERVER_VARIABLE, names.TOKEN_VARIABLE, names.TLS_CA_VARIABLE)
    }
    with (place.data / "supervisor.log").open("ab") as log:
        process = subprocess.Popen(
            # -P: the user's working folder must not shadow modules.
            [sys.executable, "-P", "-m", "etfarm.client.embedded.supervisor", str(place.data.resolve()), str(listener)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=(listener,),
            start_new_session=True,
            cwd=place.data,
            env=environment,
        )
    _spawned.append(process)


def _reap() -> None:
    """Waits for the supervisors that this process started and that are ending, so that no zombie is left."""
    for process in list(_spawned):
        try:
            process.wait(REAP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            continue
        _spawned.remove(process)
