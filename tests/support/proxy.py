"""A TCP link that can be cut and healed, between an agent and a server on loopback."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress


class Link:
    """Forwards a loopback port to another; `cut` drops what is open and refuses what comes, `stall` holds back all bytes without
    closing anything, and `heal` lets everything through again.

    Args:
        source: the loopback address that the target sees, such as 127.0.0.2.
    """

    def __init__(self, target: str, source: str = "") -> None:
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self._from = (source, 0) if source else None
        self._loop = asyncio.new_event_loop()
        self._whole = True
        self._flowing = asyncio.Event()
        self._flowing.set()
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
        try:
            there_reader, there_writer = await asyncio.open_connection(self._host, self._port, local_addr=self._from)
        except OSError:  # the server is away
            writer.close()
            return
        self._open |= {writer, there_writer}
        with suppress(asyncio.CancelledError):  # at the end of the link
            await asyncio.gather(self._pump(reader, there_writer), self._pump(there_reader, writer))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.CancelledError):
            while data := await reader.read(65536):
                await self._flowing.wait()
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

    def _do(self, change: Callable[[], None]) -> None:
        """Change the link; the change has taken effect when this returns."""

        async def do() -> None:
            change()

        asyncio.run_coroutine_threadsafe(do(), self._loop).result()

    def cut(self) -> None:
        """Nothing comes through any more."""
        self._do(self._cut)

    def limit(self, bytes_per_s: int | None) -> None:
        """Limit each connection to this rate each way; None removes the limit."""
        self._bytes_per_s = bytes_per_s

    def stall(self) -> None:
        """Hold back all bytes, also those of new connections; both ends still believe that they are connected."""
        self._do(self._flowing.clear)

    def heal(self) -> None:
        """What was held back and new connections come through again, at full rate."""
        self._bytes_per_s = None
        self._do(self._heal)

    def _heal(self) -> None:
        self._whole = True
        self._flowing.set()

    async def _end(self) -> None:
        assert self._server is not None
        self._server.close()
        self._cut()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @contextmanager
    def running(self) -> Iterator[Link]:
        """Forward bytes, in a thread of its own."""
        thread = threading.Thread(target=self._loop.run_forever)
        thread.start()
        try:
            asyncio.run_coroutine_threadsafe(self._serve(), self._loop).result()
            yield self
        finally:
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            thread.join()
            self._loop.close()


def link_to(target: str, source: str = "") -> AbstractContextManager[Link]:
    """A link to `target`, in a thread of its own."""
    return Link(target, source).running()
