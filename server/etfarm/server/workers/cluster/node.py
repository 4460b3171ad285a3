"""A node's service: a pool of local children, the files of their requests, and what the children write.

It runs in an actor of Ray and does not know Ray. Its caller is the server's connector.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import fcntl
import json
import os
import tempfile
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from etfarm.server.workers import errors, output_files
from etfarm.server.workers.channel import attendance
from etfarm.server.workers.child_pool import URGENT, delete
from etfarm.server.workers.cluster import relay_frames
from etfarm.server.workers.cluster.file_cache import FileCache
from etfarm.server.workers.cluster.relay_frames import CHANNEL, END, LOG, MAX_FILES, PIECE_BYTES, STATUS
from etfarm.server.workers.errors import BadWorkerAnswer, ForkserverEnded, NodeLost
from etfarm.server.workers.jail.isolation import JailOptions
from etfarm.server.workers.limits import Limits
from etfarm.server.workers.pool import Workers
from etfarm.wire import digest as digests
from etfarm.wire.errors import EtfarmError

LEASE_S: Final = 15.0
"""Time without a call for a child after which the child is ended: its server, or the way to it, is gone."""
POLL_S: Final = 5.0
"""Time that a read waits for the child's next bytes."""

_READ_BYTES: Final = 1 << 16
_QUEUED: Final = 64
"""Number of reads that wait for the connector; the child blocks while there are more."""


class NodeService:
    """The children of one server on this node.

    Args:
        settings: JSON with `preload`, `limits`, `concurrency` and `required` (jail), as `Workers` takes them.
    """

    def __init__(self, settings: bytes) -> None:
        values = json.loads(settings)
        self._folder = _create_folder()
        files = self._folder / "files"
        files.mkdir()
        files.chmod(0o711)
        limits = Limits(**values["limits"])
        self._files = FileCache(files, reserve_bytes=limits.reserve_bytes)
        self._workers = Workers(
            preload=values["preload"],
            limits=limits,
            folder=self._folder / "children",
            concurrency=values["concurrency"],
            options=JailOptions(hidden=_secrets(self._folder), required=values["required"]),
        )
        self._most_children = values["concurrency"] + URGENT
        self._children: dict[str, RelayedChild] = {}
        self._methods: Mapping[str, Callable[[Any, bytes], Awaitable[bytes]]] = {
            "boot_id": self._boot_id, "start": self._start, "open": self._open, "write": self._write, "begin": self._begin,
            "poll": self._poll, "read": self._read, "close": self._close, "stop": self._stop,
        }  # fmt: skip

    async def call(self, method: str, arguments: bytes, data: bytes) -> bytes:
        """Call a method and return its answer, which may be an error, see `relay_frames`.

        What Ray raises for a call is then the end of this process, or of the node, and nothing else.
        """
        try:
            return relay_frames.encode_result(await self._methods[method](json.loads(arguments), data))
        except EtfarmError as error:
            return relay_frames.encode_error(error)
        except Exception as error:  # noqa: BLE001 - the server logs it
            if errors.is_disk_full(error):
                return relay_frames.encode_error(errors.child_disk_full("a compile node's task", str(error)))
            traceback.print_exception(error)
            return relay_frames.encode_error(errors.Defect(f"The call {method[:50]!r} of a compile node", error))

    async def _start(self, arguments: Any, data: bytes) -> bytes:
        """Start the pool, and return the jail of a child."""
        self._workers.start()
        self._watch = asyncio.create_task(self._end_abandoned(), name="leases")
        jail = await self._workers.describe_jail()
        await self._workers.ready()
        return jail.to_json()

    async def _boot_id(self, arguments: Any, data: bytes) -> bytes:
        return boot_id().encode()

    async def _open(self, arguments: Any, data: bytes) -> bytes:
        """Open a child with the files of its request, `{digest: size}`. Return the digests of missing files."""
        if len(self._children) >= self._most_children:
            raise NodeLost(arguments["task"], "", "it has no place for a further child")
        key = arguments["child"]
        self._children[key] = RelayedChild(self._workers, arguments["task"], time.monotonic)
        return json.dumps(self._files.hold(key, arguments["files"])).encode()

    async def _write(self, arguments: Any, data: bytes) -> bytes:
        self._child(arguments)
        for key in self._files.holders(arguments["digest"]) & self._children.keys():
            self._children[key].touch()  # those that wait for the file, too
        where = (arguments["child"], arguments["digest"], arguments["offset"])
        await asyncio.to_thread(self._files.write, *where, data, arguments["size"])
        return b""

    async def _begin(self, arguments: Any, data: bytes) -> bytes:
        """Begin a child with the bytes of its request. `files` has a digest, or null for a missing file, for each file."""
        absent = self._folder / "absent"
        files = [absent if digest is None else self._files.path(digest) for digest in arguments["files"]]
        self._child(arguments).begin(self._folder / "children", files, data)
        return b""

    async def _poll(self, arguments: Any, data: bytes) -> bytes:
        return relay_frames.join(await self._child(arguments).read())

    async def _read(self, arguments: Any, data: bytes) -> bytes:
        child = self._child(arguments)
        return await asyncio.to_thread(child.read_file, arguments["name"], arguments["offset"])

    async def _close(self, arguments: Any, data: bytes) -> bytes:
        """End a child if it still runs, and delete its folder."""
        try:
            if (child := self._children.pop(arguments["child"], None)) is not None:
                await child.end()
        finally:
            self._files.release(arguments["child"])
        return b""

    async def _stop(self, arguments: Any, data: bytes) -> bytes:
        self._watch.cancel()
        for key in list(self._children):
            await self._close({"child": key}, b"")
        await self._workers.stop()
        await asyncio.to_thread(output_files.delete, self._folder)
        return b""

    def _child(self, arguments: Any) -> RelayedChild:
        if (child := self._children.get(arguments["child"])) is None:
            raise NodeLost("", "", f"it ended a child that its server did not ask for within {LEASE_S:g} s")
        return child

    async def _end_abandoned(self) -> None:
        while True:
            await asyncio.sleep(LEASE_S / 3)
            for key, child in list(self._children.items()):
                if time.monotonic() - child.used_at > LEASE_S:
                    await self.call("close", json.dumps({"child": key}).encode(), b"")  # its errors do not end the loop


