"""Step 10, command line: what is written line by line where there is no terminal: pipes, logs and CI."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

from etfarm.client.formats import units


class Lines:
    """What every command says on its way. Lines that were written stay.

    Args:
        write: takes one line without its end.
    """

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._said: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Nothing is left to take away."""

    def status(self, text: str) -> None:
        """Writes the sentence, once."""
        if text not in self._said:
            self._said.add(text)
            self._write(text)

    def moved(self, done: int, total: int) -> None:
        """Writes the size when all is there."""
        if done == total:
            self._write(f"Uploaded {units.size(total)}.")
