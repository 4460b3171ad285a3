"""The bases of the synchronous client's classes, which drive an object of the asynchronous client.

`client/generate_sync.py` writes those classes from the asynchronous ones.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, TypeVar

from etfarm.client.transport.thread_loop import Loop

Answer = TypeVar("Answer")


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
