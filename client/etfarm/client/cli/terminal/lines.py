"""What every display of a waiting command shows, and how it is written without a terminal: for pipes, logs and CI."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

from etfarm.client.formats import units


class Lines:
    """A display of what a command waits for, and of its uploads, that writes lines, which stay.

    Args:
        write: takes one line without its end.
    """

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._written: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Do nothing: lines stay."""

    def status(self, text: str) -> None:
        """Write the sentence, once."""
        if text not in self._written:
            self._written.add(text)
            self._write(text)

    def moved(self, done: int, total: int) -> None:
        """Write the size when everything is uploaded."""
        if done == total:
            self._write(f"Uploaded {units.size(total)}.")