def boot_id() -> str:
    """Return the kernel's id of this boot, which machines do not share and containers of one machine do."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _create_folder() -> Path:
    """Return a new folder of this process; delete those of processes that have ended."""
    base = Path(tempfile.gettempdir()) / f"etfarm-nodes-{os.geteuid()}"
    base.mkdir(mode=0o700, exist_ok=True)
    if base.is_symlink() or base.stat().st_uid != os.geteuid():
        raise RuntimeError(f"{base} belongs to another user")
    for old in base.iterdir():
        if (lock := _lock(old)) is not None:
            output_files.delete(old)
            os.close(lock)
    # Another process may take a folder for an old one, and delete it, before it is locked.
    while _lock(folder := Path(tempfile.mkdtemp(prefix="node-", dir=base))) is None:
        pass
    atexit.register(output_files.delete, folder)
    return folder


def _lock(folder: Path) -> int | None:
    """Lock a folder until this process ends. Return the lock's descriptor; None if another process has it or has deleted it."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    with contextlib.suppress(BlockingIOError, FileNotFoundError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), folder.stat()):
            return descriptor
    os.close(descriptor)
    return None


def _secrets(folder: Path) -> tuple[Path, ...]:
    """Return what children must not see even if it is within the code: this folder, and Ray's token and sessions."""
    token = os.environ.get("RAY_AUTH_TOKEN_PATH")
    return (folder, Path.home() / ".ray", Path(tempfile.gettempdir()) / "ray", *([Path(token)] if token else []))


