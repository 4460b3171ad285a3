"""A TCP link that can be cut and healed, between an agent and a server on loopback."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class Link:
    """Forwards a loopback port to another; `cut` drops what is open and refuses what comes, `heal` lets it through again."""

    def __init__(self, target: str) -> None:
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self._loop = asyncio.new_event_loop()
        self._whole = True
        self._open: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self._bytes_per_s: int | None = None
        self.address = ""

    async def _serve(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self._whole:
            writer.close()
            return
        there_reader, there_writer = await asyncio.open_connection(self._host, self._port)
        self._open |= {writer, there_writer}
        await asyncio.gather(self._pump(reader, there_writer), self._pump(there_reader, writer))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.CancelledError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
                if self._bytes_per_s:
                    await asyncio.sleep(len(data) / self._bytes_per_s)
        writer.close()
        self._open.discard(writer)

    def _cut(self) -> None:
        self._whole = False
        for writer in list(self._open):
            writer.transport.abort()

    def cut(self) -> None:
        """Nothing comes through any more."""
        self._loop.call_soon_threadsafe(self._cut)

    def limit(self, bytes_per_s: int | None) -> None:
        """Limit each connection to this rate each way; None removes the limit."""
        self._bytes_per_s = bytes_per_s

    def heal(self) -> None:
        """New connections come through again."""
        self._loop.call_soon_threadsafe(setattr, self, "_whole", True)


@contextmanager
def link_to(target: str) -> Iterator[Link]:
    """A link to `target`, in a thread of its own."""
    link = Link(target)
    link._loop.run_until_complete(link._serve())
    thread = threading.Thread(target=link._loop.run_forever)
    thread.start()
    try:
        yield link
    finally:
        link.cut()
        link._loop.call_soon_threadsafe(link._loop.stop)
        thread.join()
        for task in asyncio.all_tasks(link._loop):
            task.cancel()
        link._loop.run_until_complete(asyncio.sleep(0))
        link._loop.close()
