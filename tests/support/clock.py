"""The wall clock of single processes, which a test sets: Debian's libfaketime. The monotonic clock stays the real one."""

from __future__ import annotations

from pathlib import Path

import pytest


def skewed_by(seconds: int) -> dict[str, str]:
    """Return the variables of a process whose clock is always this far ahead, which costs it less than a clock that may jump."""
    return {
        "LD_PRELOAD": str(_library()), "FAKETIME": f"{seconds:+d}s", "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "FAKETIME_DISABLE_SHM": "1",
    }  # fmt: skip


def _library() -> Path:
    libraries = sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))
    if not libraries:
        pytest.skip("needs a wall clock that can be set: apt-get install faketime")
    return libraries[0]


class WallClock:
    """The clock of the processes that were started with `environment`, in seconds ahead of the machine's."""

    def __init__(self, file: Path) -> None:
        self._library, self._file = _library(), file
        self.jump(0)

    def jump(self, ahead_s: int) -> None:
        """Set the clock."""
        part = self._file.with_suffix(".part")
        part.write_text(f"{ahead_s:+d}\n")
        part.rename(self._file)

    @property
    def environment(self) -> dict[str, str]:
        """The variables of a process with this clock."""
        return {
            "LD_PRELOAD": str(self._library), "FAKETIME_TIMESTAMP_FILE": str(self._file), "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1", "FAKETIME_DISABLE_SHM": "1",  # which a killed process would leave
        }  # fmt: skip

    @property
    def within(self) -> list[str]:
        """What stands before a command that gets this clock."""
        return ["env", *(f"{name}={value}" for name, value in self.environment.items())]
