"""The bases of the synchronous client's classes, which drive an object of the asynchronous client in a thread with a loop.

`client/generate_sync.py` writes those classes from the asynchronous ones.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, TypeVar

Answer = TypeVar("Answer")

CLEAN_UP_S = 2.0
"""Seconds that Ctrl-C waits for the calls that it cancelled."""


class Loop:
    """An event loop in a daemon thread, for the life of one Farm or LocalSession."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="etfarm client", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, Answer]) -> Answer:
        """Run the coroutine and return its result.

        Ctrl-C cancels the coroutine and gives it a moment to clean up.
        """
        ended = threading.Event()

        async def noted() -> Answer:
            try:
                return await coroutine
            finally:
                ended.set()

        future = asyncio.run_coroutine_threadsafe(noted(), self._loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            ended.wait(CLEAN_UP_S)
            raise

    def each(self, items: AsyncIterator[Answer]) -> Iterator[Answer]:
        """Yield the items of an async generator as they arrive."""

        async def following() -> tuple[bool, Answer | None]:
            try:
                return True, await anext(items)
            except StopAsyncIteration:
                return False, None

        try:
            while True:
                more, item = self.run(following())
                if not more:
                    return
                yield item  # type: ignore[misc]
        finally:
            self._close(items)

    def _close(self, items: AsyncIterator[Any]) -> None:
        """Close an async generator; one that outlives the loop was closed when the loop stopped."""
        close = getattr(items, "aclose", None)
        if close is None or self._loop.is_closed():
            return
        if threading.current_thread() is self._thread:
            # The garbage collector ended an abandoned iteration here: waiting for this loop would never end.
            self._loop.create_task(close())
        else:
            self.run(close())

    def stop(self) -> None:
        """End what still runs on the loop, and stop it and its thread."""
        self.run(self._end_all())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end_all(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._loop.shutdown_asyncgens()


class Blocking:
    """An asynchronous object without `await`."""

    _async: Any

    def __init__(self, wrapped: Any, running: Callable[[], Loop]) -> None:
        """Wrap an asynchronous object; `Farm` creates instances.

        Args:
            running: returns the event loop of the object, or raises if it does not run.
        """
        self._async = wrapped
        self._running = running

    def _run(self, coroutine: Coroutine[Any, Any, Answer]) -> Answer:
        """Run the coroutine and return its result."""
        try:
            loop = self._running()
        except BaseException:
            coroutine.close()  # a coroutine that never starts would cause a warning
            raise
        return loop.run(coroutine)

    def _each(self, items: AsyncIterator[Answer]) -> Iterator[Answer]:
        """Iterate over an asynchronous iterator."""
        return self._running().each(items)


class OwnLoop(Blocking):
    """An asynchronous object with an event loop of its own, in a thread that runs from `with` to `close`."""

    def __init__(self, wrapped: Any) -> None:
        """Wrap an asynchronous object, which is not open yet."""
        super().__init__(wrapped, self._require_loop)
        self._loop: Loop | None = None

    def _start(self) -> None:
        """Start the loop and open the object."""
        self._loop = Loop()
        try:
            self._loop.run(self._async.__aenter__())
        except BaseException:
            self._stop()
            raise

    def _stop(self) -> None:
        """Close the object and stop the loop."""
        loop, self._loop = self._loop, None
        if loop is not None:
            try:
                loop.run(self._async.close())
            finally:
                loop.stop()

    def _require_loop(self) -> Loop:
        if self._loop is None:
            raise self._async._not_open()
        return self._loop