class RelayedChild:
    """A child of a node.

    Args:
        clock: monotonic time in seconds.
    """

    def __init__(self, workers: Workers, task: str, clock: Callable[[], float]) -> None:
        self._workers = workers
        self._task = task
        self._clock = clock
        self._pieces: asyncio.Queue[tuple[bytes, bytes]] = asyncio.Queue(_QUEUED)
        self._run: asyncio.Task[None] | None = None
        self._folder: Path | None = None
        self.used_at = clock()
        """Time of the connector's last call for the child."""

    def touch(self) -> None:
        """Record a call of the connector."""
        self.used_at = self._clock()

    def begin(self, parent: Path, files: Sequence[Path], request: bytes) -> None:
        """Start the child in a new folder in `parent`."""
        self.touch()
        self._folder = Path(tempfile.mkdtemp(prefix="job-", dir=parent))
        data = attendance.encode_request(files, request)
        self._run = asyncio.create_task(self._relay(self._folder, data), name=f"relay of {self._task}")

    async def read(self) -> list[tuple[bytes, bytes]]:
        """Return the next pieces, as (kind, data); none if the child wrote nothing for `POLL_S`.

        Raises:
            Exception: what relays the child has failed.
        """
        self.touch()
        pieces: list[tuple[bytes, bytes]] = []
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(POLL_S):
                pieces.append(await self._pieces.get())
        if not pieces and self._run is not None and self._run.done() and not self._run.cancelled():
            self._run.result()  # raises what ended it, since no end will be queued
        while not self._pieces.empty() and sum(len(data) for _, data in pieces) < PIECE_BYTES:
            pieces.append(self._pieces.get_nowait())
        return pieces

    def read_file(self, name: str, offset: int) -> bytes:
        """Return a part of a file that the child left. Blocking."""
        self.touch()
        assert self._folder is not None
        with output_files.claim(self._folder, name).open("rb") as file:
            file.seek(offset)
            return file.read(PIECE_BYTES)

    async def end(self) -> None:
        """Kill the child's tree if it still runs, and delete its folder."""
        if self._run is not None:
            self._run.cancel()
            await asyncio.wait({self._run})
        if self._folder is not None:
            await delete(self._folder)

    async def _relay(self, folder: Path, data: bytes) -> None:
        """Run the child, and queue everything that it writes. Without a report, what starts children was lost."""
        report = b""
        with contextlib.suppress(ForkserverEnded), self._workers.place(self._task, folder) as (channel, log, status):
            reader, writer = await asyncio.open_unix_connection(sock=channel)
            ended, status_writer = await asyncio.open_unix_connection(sock=status)
            lines = await attendance.open_log(log)
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(attendance.send(writer, data))
                    group.create_task(self._queue(CHANNEL, reader))
                    group.create_task(self._queue(LOG, lines))
                    report = await ended.read()
            finally:
                await asyncio.shield(attendance.hang_up(status_writer, ended))
                writer.close()
        files = await asyncio.to_thread(_list_files, folder) if report and json.loads(report)["exit"] == 0 else []
        await self._pieces.put((STATUS, report))
        await self._pieces.put((END, json.dumps(files).encode()))

    async def _queue(self, kind: bytes, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(ConnectionResetError):
            while data := await reader.read(_READ_BYTES):
                await self._pieces.put((kind, data))


def _list_files(folder: Path) -> list[tuple[str, int, str]]:
    """Return the names, sizes and digests of the files that may leave a child's folder."""
    listed = []
    for path in sorted(folder.iterdir())[:MAX_FILES]:
        with contextlib.suppress(BadWorkerAnswer, UnicodeEncodeError):
            path.name.encode()
            claimed = output_files.claim(folder, path.name)
            listed.append((path.name, claimed.stat().st_size, digests.of_file(claimed)))
    return listed
