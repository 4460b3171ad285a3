"""Evidence of why the former server of a data folder died.

Two kinds of death may be a job's fault, and leave evidence: a fault of the process itself, such as SIGSEGV, an abort, or the
SIGABRT of the service manager's watchdog, whose traceback `faulthandler` writes; and the OOM killer, whose victims the kernel
counts. A SIGKILL from outside, a power cut, or a stop that took too long leaves none.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import time
from pathlib import Path
from typing import Final

import structlog

from etfarm.server.jobs.takeups import find_left_in_hand, keep_uncounted, take_left_in_hand

log = structlog.get_logger()

FAULT: Final = "server.fault"
"""File in the data folder that has the traceback of a server that died by a fault of its own; empty while it lives."""
KILLS: Final = "server.oom-kills"
"""File in the data folder that has the boot id of the machine, and the number of processes that the OOM killer had ended."""

REFRESH_S: Final = 2.0
"""Pause in seconds between looks at the number: what the OOM killer ends while the server lives on is no evidence."""

FRESH_S: Final = 300.0
"""Age in seconds of the last look from which a higher number is no evidence: the OOM killer may have ended others since."""

_TRACE_CHARACTERS: Final = 8_000


class Evidence:
    """What a server leaves in its data folder for its successor.

    Args:
        vmstat: the kernel's counters. `oom_kill` includes those of all containers, and of limits of cgroups.
        boot_id: the file with the id of the machine's boot.
    """

    def __init__(
        self, data: Path, *, vmstat: Path = Path("/proc/vmstat"), boot_id: Path = Path("/proc/sys/kernel/random/boot_id")
    ) -> None:
        self._data, self._fault, self._kills = data, data / FAULT, data / KILLS
        self._vmstat, self._boot_id = vmstat, boot_id
        self._noted = ""

    def find_suspects(self) -> dict[str, int]:
        """Return the jobs that the death of the former server counts for, as of `take_left_in_hand`; none without evidence.

        They are kept until they are counted. From now on, collect evidence of this process.
        """
        died_of, left = self._find_cause(), find_left_in_hand(self._data)
        suspects = keep_uncounted(self._data, left if died_of else {})
        self._begin()
        take_left_in_hand(self._data)
        if died_of and left:
            log.warning("the former server's death counts for the jobs that it was handling", evidence=died_of, jobs=sorted(left))
        elif left:
            log.info("the former server was ended from outside, so its jobs are resumed at once", handled=len(left))
        return suspects

    def _begin(self) -> None:
        # Not through a link, which would let this process truncate another file.
        number = os.open(self._fault, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        faulthandler.enable(number)  # open until the process ends
        self.note(self._count_kills())

    def _find_cause(self) -> str:
        """Return what the former server died of, empty without evidence."""
        trace, former, kills = _read(self._fault), _read(self._kills), self._count_kills()
        if trace:
            what = trace.splitlines()[0].removeprefix("Fatal Python error: ")
            current = trace[max(trace.find("Current thread"), 0) :]  # the other threads come first
            log.error("the former server died by a fault of its own", fault=what, traceback=current[:_TRACE_CHARACTERS])
            return what
        if _is_more(former, kills) and time.time() - self._kills.stat().st_mtime < FRESH_S:
            what = "the kernel ran out of memory"
            log.error("the former server ended while the kernel's OOM killer ended processes", before=former, now=kills)
            return what
        return ""

    async def watch(self) -> None:
        """Keep the number of processes that the OOM killer ended up to date."""
        while True:
            await asyncio.sleep(REFRESH_S)
            self.note(self._count_kills())

    def note(self, kills: str) -> None:
        """Record the number, and when that was."""
        if not kills:
            return
        try:
            if kills != self._noted:
                self._noted = kills
                self._kills.write_text(kills)
            os.utime(self._kills)
        except OSError as error:
            log.warning("the number of processes that the OOM killer ended cannot be recorded", why=str(error))

    def _count_kills(self) -> str:
        """Return the boot id and the number, with a space between them; empty if the kernel does not count."""
        for line in _read(self._vmstat).splitlines():
            name, _, number = line.partition(" ")
            if name == "oom_kill":
                return f"{_read(self._boot_id)} {number}"
        return ""


def _is_more(before: str, now: str) -> bool:
    (boot_before, _, number_before), (boot_now, _, number_now) = before.partition(" "), now.partition(" ")
    is_known = number_before.isdecimal() and number_now.isdecimal()
    return boot_before == boot_now and is_known and int(number_now) > int(number_before)


def _read(file: Path) -> str:
    """Return a file's text without surrounding white space; empty if it cannot be read."""
    try:
        return file.read_text(errors="replace").strip()
    except OSError:
        return ""
