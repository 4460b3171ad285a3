"""One child of a node, whose bytes the connector reads in pieces."""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from etfarm.server.workers import output_files
from etfarm.server.workers.channel import attendance
from etfarm.server.workers.child_pool import delete
from etfarm.server.workers.cluster.relay_frames import CHANNEL, END, LOG, MAX_FILES, PIECE_BYTES, STATUS
from etfarm.server.workers.errors import BadWorkerAnswer, ForkserverEnded
from etfarm.server.workers.pool import Workers
from etfarm.wire import digest as digests

POLL_S: Final = 5.0
"""Time that a read waits for the child's next bytes."""

_READ_BYTES: Final = 1 << 16
_QUEUED: Final = 64
"""Number of reads that wait for the connector; the child blocks while there are more."""


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
        files = await asyncio.to_thread(_list_files, folder) if _has_succeeded(report) else []
        await self._pieces.put((STATUS, report))
        await self._pieces.put((END, json.dumps(files).encode()))

    async def _queue(self, kind: bytes, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(ConnectionResetError):
            while data := await reader.read(_READ_BYTES):
                await self._pieces.put((kind, data))


def _has_succeeded(report: bytes) -> bool:
    return bool(report) and json.loads(report)["exit"] == 0


def _list_files(folder: Path) -> list[tuple[str, int, str]]:
    """Return the names, sizes and digests of the files that may leave a child's folder."""
    listed = []
    for path in sorted(folder.iterdir())[:MAX_FILES]:
        with contextlib.suppress(BadWorkerAnswer, UnicodeEncodeError):
            path.name.encode()
            claimed = output_files.claim(folder, path.name)
            listed.append((path.name, claimed.stat().st_size, digests.of_file(claimed)))
    return listed
